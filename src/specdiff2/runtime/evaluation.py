"""``eval.py`` after validation: build the decoders, run the benchmark (or one prompt), write table and report."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specdiff2.data.chat import ChatEncoder
from specdiff2.data.multi_turn import num_turns
from specdiff2.decoding.autoregressive import AutoregressiveDecoder
from specdiff2.evaluation.agreement import first_divergence
from specdiff2.evaluation.batched import BatchedBenchmark
from specdiff2.evaluation.benchmark import Benchmark
from specdiff2.evaluation.budgeted_settings import BudgetSection
from specdiff2.evaluation.divergence import explain_divergences, token_gap
from specdiff2.evaluation.histories import answer_turns
from specdiff2.evaluation.records import RECORDS_FILE, read_records
from specdiff2.evaluation.shards import homes, measured
from specdiff2.evaluation.table import plain_table, split_notes
from specdiff2.models.verifier import HFVerifier
from specdiff2.protocols import Decoder
from specdiff2.rng import TorchRandomSource
from specdiff2.runtime.budgeted import evaluate_budgeted
from specdiff2.runtime.build import instantiate
from specdiff2.runtime.compilation import check_compilation, warm_passes
from specdiff2.runtime.factories import SamplerSettings
from specdiff2.runtime.grid import all_methods
from specdiff2.runtime.hf_settings import HFSettings
from specdiff2.runtime.named_drafters import (
    UNTRAINED,
    check_named_drafter,
    load_named_drafter,
    resolve_named_drafter,
    training_run,
)
from specdiff2.runtime.provenance import record_runtime
from specdiff2.runtime.rank_files import Share
from specdiff2.runtime.rebuild_report import rebuild, write_training_runs
from specdiff2.runtime.seen_prompts import unseen_prompts
from specdiff2.runtime.show import show_prompt, use_color
from specdiff2.runtime.speed_law import run_speed_law
from specdiff2.runtime.split import merging, part_of, share_of, telling
from specdiff2.types import ConfigError, Generation

log = logging.getLogger(__name__)


def evaluate(config: Mapping[str, Any], folder: Path) -> None:
    """Decode and report into ``folder``; one of several processes decodes there, and the report is that of the run.

    Raises:
        SpecDiffError: another process of a split evaluation has died, failed or is silent.
        ConfigError: a drafter folder is missing or drafts fewer positions than asked for (both found before any
            model loads), no drafter is shipped for the verifier, or a prompt does not fit.
        MismatchError: a drafter was trained for another verifier or tokenizer.
    """
    share = share_of(config)
    with telling(share, config):
        _evaluate(config, folder, share)


def _evaluate(config: Mapping[str, Any], folder: Path, share: Share | None) -> None:
    if config["task"] == "speed_law":
        run_speed_law(config, folder)
        return
    samplers = {name: instantiate(node) for name, node in all_methods(config).items()}
    for settings in samplers.values():
        settings.check() if isinstance(settings, HFSettings) else require_drafters(settings, config)
    if config["prompt"] is not None and not config["prompt"].strip():
        raise ConfigError(f"prompt={config['prompt']!r}: expected some text")
    if config["prompt"] is not None and config["task"] != "decode":
        raise ConfigError(f"prompt with task={config['task']}: one prompt is decoded and shown; use task=decode")
    check_batches(config)
    BudgetSection(**config["budget"])  # its own checks
    sources = None if config["prompt"] is not None else named_sources(config["benchmark"])
    check_compilation(config)
    verifier: HFVerifier = instantiate(config["verifier"])
    if config["runtime"]["compile"]:
        verifier.compile()
    record_runtime(folder, verifier.runtime_mode)
    samplers = {name: with_folders(settings, verifier, config) for name, settings in samplers.items()}
    if sources is not None:
        ours = [settings for settings in samplers.values() if isinstance(settings, SamplerSettings)]
        names = [name for settings in ours for name in settings.drafter_names()]
        sources = unseen_prompts(sources, names, verifier, drop=config["drop_overlap"])
    decoders = build_decoders(verifier, samplers, config)
    dtype = str(verifier.dtype).removeprefix("torch.")
    log.info("verifier %s in %s, %s", verifier.name, dtype, verifier.runtime_mode)
    if sources is None:
        show(config, verifier, decoders)
        return
    if config["task"] == "budgeted":
        evaluate_budgeted(config, verifier, decoders, sources, folder)
        return
    num_prompts = run_benchmarks(config, verifier, sources, decoders, folder, share)
    with contextlib.nullcontext(folder) if share is None else merging(share, config, folder, num_prompts) as run:
        if run is not None:
            report_on(run, config, verifier, samplers)


def check_batches(config: Mapping[str, Any]) -> None:
    """Raises ConfigError where ``batch_sizes`` meets what knows one prompt at a time."""
    if config["batch_sizes"] is None:
        return
    one_by_one = {
        "runtime.compile=true": config["runtime"]["compile"],
        f"task={config['task']}": config["task"] != "decode",
        "prompt": config["prompt"] is not None,
    }
    for key, given in one_by_one.items():
        if given:
            raise ConfigError(f"{key} with batch_sizes={config['batch_sizes']}: it decodes one prompt at a time; "
                              "leave one of the two out")  # fmt: skip


def report_on(
    folder: Path,
    config: Mapping[str, Any],
    verifier: HFVerifier,
    samplers: Mapping[str, SamplerSettings | HFSettings],
) -> None:
    """Summary, printed table and report of the records in ``folder``."""
    records = read_records(folder / RECORDS_FILE)
    if config["baseline"] and verifier.sampling.temperature == 0:
        explain_divergences(verifier, records, folder)  # bf16 near-ties: how near, and how many
    write_training_runs(folder, training_runs(samplers.values()))
    report = rebuild([folder])
    summary = read_summary(folder)
    print("\n" + "\n\n".join([plain_table(summary["rows"]), *split_notes(summary), f"report: {report}"]))
    if config["wandb"] is not None:
        from specdiff2.runtime.wandb_report import upload  # wandb takes seconds to import

        upload([folder], instantiate(config["wandb"]), fall_back=True)


def read_summary(folder: Path) -> dict[str, Any]:
    """``summary.json`` of a finished evaluation."""
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return summary


def training_runs(samplers: Iterable[SamplerSettings | HFSettings]) -> list[Path]:
    """Run folders the drafters came from (``read_training_runs`` leaves out what is gone)."""
    names = [name for s in samplers if isinstance(s, SamplerSettings) for name in s.drafter_names()]
    trained = [training_run(name) for name in names if name != UNTRAINED]
    # that of a shipped drafter is a mere name: it ran on another machine
    return [Path(run) for run in dict.fromkeys(trained) if run and Path(run).is_absolute()]


def with_folders(
    settings: SamplerSettings | HFSettings, verifier: HFVerifier, config: Mapping[str, Any]
) -> SamplerSettings | HFSettings:
    """``shipped`` replaced by the folder of the drafter that was trained for this very verifier.

    Raises:
        ConfigError: there is none.
    """
    if isinstance(settings, HFSettings):
        return settings
    return settings.with_drafters(lambda name: resolve_named_drafter(name, verifier, config))


def require_drafters(settings: SamplerSettings, config: Mapping[str, Any]) -> None:
    """``check_named_drafter`` for every drafter of the sampler."""
    num_drafts = settings.num_drafts if settings.drafters is None else 1  # of several drafters, each has its own
    for name in settings.drafter_names():
        check_named_drafter(name, settings.gamma, config, num_drafts)


def named_sources(node: Mapping[str, Any]) -> dict[str, Any]:
    """Prompts by benchmark name; a single source is named after its file or kind."""
    source = instantiate(node)
    if isinstance(source, Mapping):
        return {name: part.load() for name, part in source.items()}
    described = source.describe()
    name = Path(str(described.get("file") or described.get("name") or described["source"])).stem
    return {name: source.load()}


def build_decoders(
    verifier: HFVerifier, samplers: Mapping[str, SamplerSettings | HFSettings], config: Mapping[str, Any]
) -> dict[str, Decoder]:
    """The baseline (if asked for) and one decoder per sampler; a drafter named several times is loaded once."""
    decoders: dict[str, Decoder] = {"autoregressive": AutoregressiveDecoder(verifier)} if config["baseline"] else {}
    load = functools.cache(lambda name: load_named_drafter(name, verifier, config))
    for name, settings in samplers.items():
        if isinstance(settings, HFSettings):
            decoders[name] = settings.make(verifier)
        else:
            decoders[name] = settings.make(verifier, settings.gather(load))
    return decoders


def benchmark_maker(batch_sizes: Sequence[int] | None) -> Callable[..., Benchmark]:
    """What decodes one prompt at a time, or so many at once."""
    return Benchmark if batch_sizes is None else functools.partial(BatchedBenchmark, batch_sizes=batch_sizes)


def run_benchmarks(
    config: Mapping[str, Any],
    verifier: HFVerifier,
    sources: Mapping[str, Any],
    decoders: Mapping[str, Decoder],
    folder: Path,
    share: Share | None = None,
) -> dict[str, int]:
    """Records of every benchmark, or of this process's share of it, in ``folder`` (several: in folders below first).

    Returns the prompts of each whole benchmark by its place below the folder.
    """
    encoder = ChatEncoder.of(verifier)
    paths, num_prompts = list[Path](), dict[str, int]()
    limits = {key: config[key] for key in ("max_new_tokens", "seed", "stop_ids")} | {"stop_strings": config["stop"]}
    make = benchmark_maker(config["batch_sizes"])
    for name, prompts in sources.items():
        place = "." if len(sources) == 1 else f"benchmarks/{name}"
        part, home, others = None, folder / place, list[Path]()
        if share is not None:
            prompts, part = part_of(share, prompts, name)
            others = [one for one in homes(Path(config["paths"]["run"]), place) if one != home]
        num_prompts[place] = sum(map(num_turns, prompts)) if part is None else part.whole["num_prompts"]
        if not prompts:  # more processes than prompts
            continue
        benchmark = make(
            answer_turns(prompts, encoder, AutoregressiveDecoder(verifier), home, elsewhere=others, **limits),
            encoder,
            decoders,
            benchmark_name=name,
            num_warmup=config["num_warmup"],
            progress=share is None or share.speaks,
            part=part,
            **limits,
        )
        warm_passes(verifier, decoders, benchmark.longest_prompt, config["max_new_tokens"])
        known = measured(others, benchmark.fingerprint(), benchmark.prompt_tokens)
        paths.append(benchmark.run(home, elsewhere={(record.method, record.prompt_id) for record in known}))
    if len(sources) > 1 and share is None:
        (folder / RECORDS_FILE).write_bytes(b"".join(path.read_bytes() for path in paths))
    return num_prompts


def show(config: Mapping[str, Any], verifier: HFVerifier, decoders: dict[str, Decoder]) -> None:
    """Decode ``config['prompt']`` with every method and show the streaks."""

    def options() -> dict[str, Any]:
        rng = TorchRandomSource(config["seed"])  # every method gets the same random numbers
        stops = {"stop_ids": config["stop_ids"], "stop_strings": config["stop"]}
        return {"max_new_tokens": config["max_new_tokens"], "rng": rng, **stops}

    encode = ChatEncoder.of(verifier).encode
    warm_passes(verifier, decoders, len(encode(config["prompt"])), config["max_new_tokens"])
    generations = show_prompt(
        config["prompt"], decoders, encode, verifier.tokenizer,
        color=use_color(config["color"], sys.stdout), decode_options=options,
    )  # fmt: skip
    base = generations.get("autoregressive")
    if base is None or verifier.sampling.temperature > 0:
        return
    for name, generation in generations.items():
        if generation is not base:
            told = compare_tokens(verifier, encode(config["prompt"]), base, generation)
            seconds = generation.decode_s * base.num_tokens / max(generation.num_tokens, 1)
            faster = base.decode_s / seconds if seconds > 0 else 0.0
            print(f"{name}: {told}, {faster:.2f}x its speed")


def compare_tokens(verifier: HFVerifier, prompt: Sequence[int], base: Generation, generation: Generation) -> str:
    """In words: the same tokens, or from where on others and how far apart the two candidates are there."""
    position = first_divergence(base.tokens, generation.tokens)
    if position is None:
        return "the same tokens as the verifier alone"
    told = f"other tokens than the verifier alone from token {position} on"
    if position >= min(base.num_tokens, generation.num_tokens):
        return told
    gap = token_gap(verifier, [*prompt, *base.tokens[:position]], base.tokens[position], generation.tokens[position])[
        "margin_ulp"
    ]
    dtype = str(verifier.dtype).removeprefix("torch.")
    return f"{told} (logits of the two candidates {gap:.1f} spacings of {dtype} apart)"
