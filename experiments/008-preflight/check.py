"""Are preflight's bounds bounds, and how near are its estimates? One run on a quiet machine.

    python experiments/008-preflight/check.py            # 2 minutes on 2 cores; writes results.json beside this file

Plans `eval.py` for SmolLM2-135M and the drafter that ships on this machine (its memory bandwidth and arithmetic are
measured in a second), then measures the same passes with decoding's own cost measurement, and the peak memory of the
process while it decodes. Expected: every measured time above its bound; estimates within a factor of a few, as two
CPU cores do not reach 70 % of the bandwidth of a large copy with small matrices.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

import torch

from specdiff2.data.chat import ChatEncoder
from specdiff2.decoding.cost_measure import measure_costs
from specdiff2.models.pretrained import load_drafter
from specdiff2.models.shipped import drafter_folder
from specdiff2.rng import TorchRandomSource
from specdiff2.runtime import build
from specdiff2.runtime.config_schema import EvalConfig
from specdiff2.runtime.factories import SamplerSettings
from specdiff2.runtime.preflight import make_plan, read_hardware
from specdiff2.runtime.preflight_settings import read_drafter, read_verifier
from specdiff2.runtime.preflight_speed import Method, round_cost, speed_of
from specdiff2.runtime.provenance import describe_machine, git_state, machine

HERE = Path(__file__).resolve().parent
CONTEXT, NODES = 136, (1, 9, 17, 33)  # tokens that measure_costs decodes behind, and sizes of trees


def main() -> None:
    """Plan, measure, compare, write."""
    config = build.check(build.load_config(HERE.parents[1] / "conf", "eval", ["preflight=true"], HERE), EvalConfig)
    hardware = read_hardware(config["hardware"])
    verifier_settings = read_verifier(config, hardware)
    drafter_settings = read_drafter(config, verifier_settings.shape, hardware)
    before = peak_gib()
    verifier = build.instantiate(config["verifier"])
    drafter = load_drafter(drafter_folder("shipped", verifier, config["model_name"]), verifier)
    table = measure_costs(
        verifier, drafter, drafter.gamma, sampling=verifier.sampling, node_counts=NODES, num_repeats=10
    )
    speeds = [speed_of(hardware, verifier_settings.dtype, peak=peak) for peak in (True, False)]
    rows = []
    for nodes in NODES:
        method = Method(f"{nodes} nodes", drafter.gamma, nodes)
        bound, estimate = (
            round_cost(verifier_settings, drafter_settings, method, CONTEXT, 2.0, speed, 0.0) for speed in speeds
        )
        rows.append(compare("verify", nodes, bound.verify_s, estimate.verify_s, table.verify_seconds(nodes)))
    rows.append(compare("draft", drafter.gamma, bound.draft_s, estimate.draft_s, table.draft_s))
    decode(verifier, drafter)
    plan = make_plan(config, "eval")
    memory = {"planned_gib": plan["phases"][0]["total_gib"], "measured_gib": peak_gib() - before}
    commit, _ = git_state(HERE)
    record = {
        "command": "python experiments/008-preflight/check.py", "commit": commit,
        "machine": describe_machine(machine()), "dtype": str(verifier.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(), "runtime": f"torch {torch.__version__} {verifier.runtime_mode}", "seed": 0,
        "hardware": plan["hardware"], "memory": memory, "rows": rows,
    }  # fmt: skip
    (HERE / "results.json").write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    print(f"memory: planned {memory['planned_gib']:.2f} GiB, process grew by {memory['measured_gib']:.2f} GiB")
    broken = [row for row in rows if row["measured_ms"] < row["bound_ms"]]
    sys.exit(f"a bound is none: {broken}" if broken else 0)


def compare(stage: str, size: int, bound_s: float, estimate_s: float, measured_s: float) -> dict[str, Any]:
    """One row, printed."""
    row = {
        "method": f"{stage} {size}", "bound_ms": bound_s * 1e3, "estimate_ms": estimate_s * 1e3,
        "measured_ms": measured_s * 1e3, "measured_over_estimate": measured_s / estimate_s,
    }  # fmt: skip
    print("  ".join(f"{key} {value:.2f}" if isinstance(value, float) else f"{value:<10}" for key, value in row.items()))
    return row


def decode(verifier: Any, drafter: Any) -> None:
    """One answer, so that caches and logits exist once."""
    prompt = ChatEncoder(verifier.tokenizer).encode("Why is the sky blue?")
    decoder = SamplerSettings(name="specdiff2", rule="greedy", drafter="", selection="self_selection", K=8).make(
        verifier, drafter
    )
    decoder.generate(prompt, max_new_tokens=32, rng=TorchRandomSource(0))


def peak_gib() -> float:
    """The most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    main()
