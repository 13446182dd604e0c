"""Why outputs differ at temperature 0: rounding, or a bug?

In bf16 a tree pass and a step-by-step pass round differently, so near-ties between the two best tokens may
fall either way. For each first divergence this asks the verifier, in one plain full forward over the common
prefix, how far apart the two candidates really are, in units of the dtype's spacing at that logit. A gap of
a few spacings is rounding; a large one is a bug. In float32 and wider no divergence is expected.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from specdiff2.evaluation.agreement import NEAR_TIE_SPACINGS, Divergence, divergences
from specdiff2.evaluation.json_files import write_json
from specdiff2.evaluation.metrics import BASELINE
from specdiff2.evaluation.records import DIVERGENCES_FILE, Record


@torch.inference_mode()
def explain_divergences(
    verifier: Any, records: Sequence[Record], folder: Path | str | None = None, *, baseline: str = BASELINE
) -> dict[str, Any]:
    """Margins at every first divergence from the baseline's tokens at temperature 0.

    Args:
        verifier: an ``HFVerifier`` (its ``model``, ``vocab_size`` and ``device`` are used).
        folder: writes ``divergences.json`` there when given.

    Returns:
        ``{"dtype", "methods": [{"method", "benchmark", "checked", "diverged", "rate", "max_margin_ulp",
        "num_unexplained"}], "divergences": [...]}``; unexplained: no near-tie, or one output had ended.
    """
    greedy = [record for record in records if record.temperature == 0 and not record.warmup]
    methods, explained = [], []
    for benchmark in dict.fromkeys(record.benchmark for record in greedy):
        here = [record for record in greedy if record.benchmark == benchmark]
        reference = [record for record in here if record.method == baseline]
        by_id = {record.prompt_id: record for record in reference}
        for method in dict.fromkeys(record.method for record in here if record.method != baseline):
            checked, found = divergences(reference, [record for record in here if record.method == method])
            rows = [
                {"method": method, "benchmark": benchmark, **explain(verifier, by_id[d.prompt_id], d)} for d in found
            ]
            margins = [row["margin_ulp"] for row in rows if row["margin_ulp"] is not None]
            methods.append(
                {
                    "method": method,
                    "benchmark": benchmark,
                    "checked": checked,
                    "diverged": len(found),
                    "rate": len(found) / checked if checked else None,
                    "max_margin_ulp": max(margins, default=None),
                    "num_unexplained": len(rows) - sum(margin <= NEAR_TIE_SPACINGS for margin in margins),
                }
            )
            explained += rows
    result = {"dtype": _dtype_name(verifier), "methods": methods, "divergences": explained}
    if folder is not None:
        write_json(Path(folder) / DIVERGENCES_FILE, result)
    return result


def explain(verifier: Any, reference: Record, divergence: Divergence) -> dict[str, Any]:
    """The verifier's logits at one divergence, over prompt + common tokens.

    ``margin`` = |logit of the reference's token - logit of the method's token|; null where one output had
    ended. ``top2_margin`` = best minus second best logit. ``*_ulp`` divides by the dtype's spacing there.
    """
    if reference.prompt_ids is None:
        raise ValueError(f"record of prompt {reference.prompt_id!r} has no prompt_ids: it was not written by Benchmark")
    prefix = [*reference.prompt_ids, *reference.tokens[: divergence.position]]
    return {**divergence.to_dict(), **token_gap(verifier, prefix, divergence.expected, divergence.got)}


@torch.inference_mode()
def token_gap(verifier: Any, prefix: Sequence[int], expected: int | None, got: int | None) -> dict[str, Any]:
    """The verifier's two best tokens after ``prefix``, and the gap of ``expected`` and ``got``; see ``explain``."""
    input_ids = torch.tensor([list(prefix)], device=verifier.device)
    raw = verifier.model(input_ids=input_ids).logits[0, -1, : verifier.vocab_size]
    logits = raw.double()
    top = logits.topk(2)
    spacing = _spacing(float(top.values[0]), raw.dtype)
    top2_margin = float(top.values[0] - top.values[1])
    margin = None
    if expected is not None and got is not None:
        margin = abs(float(logits[expected] - logits[got]))
    return {
        "top2": top.indices.tolist(),
        "top2_margin": top2_margin,
        "top2_margin_ulp": top2_margin / spacing,
        "margin": margin,
        "margin_ulp": None if margin is None else margin / spacing,
    }


def _spacing(value: float, dtype: torch.dtype) -> float:
    """Distance between neighbouring numbers of ``dtype`` around ``value``."""
    exponent = math.floor(math.log2(abs(value))) if value else -14
    return float(torch.finfo(dtype).eps * 2.0**exponent)


def _dtype_name(verifier: Any) -> str:
    return str(next(verifier.model.parameters()).dtype).removeprefix("torch.")
