"""Records -> numbers. Pure: reads no model, so every table can be rebuilt without one.

Definitions (all pooled over rounds, then divided; never a mean of means):

    tokens_per_s   generated tokens / decode seconds; prefill apart, nothing after EOS
    speedup        tokens_per_s / autoregressive tokens_per_s over the prompts both decoded
    speedup_paper  the paper's protocol: (tokens - 1) / (prefill + decode seconds) per sample, mean over
                   samples, ratio to the autoregressive mean
    mean_streak    accepted draft tokens / rounds: the bonus token is NOT in it
    tau            committed tokens / verifier passes (= rounds): the bonus token IS in it. Slightly below
                   mean_streak + 1 where the last round of an output was cut and had no bonus token
    overhead       other seconds / (draft + verify + other)

Where several drafters drafted, by name (rows with one drafter or none lack these keys):

    drafter_rounds_won       rounds whose accepted tokens (at least one) all begin one of its drafts; a tie counts for
                             everyone in it
    drafter_win_share        the same, divided by all rounds with drafts, streak 0 included
    drafter_accepted_tokens  accepted draft tokens of the rounds it won

Where prompts were decoded several at once, ``evaluation.batched_rows`` says what differs.

A quantity without data is None (null), never NaN: a decoder that does not tell its rounds has no streak and no tau.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specdiff2.evaluation.accuracy import accuracy
from specdiff2.evaluation.agreement import lossless_check
from specdiff2.evaluation.batched_rows import batch_columns, batched_name, tokens_and_seconds
from specdiff2.evaluation.bootstrap import (
    BootstrapOptions,
    Interval,
    ratio_difference_interval,
    ratio_interval,
    ratio_of_ratios_interval,
)
from specdiff2.evaluation.curves import position_curves
from specdiff2.evaluation.json_files import read_json, write_json
from specdiff2.evaluation.records import DIVERGENCES_FILE, RECORDS_FILE, Record, read_records
from specdiff2.types import ConfigError, CorruptFileError

Summary = dict[str, Any]
HEADER_KEYS = ("command", "commit", "machine", "dtype", "threads", "runtime", "seed")
BASELINE = "autoregressive"
_DEFAULT = BootstrapOptions()


def ratio(numerator: float, denominator: float) -> float | None:
    """None instead of a division by zero."""
    return numerator / denominator if denominator else None


def summarize(records: Iterable[Record], *, baseline: str = BASELINE, options: BootstrapOptions = _DEFAULT) -> Summary:
    """Rows and comparisons of every (benchmark, temperature, method), warm-up left out.

    Returns:
        ``{"rows": [...], "comparisons": [...], "bootstrap": {...}}``, strict-JSON ready. Methods keep the
        order in which they first appear, which the benchmark makes the order of its ``decoders``.

    Raises:
        CorruptFileError: a prompt twice under one method, or rounds that do not add up to the tokens.
    """
    groups: dict[tuple[str, float], dict[str, list[Record]]] = {}
    for record in records:
        if not record.warmup:
            _check_counts(record)
            methods = groups.setdefault((record.benchmark, record.temperature), {})
            methods.setdefault(record.method, []).append(record)
    rows, comparisons = [], []
    for methods in groups.values():
        for name, group in methods.items():
            _check_unique(name, group)
            rows.append(_row(group, methods, baseline, options))
        drafted = [name for name, group in methods.items() if any(r.num_drafted for g in group for r in g.rounds)]
        comparisons += [
            streak_difference(methods[first], methods[second], options)
            for index, second in enumerate(drafted)
            for first in drafted[:index]
            if methods[first][0].batch_size == methods[second][0].batch_size
        ]
    bootstrap = {"unit": "prompt", "paired": True, **asdict(options)}
    return {"rows": rows, "comparisons": comparisons, "bootstrap": bootstrap}


def _row(
    group: Sequence[Record], methods: Mapping[str, Sequence[Record]], baseline: str, options: BootstrapOptions
) -> dict[str, Any]:
    """All numbers of one method on one benchmark at one temperature.

    Of several prompts at once, speed is compared with the baseline at the same batch size, tokens with that at 1.
    """
    first = group[0]
    same = batched_name(baseline, first.batch_size)
    single = methods.get(baseline) if first.method != baseline else None
    num_tokens, decode_s = sum(len(r.tokens) for r in group), sum(r.decode_s for r in group)
    return {
        "method": first.method,
        "benchmark": first.benchmark,
        "temperature": first.temperature,
        "gamma": first.gamma,
        "num_drafts": first.num_drafts,
        "runtime": first.runtime,
        "num_prompts": len(group),
        "num_tokens": num_tokens,
        "decode_s": decode_s,
        "prefill_s": sum(r.prefill_s for r in group),
        "tokens_per_s": ratio(num_tokens, decode_s),
        **_speedup(group, methods.get(same), first.method == same, options),
        **batch_columns(group, methods.get(baseline), options),
        **_streak(group, options),
        **_wins(group),
        **_stages(group),
        "stop_reasons": {reason: sum(r.stop_reason == reason for r in group) for reason in ("eos", "stop", "length")},
        "accuracy": accuracy(group),
        # at T>0 the law is preserved, not the tokens: comparing them would mean nothing
        "lossless_check": lossless_check(single, group) if single and first.temperature == 0 else None,
    }


def _speedup(
    group: Sequence[Record], reference: Sequence[Record] | None, is_baseline: bool, options: BootstrapOptions
) -> dict[str, Any]:
    """Speed against the baseline over the prompts both decoded; 1 for the baseline itself."""
    if is_baseline:
        return {"speedup": 1.0, "speedup_ci": None, "speedup_paper": 1.0, "speedup_paper_ci": None, "num_paired": 0}
    mine, theirs = paired(group, reference or [])
    pooled, pooled_base = tokens_and_seconds(mine), tokens_and_seconds(theirs)
    # a sample's seconds in a batch are its share, not the time it took: the paper's protocol says nothing about it
    alone = group[0].batch_size in (None, 1)
    paper, paper_base = ([(paper_tokens_per_s(r) or 0.0, 1.0) for r in side if alone] for side in (mine, theirs))
    return {
        "speedup": _ratio_of_ratios(pooled, pooled_base),
        "speedup_ci": _listed(ratio_of_ratios_interval(pooled, pooled_base, options)),
        "speedup_paper": _ratio_of_ratios(paper, paper_base),
        "speedup_paper_ci": _listed(ratio_of_ratios_interval(paper, paper_base, options)),
        "num_paired": len(mine),
    }


def _streak(group: Sequence[Record], options: BootstrapOptions) -> dict[str, Any]:
    """Streak, tau and both curves."""
    rounds = [r for record in group for r in record.rounds]
    accepted, num_rounds = zip(*accepted_and_rounds(group), strict=True)
    curves = position_curves(rounds, group[0].gamma if any(r.num_drafted for r in rounds) else 0)
    return {
        "num_rounds": len(rounds) if rounds or not any(record.tokens for record in group) else None,
        "mean_streak": ratio(sum(r.num_accepted for r in rounds), len(rounds)),
        "mean_streak_ci": _listed(ratio_interval(accepted, num_rounds, options)),
        "tau": ratio(sum(r.num_committed for r in rounds), len(rounds)),
        "tau_includes_bonus": True,
        "accept_rate": curves.accept_rate,
        "survival": curves.survival,
        "num_reached": curves.num_reached,
        "mean_nodes": ratio(sum(r.num_nodes for r in rounds), len(rounds)),
    }


def _wins(group: Sequence[Record]) -> dict[str, Any]:
    """What each of several drafters contributed; nothing without them."""
    names = list(dict.fromkeys(name for record in group for name in record.drafters or ()))
    if not names:
        return {}
    rounds, won, tokens = 0, dict.fromkeys(names, 0), dict.fromkeys(names, 0)
    for record in group:
        for one in record.rounds:
            rounds += one.winners is not None
            for name in (record.drafters[winner] for winner in one.winners or () if record.drafters):
                won[name] += 1
                tokens[name] += one.num_accepted
    return {
        "drafter_rounds_won": won,
        "drafter_win_share": {name: ratio(count, rounds) for name, count in won.items()},
        "drafter_accepted_tokens": tokens,
    }


def _stages(group: Sequence[Record]) -> dict[str, Any]:
    """Milliseconds of each stage per round, and the share spent outside both models."""
    rounds = [r for record in group for r in record.rounds]
    seconds = {
        "draft": sum(r.draft_s for r in rounds),
        "verify": sum(r.verify_s for r in rounds),
        "other": sum(r.other_s for r in rounds),
    }
    stages: dict[str, Any] = {
        f"{name}_ms": None if not rounds else 1000.0 * total / len(rounds) for name, total in seconds.items()
    }
    stages["overhead"] = ratio(seconds["other"], sum(seconds.values()))
    return stages


def paper_tokens_per_s(record: Record) -> float | None:
    """(tokens - 1) / (prefill + decode seconds): the paper's per-sample speed, in tokens per second."""
    return ratio(max(len(record.tokens) - 1, 0), record.prefill_s + record.decode_s)


def paired(first: Sequence[Record], second: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """The records of the prompts both decoded, in the same order."""
    other = {record.prompt_id: record for record in second}
    mine = [record for record in first if record.prompt_id in other]
    return mine, [other[record.prompt_id] for record in mine]


def accepted_and_rounds(records: Iterable[Record]) -> list[tuple[float, float]]:
    """(accepted draft tokens, rounds) of each prompt."""
    return [(float(sum(r.num_accepted for r in record.rounds)), float(len(record.rounds))) for record in records]


def streak_difference(
    first: Sequence[Record], second: Sequence[Record], options: BootstrapOptions = _DEFAULT
) -> dict[str, Any]:
    """Mean streak of ``second`` minus that of ``first`` over shared prompts, with a paired interval."""
    left, right = (accepted_and_rounds(side) for side in paired(first, second))
    means = [ratio(sum(a for a, _ in side), sum(n for _, n in side)) for side in (left, right)]
    known = means[0] is not None and means[1] is not None
    return {
        "benchmark": first[0].benchmark,
        "temperature": first[0].temperature,
        "from": first[0].method,
        "to": second[0].method,
        "num_paired": len(left),
        "mean_streak_difference": (means[1] or 0.0) - (means[0] or 0.0) if known else None,
        "ci": _listed(ratio_difference_interval(right, left, options)),
    }


def write_summary(folder: Path | str, header: dict[str, Any] | None = None, *, baseline: str = BASELINE) -> Summary:
    """Summarise ``folder/records.jsonl`` into ``folder/summary.json`` (atomic) and return it.

    Args:
        header: overrides of the provenance fields, which are otherwise read from ``folder/run.json``;
            a field known to neither is null.

    Raises:
        ConfigError: no records in the folder.
    """
    folder = Path(folder)
    path = folder / RECORDS_FILE
    if not path.exists():
        raise ConfigError(f"{path} does not exist: expected the records of a benchmark; run eval.py first")
    known: dict[str, Any] = {**(read_json(folder / "run.json", "a run's file; delete it") or {}), **(header or {})}
    summary: Summary = {key: known.get(key) for key in HEADER_KEYS} | summarize(read_records(path), baseline=baseline)
    if known.get("split"):  # several processes (evaluation.shards)
        summary["split"] = known["split"]
    _add_margins(summary["rows"], folder / DIVERGENCES_FILE)
    write_json(folder / "summary.json", summary)
    return summary


def _add_margins(rows: list[dict[str, Any]], path: Path) -> None:
    """Extend each lossless check by what ``divergence.explain_divergences`` found out about the same outputs."""
    found = read_json(path, "a run's file; delete it")
    if found is None:
        return
    for one in found["methods"]:
        for row in rows:
            check = row["lossless_check"]
            same = (row["method"], row["benchmark"]) == (one["method"], one["benchmark"])
            if check and same and one["diverged"] == check["checked"] - check["identical"]:
                extra = {key: one.get(key) for key in ("max_margin_ulp", "num_unexplained")}
                check.update(extra, dtype=found["dtype"])


def _ratio_of_ratios(first: list[tuple[float, float]], second: list[tuple[float, float]]) -> float | None:
    mine, theirs = (ratio(sum(a for a, _ in side), sum(b for _, b in side)) for side in (first, second))
    return mine / theirs if mine is not None and theirs else None


def _listed(interval: Interval | None) -> list[float] | None:
    return list(interval) if interval else None


def _check_unique(method: str, group: Sequence[Record]) -> None:
    seen: set[str] = set()
    for record in group:
        if record.prompt_id in seen:
            raise CorruptFileError(
                f"prompt {record.prompt_id!r} appears twice under method {method!r} on {record.benchmark!r}: "
                "expected one record per prompt; summarise runs of different settings apart"
            )
        seen.add(record.prompt_id)


def _check_counts(record: Record) -> None:
    committed = sum(r.num_committed for r in record.rounds)
    if record.rounds and committed != len(record.tokens):
        raise CorruptFileError(
            f"prompt {record.prompt_id!r}, method {record.method!r}: rounds committed {committed} tokens, the output "
            f"has {len(record.tokens)}: expected equal numbers (nothing after EOS counts); the decoder miscounts"
        )
