"""What scaling costs on this machine: the trainer by windows per step, rollouts by concurrency, stores by size.

    python experiments/014-scaling/measure.py trainer     # 16 minutes on 2 idle cores: 12 short trainings
    python experiments/014-scaling/measure.py rollouts    # 5 minutes: a `transformers serve` of SmolLM2 and its clients
    python experiments/014-scaling/measure.py store       # 3 minutes: synthetic stores of 10 thousand to 1 million
    python experiments/014-scaling/measure.py plan        # 1 minute: Qwen2.5-72B + DiffuCoder-7B on A100s, on paper

Each part runs the product's own commands in new processes and writes <part>.json beside this file.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil

from specdiff2.runtime.provenance import describe_machine, git_state, machine

HERE, ROOT = Path(__file__).resolve().parent, Path(__file__).resolve().parents[2]
STEPS = 24  # of a training; the first third warms up
NUM_PROMPTS, NEW_TOKENS = 16, 48  # of a rollout run


def run(command: list[str]) -> float:
    """Run one of our commands to its end; the largest resident size of all its processes together, MiB."""
    process = psutil.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            family = [process, *process.children(recursive=True)]
            peak = max(peak, sum(one.memory_info().rss for one in family))
        time.sleep(0.2)
    if process.returncode:
        sys.exit(f"{' '.join(command)} ended with {process.returncode}")
    return round(peak / 2**20, 1)


def trainer() -> dict[str, Any]:
    """Windows/s and memory: one process by windows per step, then the strategies at equal windows per step."""
    one = [(batch, windows, 64, []) for batch, windows in ((4, 8), (8, 16), (8, 32), (16, 32), (32, 32))]
    flat = [(16, 32, chunk, []) for chunk in (16, 512)]  # windows whose logits exist at once
    two = [(4, 32, 64, ["trainer.devices=2", "threads=1", *strategy]) for strategy in (
        ["trainer=ddp", "trainer.accelerator=cpu"],
        ["trainer=fsdp", "trainer.accelerator=cpu"],
        ["trainer=deepspeed_zero2", "trainer.accelerator=ds_cpu"],
        ["trainer=deepspeed_zero3", "trainer.accelerator=ds_cpu"],
    )]  # fmt: skip
    train(32, 8, 64, [])  # samples rollouts and keeps what the verifier says about each; not counted
    rows = [train(*settings) for settings in [*one, *flat, *two]]
    return {"command": "python train.py max_steps=24 ...", "rows": rows}


def train(batch_size: int, windows: int, chunk: int, options: list[str]) -> dict[str, Any]:
    """One short training of the demo's drafter on rollouts that are there."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = [f"hydra.run.dir={folder}", f"max_steps={STEPS}", f"data.module.batch_size={batch_size}",
                     f"data.module.windows_per_rollout={windows}", f"loss_chunk_windows={chunk}", "publish=false",
                     "callbacks.decoding_probe=null", "callbacks.streak_monitor.every_n_steps=1000",
                     "trainer.log_every_n_steps=1", "data.train_prompts.num_prompts=64",
                     "data.val_prompts.num_prompts=8", *options]  # fmt: skip
        peak_mib = run([sys.executable, "train.py", *overrides])
        with open(Path(folder) / "metrics.csv", encoding="utf-8") as file:
            points = [row for row in csv.DictReader(file) if row.get("train/windows_per_s")]
    speeds = [float(row["train/windows_per_s"]) for row in points[STEPS // 3 :]]
    counts = [float(row["train/num_windows"]) for row in points[STEPS // 3 :]]
    row = {
        "strategy": next((o for o in options if o.startswith("trainer=")), "trainer=default"),
        "processes": 2 if options else 1, "rollouts_per_process": batch_size, "windows_per_rollout": windows,
        "loss_chunk_windows": chunk, "windows_per_step": statistics.mean(counts),
        "windows_per_s": statistics.median(speeds), "peak_mib": peak_mib,
    }  # fmt: skip
    print(json.dumps(row), flush=True)
    return row


def rollouts() -> dict[str, Any]:
    """Rollouts/s of our own batches, and through a server by the number of requests at once."""
    rows = [sample("transformers", [f"data.rollouts.batch_size={size}"], size) for size in (1, 16)]
    with served() as url:
        rows += [sample("openai", ["engine=openai", f"engine.url={url}", f"engine.concurrency={n}"], n)
                 for n in (1, 4, 16)]  # fmt: skip
    return {"command": "python rollout.py engine=... ", "rows": rows}


def sample(engine: str, options: list[str], concurrency: int) -> dict[str, Any]:
    """A fresh store of NUM_PROMPTS greedy rollouts."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = [f"hydra.run.dir={folder}/run", f"paths.rollouts={folder}/rollouts", *options,
                     f"data.train_prompts.num_prompts={NUM_PROMPTS}", "data.val_prompts.num_prompts=1",
                     f"data.rollouts.max_new_tokens={NEW_TOKENS}"]  # fmt: skip
        run([sys.executable, "rollout.py", *overrides])
        [path] = Path(folder).glob("rollouts/**/train*/progress-000.json")
        facts = json.loads(path.read_text(encoding="utf-8"))
    row = {"engine": engine, "concurrency": concurrency, **facts}
    print(json.dumps(row), flush=True)
    return row


@contextlib.contextmanager
def served() -> Iterator[str]:
    """``transformers serve`` of the cached SmolLM2; its URL."""
    [model] = (ROOT / ".cache").glob("SmolLM2-135M-Instruct*")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = Path(sys.executable).with_name("transformers")
    server = subprocess.Popen(
        [program, "serve", str(model), "--host", "127.0.0.1", "--port", str(port), "--continuous-batching"],
        start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        for _ in range(600):
            with contextlib.suppress(httpx2.HTTPError):
                if httpx2.get(f"http://127.0.0.1:{port}/health").is_success:
                    break
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.killpg(server.pid, signal.SIGKILL)


def store() -> dict[str, Any]:
    """Peak memory of indexing and reading, by the number of rollouts; and of lists, as before."""
    script = [sys.executable, "tests/store_memory.py", "--rows"]
    rows = []
    for options in (["10000,100000,1000000"], ["10000,100000", "--lists"]):
        done = subprocess.run([*script, *options], cwd=ROOT, capture_output=True, text=True, check=True)
        found = [json.loads(line) for line in done.stdout.splitlines()]
        rows += [{"reads": "lists" if "--lists" in options else "index", **one} for one in found]
    return {"command": "python tests/store_memory.py --rows ...", "rows": rows}


def plan() -> dict[str, Any]:
    """What preflight says of 1, 2 and 4 nodes of eight A100-80GB, for an adapter and for all weights."""
    overrides = ["model=diffucoder", "verifier=qwen72b", "trainer=deepspeed_zero3", "trainer.devices=8",
                 "hardware=a100_80gb", "max_steps=60000", "load_verifier=false", "callbacks.decoding_probe=null",
                 "data.folder=/shared/rollouts", "preflight=true"]  # fmt: skip
    rows = []
    for trained, more in (("adapters of rank 32", []), ("all weights", ["model.lora=null"])):
        for nodes in (1, 2, 4):
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, "train.py", *overrides, *more, f"trainer.num_nodes={nodes}"]
                run([*command, f"hydra.run.dir={folder}"])
                found = json.loads((Path(folder) / "preflight.json").read_text(encoding="utf-8"))
            cluster = found["cluster"]
            row = next(row for row in cluster["nodes"] if row["num_nodes"] == nodes)
            rows.append({"trained": trained, **row, "exchanges": cluster["exchanges"], "paper": cluster["paper"]})
    return {"command": f"python train.py {' '.join(overrides)} ...", "rows": rows}


def main() -> None:
    """Measure one part and write it."""
    part = {"trainer": trainer, "rollouts": rollouts, "store": store, "plan": plan}[sys.argv[1]]
    commit, _ = git_state(ROOT)
    facts = {"commit": commit, "machine": describe_machine(machine()), "seed": 0} | part()
    path = HERE / f"{sys.argv[1]}.json"
    path.write_text(json.dumps(facts, indent=1, allow_nan=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
