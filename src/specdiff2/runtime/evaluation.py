"""``eval.py`` after validation: build the decoders, run the benchmark (or one prompt), write table and report."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from specdiff2.data.chat import ChatEncoder
from specdiff2.decoding.autoregressive import AutoregressiveDecoder
from specdiff2.evaluation.benchmark import Benchmark
from specdiff2.evaluation.divergence import explain_divergences
from specdiff2.evaluation.metrics import write_summary
from specdiff2.evaluation.records import RECORDS_FILE, read_records
from specdiff2.evaluation.report import write_report
from specdiff2.evaluation.table import plain_table
from specdiff2.models.pretrained import load_drafter, read_training_info
from specdiff2.models.verifier import HFVerifier
from specdiff2.protocols import Decoder, Drafter
from specdiff2.rng import TorchRandomSource
from specdiff2.runtime.build import instantiate
from specdiff2.runtime.factories import SamplerSettings
from specdiff2.runtime.show import show_prompt, use_color
from specdiff2.types import ConfigError

log = logging.getLogger(__name__)
UNTRAINED = "untrained"


def evaluate(config: Mapping[str, Any], folder: Path) -> None:
    """Decode and report into ``folder``.

    Raises:
        ConfigError: a drafter folder is missing (found before any model loads), or a prompt does not fit.
        MismatchError: a drafter was trained for another verifier or tokenizer.
    """
    nodes = config["methods"] or {config["sampler"]["name"]: config["sampler"]}
    samplers = {name: instantiate(node) for name, node in nodes.items()}
    for settings in samplers.values():
        require_drafter(settings.drafter)
    if config["prompt"] is not None and not config["prompt"].strip():
        raise ConfigError(f"prompt={config['prompt']!r}: expected some text")
    sources = None if config["prompt"] is not None else named_sources(config["benchmark"])
    verifier = instantiate(config["verifier"])
    decoders = build_decoders(verifier, samplers, config)
    log.info("verifier %s in %s", verifier.name, str(verifier.dtype).removeprefix("torch."))
    if sources is None:
        show(config, verifier, decoders)
        return
    records = read_records(run_benchmarks(config, verifier, sources, decoders, folder))
    if config["baseline"] and verifier.sampling.temperature == 0:
        explain_divergences(verifier, records, folder)  # bf16 near-ties: how near, and how many
    summary = write_summary(folder)
    report = write_report([folder, *training_runs(samplers.values())])
    print(f"\n{plain_table(summary['rows'])}\n\nreport: {report}")


def training_runs(samplers: Iterable[SamplerSettings]) -> list[Path]:
    """Run folders the drafters came from, as far as they are still there: the report shows their curves."""
    trained = [read_training_info(s.drafter).get("run") for s in samplers if s.drafter != UNTRAINED]
    return [Path(run) for run in dict.fromkeys(trained) if run and (Path(run) / "metrics.csv").is_file()]


def require_drafter(drafter: str) -> None:
    """Refuse a missing drafter folder with the command that makes one.

    Raises:
        ConfigError: there is no such folder.
    """
    if drafter != UNTRAINED and not Path(drafter).is_dir():
        raise ConfigError(
            f"drafter={drafter!r}: no such folder; train one with `python train.py` (about 15 minutes on 2 cores) or "
            f"`make demo`, name another folder, or use drafter={UNTRAINED} for the verifier's layers as copied"
        )
    if drafter != UNTRAINED:
        read_training_info(drafter)  # refuses a damaged config before the verifier loads


def named_sources(node: Mapping[str, Any]) -> dict[str, Any]:
    """Prompts by benchmark name; a single source is named after its file or kind."""
    source = instantiate(node)
    if isinstance(source, Mapping):
        return {name: part.load() for name, part in source.items()}
    described = source.describe()
    name = Path(str(described.get("file") or described.get("name") or described["source"])).stem
    return {name: source.load()}


def build_decoders(
    verifier: HFVerifier, samplers: Mapping[str, SamplerSettings], config: Mapping[str, Any]
) -> dict[str, Decoder]:
    """The baseline (if asked for) and one decoder per sampler; drafters in one folder are loaded once."""
    decoders: dict[str, Decoder] = {"autoregressive": AutoregressiveDecoder(verifier)} if config["baseline"] else {}
    drafters: dict[str, Drafter] = {}
    for name, settings in samplers.items():
        if settings.drafter not in drafters:
            fresh = settings.drafter == UNTRAINED
            drafter = instantiate(config["model"])(verifier) if fresh else load_drafter(settings.drafter, verifier)
            drafters[settings.drafter] = drafter.eval()
        decoders[name] = settings.make(verifier, drafters[settings.drafter])
    return decoders


def run_benchmarks(
    config: Mapping[str, Any],
    verifier: HFVerifier,
    sources: Mapping[str, Any],
    decoders: Mapping[str, Decoder],
    folder: Path,
) -> Path:
    """Records of every benchmark in ``folder/records.jsonl``; several are measured in folders of their own first."""
    encoder = ChatEncoder(verifier.tokenizer)
    paths = []
    for name, prompts in sources.items():
        benchmark = Benchmark(
            prompts,
            encoder,
            decoders,
            benchmark_name=name,
            max_new_tokens=config["max_new_tokens"],
            seed=config["seed"],
            num_warmup=config["num_warmup"],
            stop_strings=config["stop"],
        )
        paths.append(benchmark.run(folder if len(sources) == 1 else folder / "benchmarks" / name))
    if len(sources) > 1:
        (folder / RECORDS_FILE).write_bytes(b"".join(path.read_bytes() for path in paths))
    return folder / RECORDS_FILE


def show(config: Mapping[str, Any], verifier: HFVerifier, decoders: dict[str, Decoder]) -> None:
    """Decode ``config['prompt']`` with every method and show the streaks."""

    def options() -> dict[str, Any]:
        rng = TorchRandomSource(config["seed"])  # every method gets the same random numbers
        return {"max_new_tokens": config["max_new_tokens"], "rng": rng, "stop_strings": config["stop"]}

    generations = show_prompt(
        config["prompt"], decoders, ChatEncoder(verifier.tokenizer).encode, verifier.tokenizer,
        color=use_color(config["color"], sys.stdout), decode_options=options,
    )  # fmt: skip
    base = generations.get("autoregressive")
    if base is None or verifier.sampling.temperature > 0:
        return
    for name, generation in generations.items():
        if generation is not base:
            same = "the same tokens as" if generation.tokens == base.tokens else "other tokens (a near-tie) than"
            faster = base.decode_s / generation.decode_s if generation.decode_s > 0 else 0.0
            print(f"{name}: {same} the verifier alone, {faster:.2f}x its speed")
