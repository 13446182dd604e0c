"""The paper's qualitative claims as tests on paired comparisons: confirmed, not confirmed or contradicted.

A claim is a sentence, where the paper says it, and a kind of test over named arms (who plays which role is written in a
spec). A claim of several comparisons is confirmed where each of them is, contradicted where any one is.

    order        every arm beats the next one
    lead         the first arm beats every other one
    positions    the first arm beats the second in survival@j, at every position asked for (default: 3 to gamma)
    add_up       both beats each of the two alone (that it beats neither follows); their interaction is told, not judged
    interaction  the first gain (arm 1 over arm 2) is larger than the second one (arm 3 over arm 4)
    interior     of settings in order, one between the ends beats both ends

A spec, in YAML (paths as on a command line, relative to the working folder)::

    run: outputs/eval/fig12             # default of all claims and arms
    claims:
      - id: streak_order                # one of CLAIMS; or an id of your own with sentence, source, kind and metric
        arms: {streak: streak, distillspec: distillspec, base: {run: outputs/eval/fig2, method: base}}
        benchmark: gsm_symbolic         # default: all that the run has measured, pooled
        case: T=0                       # any text; to judge one claim several times
        note: why it does not hold here # any text, copied into the table

The list of claims is ``claim_list``, what the numbers mean is ``compare``. Knows no model.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import yaml

from specdiff2.evaluation.arms import Arm, read_run
from specdiff2.evaluation.bootstrap import BootstrapOptions
from specdiff2.evaluation.claim_list import CLAIMS, Claim
from specdiff2.evaluation.compare import Comparison, interaction, lead, trend
from specdiff2.evaluation.json_files import write_json
from specdiff2.types import ConfigError, CorruptFileError

CONFIRMED, NOT_CONFIRMED, CONTRADICTED = "confirmed", "not confirmed", "contradicted"
CLAIMS_FILE = "claims.json"
_DEFAULT = BootstrapOptions()
_ENTRY_KEYS = {"id", "arms", "run", "benchmark", "case", "note"}
_ROUNDING = 1e-9  # equal arms may differ by as much in floating point
Check = tuple[str, Comparison]


def verdict_of(comparison: Comparison) -> str:
    """By the side of the neutral value on which the whole interval lies."""
    if comparison.ci is None:
        return NOT_CONFIRMED
    low, high = comparison.ci
    if low > comparison.neutral + _ROUNDING:
        return CONFIRMED
    return CONTRADICTED if high < comparison.neutral - _ROUNDING else NOT_CONFIRMED


def judge(claim: Claim, arms: Mapping[str, Arm], options: BootstrapOptions = _DEFAULT) -> dict[str, Any]:
    """The claim's facts, its verdict and every comparison behind it, as strict JSON.

    Raises:
        ConfigError: the arms are not those of the claim, too few, or the kind of test is unknown.
        MismatchError: the arms must not be paired.
    """
    if claim.kind not in _KINDS:
        raise ConfigError(f"claim {claim.id!r}: kind {claim.kind!r}: expected one of {', '.join(_KINDS)}")
    make, fewest, most = _KINDS[claim.kind]
    roles = claim.roles or tuple(arms)
    if set(roles) != set(arms) or not fewest <= len(roles) <= (most or len(roles)):
        wanted = ", ".join(claim.roles) if claim.roles else f"{fewest} of them" if most else f"at least {fewest}"
        raise ConfigError(f"claim {claim.id!r} ({claim.kind}): arms {sorted(arms)}: expected {wanted}")
    checks, told = make(claim, {role: arms[role] for role in roles}, options)
    verdicts = [verdict_of(found) for _, found in checks]
    agreed = CONFIRMED if set(verdicts) == {CONFIRMED} else NOT_CONFIRMED
    return {
        "id": claim.id, "sentence": claim.sentence, "source": claim.source, "kind": claim.kind, "metric": claim.metric,
        "verdict": CONTRADICTED if CONTRADICTED in verdicts else agreed,
        "checks": [{"check": name, "verdict": verdict_of(found), **found.to_json()} for name, found in checks],
        "also": [{"check": name, **found.to_json()} for name, found in told],
        "arms": {role: arms[role].label for role in roles},
    }  # fmt: skip


def judge_spec(path: Path | str, options: BootstrapOptions = _DEFAULT) -> list[dict[str, Any]]:
    """Every claim of a spec file, judged in its order.

    Raises:
        ConfigError, CorruptFileError: the spec, or a run that it names, cannot be used.
        MismatchError: arms of a claim must not be paired.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"claims {path}: no such file; expected a YAML spec of claims")
    try:
        spec = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise CorruptFileError(f"claims {path}: not YAML ({error})") from error
    if not isinstance(spec, dict) or not isinstance(spec.get("claims"), list) or set(spec) - {"run", "claims"}:
        raise ConfigError(f"claims {path}: expected `claims:`, a list, and perhaps `run:`, and nothing else")
    read = functools.cache(read_run)
    results = []
    for entry in spec["claims"]:
        claim = _claim_of(entry)
        arms = {str(role): _arm_of(claim, entry, node, spec, read) for role, node in entry["arms"].items()}
        extra = {key: entry[key] for key in ("case", "benchmark", "note") if key in entry}
        results.append({**judge(claim, arms, options), **extra})
    return results


def _claim_of(entry: Any) -> Claim:
    known = {field.name for field in fields(Claim)}
    if not isinstance(entry, dict) or not isinstance(entry.get("arms"), dict) or not isinstance(entry.get("id"), str):
        raise ConfigError(f"claim {entry!r}: expected an `id` and `arms`, from roles to methods")
    unknown = sorted(entry.keys() - _ENTRY_KEYS - known)
    own: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in entry.items() if key in known}
    missing = sorted({"sentence", "source", "kind", "metric"} - own.keys())
    if unknown or (entry["id"] not in CLAIMS and missing):
        raise ConfigError(
            f"claim {entry['id']!r}: unknown keys {unknown}, or a claim of your own without {missing}: expected one of "
            f"{', '.join(CLAIMS)}, or an id of your own with sentence, source, kind and metric"
        )
    return replace(CLAIMS[entry["id"]], **own) if entry["id"] in CLAIMS else Claim(**own)


def _arm_of(claim: Claim, entry: dict[str, Any], node: Any, spec: dict[str, Any], read: Any) -> Arm:
    given = node if isinstance(node, dict) else {"method": node}
    folder = given.get("run", entry.get("run", spec.get("run")))
    if set(given) - {"run", "method"} or not isinstance(given.get("method"), str) or not isinstance(folder, str):
        raise ConfigError(f"claim {claim.id!r}: arm {node!r}: expected a method's name, or a run folder and a method")
    return read(Path(folder)).arm(given["method"], entry.get("benchmark"))


# ---------------------------------------------------------------- kinds of tests: (judged, only told)
def _lead(arms: Mapping[str, Arm], first: str, second: str, metric: str, options: BootstrapOptions) -> Check:
    found = lead(arms[first], arms[second], metric, options)
    return f"{first} {'/' if found.neutral else '-'} {second}", found


def _order(claim: Claim, arms: Mapping[str, Arm], options: BootstrapOptions) -> tuple[list[Check], list[Check]]:
    return [_lead(arms, a, b, claim.metric, options) for a, b in itertools.pairwise(arms)], []


def _first_leads(claim: Claim, arms: Mapping[str, Arm], options: BootstrapOptions) -> tuple[list[Check], list[Check]]:
    first, *others = arms
    return [_lead(arms, first, other, claim.metric, options) for other in others], []


def _positions(claim: Claim, arms: Mapping[str, Arm], options: BootstrapOptions) -> tuple[list[Check], list[Check]]:
    first, second = arms.values()
    gamma = max(record.gamma for record in first.records.values())
    asked = claim.positions or range(3, gamma + 1)
    checks = [(f"@{j}", lead(first, second, f"{claim.metric}@{j}", options)) for j in asked]
    if not checks:
        raise ConfigError(
            f"claim {claim.id!r}: {first.label} drafts {gamma} positions: expected 3 or more, or `positions`"
        )
    return checks, []


def _add_up(claim: Claim, arms: Mapping[str, Arm], options: BootstrapOptions) -> tuple[list[Check], list[Check]]:
    both, *alone, _ = arms
    together = _gain_difference(claim, arms, options)
    return [_lead(arms, both, one, claim.metric, options) for one in alone], [("interaction", together)]


def _interaction(claim: Claim, arms: Mapping[str, Arm], options: BootstrapOptions) -> tuple[list[Check], list[Check]]:
    one, two, three, four = arms
    gains = [_lead(arms, a, b, claim.metric, options) for a, b in ((one, two), (three, four))]
    found = _gain_difference(claim, arms, options)
    sign = "/" if found.neutral else "-"
    return [(f"({one} {sign} {two}) {sign} ({three} {sign} {four})", found)], gains


def _gain_difference(claim: Claim, arms: Mapping[str, Arm], options: BootstrapOptions) -> Comparison:
    one, two, three, four = arms.values()
    return interaction(one, two, three, four, claim.metric, options)


def _interior(claim: Claim, arms: Mapping[str, Arm], options: BootstrapOptions) -> tuple[list[Check], list[Check]]:
    found = trend(dict(arms), claim.metric, options, candidates=list(arms)[1:-1])
    return [(f"{found.best} {'/' if one.neutral else '-'} {name}", one) for name, one in found.leads.items()], []


_KINDS = {  # test, fewest arms, most arms
    "order": (_order, 2, None), "lead": (_first_leads, 2, None), "positions": (_positions, 2, 2),
    "add_up": (_add_up, 4, 4), "interaction": (_interaction, 4, 4), "interior": (_interior, 3, None),
}  # fmt: skip


# ---------------------------------------------------------------- output
def write_claims(results: Sequence[Mapping[str, Any]], folder: Path, options: BootstrapOptions = _DEFAULT) -> Path:
    """``claims.json`` in ``folder``."""
    path = folder / CLAIMS_FILE
    write_json(path, {"claims": list(results), "bootstrap": {"unit": "prompt", "paired": True, **asdict(options)}})
    return path


def claims_table(results: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table: one line per claim, with every number that its verdict rests on."""
    lines = ["| claim | where | case | verdict | numbers |", "| --- | --- | --- | --- | --- |"]
    for one in results:
        case = ", ".join(str(one[key]) for key in ("benchmark", "case") if one.get(key)) or "-"
        numbers = "; ".join([_told(check) for check in one["checks"]] + [f"({_told(check)})" for check in one["also"]])
        note = f". {one['note']}" if one.get("note") else ""
        cells = (one["sentence"], one["source"], case, f"**{one['verdict']}**", f"{one['metric']}: {numbers}{note}")
        lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return "\n".join(lines)


def _told(check: Mapping[str, Any]) -> str:
    if check["value"] is None or check["ci"] is None:
        return f"{check['check']} no evidence"
    value = f"{check['value']:.2f}x" if check["neutral"] else f"{check['value']:+.2f}"
    return f"{check['check']} {value} [{check['ci'][0]:.2f}, {check['ci'][1]:.2f}]"
