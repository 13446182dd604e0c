"""Sections of the report around the numbers: training curves, sample text, provenance, glossary."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from specdiff2.evaluation import plots
from specdiff2.evaluation.metrics import HEADER_KEYS
from specdiff2.evaluation.plots import Series
from specdiff2.evaluation.records import Record
from specdiff2.evaluation.report_inputs import Curve, EvaluationRun, TrainingRun
from specdiff2.evaluation.report_style import card, cards, missing, section
from specdiff2.evaluation.table import method_label, split_notes

_MAX_SAMPLES = 2  # prompts shown; the others are in records.jsonl
_STREAKS = (  # metric, label, colour
    ("train/streak", "train", 1),
    ("val/streak", "held-out", 2),
    ("val/streak_greedy", "held-out, T=0", 3),
    ("probe/mean_streak", "decoded", 4),
)
_GLOSSARY = (
    ("streak", "Leading draft tokens accepted in a round, without the bonus token. Mean streak: accepted draft "
               "tokens / rounds."),
    ("bonus token", "The token the verifier adds itself after the last accepted draft token."),
    ("tau", "Tokens committed per verifier pass, bonus token included; also called block efficiency. Mean streak + 1, "
            "less the last round of an output where it was cut short."),
    ("accept_rate@j", "Share of the rounds that reached position j of the draft in which position j was accepted."),
    ("survival@j", "Probability that positions 1 to j are all accepted. Rounds cut by the end of the output count "
                   "as far as they were judged (product-limit estimate)."),
    ("gamma, K", "Drafted positions per round; drafts per round."),
    ("speed-up", "Decoding tokens/s over those of the verifier alone: same prompts, seeds, stop rules and machine."),
    ("paper's protocol", "(new tokens - 1) / total seconds of each output, prefill included, averaged over outputs, "
                         "as a ratio to the verifier alone."),
    ("overhead", "Share of a round outside the forward passes of drafter and verifier."),
)  # fmt: skip


def training(runs: Sequence[TrainingRun]) -> str:
    """Loss, streaks, and curves by position on held-out windows; one block per run."""
    lead = "Streaks on windows of stored rollouts are expected streaks; only a line named decoded was decoded."
    if not runs:
        return section("Training", lead, missing("No training run given: pass its folder to see its curves."))
    parts = []
    for run in runs:
        heading = f'<h3 class="group">{escape(str(run.folder))}</h3>' if len(runs) > 1 else ""
        parts.append(heading + _training_run(run))
    return section("Training", lead, *parts)


def _training_run(run: TrainingRun) -> str:
    last = max((curve[-1][0] for curve in run.curves.values()), default=0.0)
    marks = [(float(step), name) for name, step in run.stages[1:] if step <= last]
    items = []
    for name, loss, single in _losses(run, last):
        title = "Training loss" if single else f"Training loss, {name}"
        items.append(
            card(
                title,
                "Thin: as logged; bold: running mean" if len(loss) > plots.MANY_POINTS else "",
                _chart([Series("loss", *_xy(loss))], title, "loss per window"),
            )
        )
    streaks = [Series(label, *_xy(run.curves[key]), colour) for key, label, colour in _STREAKS if run.curves.get(key)]
    if streaks:
        note = f"Dashed: {marks[0][1]} starts" if marks else "Expected accepted draft tokens per window"
        items.append(card("Streak", note, _chart(streaks, "streak over training", "tokens per window", marks)))
    rate = run.curves.get("train/lr")
    if rate:
        drawing = _chart([Series("rate", *_xy(rate))], "learning rate", "learning rate", marks)
        items.append(card("Learning rate", "Of the first parameter group", drawing))
    items += _before_after(run, marks)
    if not items:
        return missing(f"{run.folder}: no training curves in its metrics.")
    return cards(*items)


def _losses(run: TrainingRun, last: float) -> list[tuple[str, Curve, bool]]:
    """The loss, cut at every change of the objective: losses of different objectives share no axis."""
    curve = run.curves.get("train/loss", [])
    starts = [(name, float(step)) for name, step in run.stages if step <= last] or [("", 0.0)]
    ends = [step for _, step in starts[1:]] + [float("inf")]
    parts = [
        (name, [(x, y) for x, y in curve if start <= x < end], len(starts) == 1)
        for (name, start), end in zip(starts, ends, strict=True)
    ]
    return [part for part in parts if part[1]]


def _before_after(run: TrainingRun, marks: Sequence[tuple[float, str]]) -> list[str]:
    """Held-out curves by position at the end of the first stage and at the end."""
    items = []
    for key, label in (("accept_rate", "conditional acceptance rate"), ("survival", "share of windows")):
        curves = [run.curves[f"val/{key}@{j}"] for j in range(1, 1 + _num_positions(run, key))]
        if not curves:
            continue
        moments = [(marks[0][0], "before", 2)] if marks else [(curves[0][0][0], "start", 0)]
        moments.append((curves[0][-1][0], "after" if marks else "end", 1))
        series = [
            Series(name, range(1, len(curves) + 1), [_value_at(curve, step) for curve in curves], colour)
            for step, name, colour in moments
        ]
        x_label = "position j in the draft window"
        drawing = plots.line_chart(
            series, label=f"held-out {key}", x_label=x_label, y_label=label, y_range=(0.0, 1.0), integer_x=True
        )
        note = f"Before and after {marks[0][1]}: expected acceptance of the teacher's tokens" if marks else ""
        items.append(card(f"{key}@j on held-out windows", note, drawing))
    return items


def _num_positions(run: TrainingRun, key: str) -> int:
    count = 0
    while run.curves.get(f"val/{key}@{count + 1}"):
        count += 1
    return count


def _value_at(curve: Curve, step: float) -> float | None:
    """The latest value not after ``step``."""
    return next((y for x, y in reversed(curve) if x <= step), None)


def _xy(curve: Curve) -> tuple[list[float], list[float]]:
    return [x for x, _ in curve], [y for _, y in curve]


def _chart(series: list[Series], label: str, y_label: str, marks: Sequence[tuple[float, str]] = ()) -> str:
    return plots.line_chart(series, label=label, x_label="optimizer step", y_label=y_label, marks=marks)


def samples(runs: Sequence[EvaluationRun]) -> str:
    """The first prompts with every speculative method's rounds coloured."""
    lead = "What each method really wrote, round by round."
    records = [record for run in runs for record in run.samples if any(r.num_drafted for r in record.rounds)]
    prompts = list(dict.fromkeys((record.benchmark, record.prompt_id) for record in records))[:_MAX_SAMPLES]
    if not prompts:
        return section(
            "Sample", lead, missing("No token texts in these records: samples are stored by newer benchmarks.")
        )
    key = (
        '<p class="key"><span class="acc">accepted draft tokens</span>'
        '<span class="bonus">the verifier\'s own token</span>'
        "A new round starts after each outlined token; neighbouring rounds alternate in colour.</p>"
    )
    blocks = []
    for index, (benchmark, prompt_id) in enumerate(prompts):
        mine = [record for record in records if (record.benchmark, record.prompt_id) == (benchmark, prompt_id)]
        content = f'<p class="prompt">{escape(mine[0].prompt or "")}</p>' + "".join(_sample(record) for record in mine)
        title = f"{benchmark}, prompt {prompt_id}"
        opened = " open" if index == 0 else ""
        summary = f"<summary>{escape(title)}</summary>"
        blocks.append(f'<div class="card"><details{opened} style="margin:0">{summary}{content}</details></div>')
    return section("Sample", lead, key, *blocks)


def _sample(record: Record) -> str:
    streak = sum(r.num_accepted for r in record.rounds) / len(record.rounds)
    facts = f"{len(record.tokens)} tokens in {len(record.rounds)} rounds, mean streak {streak:.2f}"
    return (
        f'<h3 style="margin-top:16px">{escape(method_label(record.method))}</h3><p class="note">{escape(facts)}</p>'
        f'<p class="gen">{coloured_rounds(record)}</p>'
    )


def coloured_rounds(record: Record) -> str:
    """Token texts with the accepted ones marked and the verifier's own outlined, one ``span`` per round."""
    pieces, position, parts = record.pieces or [], 0, []
    for index, one in enumerate(record.rounds, start=1):
        accepted = "".join(pieces[position : position + one.num_accepted])
        own = "".join(pieces[position + one.num_accepted : position + one.num_committed])
        position += one.num_committed
        hover = f"round {index}: {one.num_accepted} of {one.num_drafted} drafted tokens accepted"
        inner = f'<span class="acc">{_visible(accepted)}</span>' if accepted else ""
        inner += f'<span class="bonus">{_visible(own)}</span>' if own else ""
        parts.append(f'<span class="round" title="{hover}">{inner}</span>')
    return "".join(parts)


def _visible(text: str) -> str:
    """Escaped, with line breaks shown as a sign as well, so that a token of blanks can be seen."""
    return escape(text).replace("\n", '<span class="break">⏎</span>\n')


def provenance(runs: Sequence[EvaluationRun | TrainingRun]) -> str:
    """Where the numbers come from: one list per run."""
    blocks = []
    for run in runs:
        known: dict[str, Any] = {**run.provenance, **(run.summary if isinstance(run, EvaluationRun) else {})}
        kind = "Evaluation" if isinstance(run, EvaluationRun) else "Training"
        rows = [("folder", str(run.folder))] + [(key, _plain(known.get(key))) for key in HEADER_KEYS]
        rows += [("processes", note) for note in split_notes(known)]
        if known.get("dirty"):
            rows.append(("note", "the working tree had uncommitted changes"))
        listed = "".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in rows)
        details = "".join(
            f"<details><summary>{name}</summary><pre>{escape(_pretty(known[key]))}</pre></details>"
            for key, name in (("versions", "Versions"), ("config", "Resolved configuration"))
            if known.get(key)
        )
        blocks.append(card(f"{kind} run", "", f"<dl>{listed}</dl>{details}"))
    return section("Provenance", "Enough to run it again.", *blocks)


def glossary() -> str:
    """Terms used above."""
    listed = "".join(f"<dt>{escape(term)}</dt><dd>{escape(meaning)}</dd>" for term, meaning in _GLOSSARY)
    return section(
        "Glossary", "What the words mean here.", f'<div class="card"><dl class="glossary">{listed}</dl></div>'
    )


def _pretty(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)


def _plain(value: Any) -> str:
    return "not recorded" if value is None else str(value)
