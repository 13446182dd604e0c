"""From run folders of evaluations to what the speed law reads: records, and what their costs depend on.

Which runs and methods may share costs is decided here, from ``run.json``, ``benchmark.json`` and the drafters'
``config.json``: whatever is not known to cost no time keeps them apart. Loads no model.
"""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specdiff2.evaluation.json_files import read_json
from specdiff2.evaluation.metrics import BASELINE
from specdiff2.evaluation.records import RECORDS_FILE, read_records
from specdiff2.evaluation.speed_law_rounds import MeasuredRun, PoolKey, Way
from specdiff2.models.shipped import drafter_folder
from specdiff2.runtime.grid import all_methods
from specdiff2.types import ConfigError, CorruptFileError

Node = Mapping[str, Any]
# of a sampler: what the law has a term for (counts, nodes, passes), and what changes drafts but no time
_COUNTED = {"_target_", "name", "K", "gamma", "num_nodes", "max_nodes", "drafter", "drafters", "denoising_steps"}
_TIMELESS = {"temperature", "tree_temperature", "cost_folder", "top_k", "top_p"}
# of a drafter's config.json: whose it is and how it was made, not how large it is; the window is a count
_NO_SIZE = {
    "training", "weights", "gamma", "denoising_steps", "format_version", "transformers_version", "verifier_name",
    "_name_or_path",
}  # fmt: skip
_REMEDY = "a file of an evaluation; run eval.py again, or leave this folder out"


def find_runs(patterns: Sequence[str]) -> list[Path]:
    """Folders with records that the patterns name, each once, in order.

    Raises:
        ConfigError: a pattern finds none.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        folders = [Path(name) for name in sorted(glob.glob(pattern)) if (Path(name) / RECORDS_FILE).is_file()]
        if not folders:
            raise ConfigError(f"{pattern!r}: no folder with {RECORDS_FILE}; expected run folders of evaluations")
        found.update(dict.fromkeys(folders))
    return list(found)


def read_run(folder: Path) -> MeasuredRun:
    """Records and keys of one evaluation.

    Raises:
        ConfigError: it has no run.json or benchmark.json.
        CorruptFileError: one of its files is damaged.
    """
    run = _needed(folder, "run.json")
    inside = sorted(folder.glob("benchmarks/*/benchmark.json"))
    described = [_needed(path.parent, path.name) for path in inside] or [_needed(folder, "benchmark.json")]
    records = [record for record in read_records(folder / RECORDS_FILE) if not record.warmup]
    try:
        config, decoders = run["config"], described[0]["decoders"]
        ways = {name: _way(node, config, decoders.get(name, {})) for name, node in _methods(config).items()}
        drawn = _drawn(config["verifier"].get("temperature"))
        ways[BASELINE] = Way("none", f"one token, {drawn}", BASELINE)
        return MeasuredRun(
            folder.as_posix(), _key(run, decoders), ways, max(one["max_new_tokens"] for one in described), records
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise CorruptFileError(
            f"{folder}: run.json or benchmark.json lacks {error} ({type(error).__name__}): expected {_REMEDY}"
        ) from error


def _needed(folder: Path, name: str) -> Any:
    value = read_json(folder / name, _REMEDY)
    if value is None:
        raise ConfigError(f"{folder / name} does not exist: expected {_REMEDY}")
    return value


def _methods(config: Node) -> Mapping[str, Node]:
    return all_methods({"methods": None, "grid": None, **config})


def _key(run: Node, decoders: Node) -> PoolKey:
    """The verifier is known by its digest, and by what changes how it runs."""
    node = run["config"]["verifier"]
    digests = sorted({str(one["verifier"]) for one in decoders.values() if "verifier" in one})
    how = ("quantization", "device_map", "tp_plan", "attn_implementation")
    verifier = {"digest": digests, **{name: node[name] for name in how if node.get(name) is not None}}
    return PoolKey(
        run["machine"], str(run["device"]), _text(verifier), run["dtype"], int(run["threads"]), run["runtime"]
    )


def _way(node: Node, config: Node, decoder: Node) -> Way:
    """What the costs of one sampler depend on."""
    entries = list(node.get("drafters") or [])
    names = [entry["drafter"] for entry in entries] or ([node["drafter"]] if "drafter" in node else [])
    shapes = [_drafter_shape(name, config, decoder) for name in names]
    grown = {"num_nodes": "auto" if node.get("num_nodes") == "auto" else "fixed"} if "num_nodes" in node else {}
    rest = {
        key: value for key, value in node.items() if key not in _COUNTED | _TIMELESS and value
    }  # 0 and null: without it
    drawn = _drawn(config["verifier"].get("temperature"))
    passes = node.get("denoising_steps") or max((steps for _, steps in shapes), default=1)
    whole = {key: value for key, value in node.items() if key not in ("_target_", "name", "gamma", "cost_folder")}
    return Way(
        draft=", ".join([*(shape for shape, _ in shapes), *grown, _drawn(node.get("temperature", "auto"))]),
        other=_text({**rest, **grown, "drafters": len(names), "verifier": drawn}),
        acceptance=_text([whole, decoder.get("drafter")]),
        passes=int(passes),
    )


def _drafter_shape(name: str, config: Node, decoder: Node) -> tuple[str, int]:
    """(what the time of a pass depends on, passes) of a drafter; one whose config is gone is known by its weights."""
    try:
        folder = drafter_folder(name, config["verifier"].get("source"), config.get("model_name"))
        found = read_json(Path(folder) / "config.json", _REMEDY)
    except ConfigError:  # shipped no longer
        found = None
    if found is None:
        steps = (config.get("model") or {}).get("denoising_steps", 1)
        return f"{name} {decoder.get('drafter')}", steps
    digest = hashlib.sha256(_text(_sizes(found)).encode()).hexdigest()[:8]
    return f"{found.get('format', 'drafter')} {digest}", (found.get("drafter") or found).get("denoising_steps", 1)


def _sizes(value: Any) -> Any:
    """Numbers and words of a config; lists by their length, names and digests left out."""
    if isinstance(value, Mapping):
        return {
            key: _sizes(one) for key, one in value.items()
            if key not in _NO_SIZE and not key.endswith("fingerprint")
        }  # fmt: skip
    return f"{len(value)} values" if isinstance(value, list) else value


def _drawn(temperature: Any) -> str:
    """Most probable tokens cost less than drawn ones."""
    return "argmax" if temperature == 0 else "auto" if temperature in (None, "auto") else "drawn"


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
