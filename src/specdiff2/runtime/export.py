"""Write a trained drafter for other programs.

python -m specdiff2.runtime.export outputs/train/long/drafter/best exported --layout merged

Of a masked-diffusion LM: ``merged``, a plain transformers folder; ``adapter``, peft's two files; ``family``, the layout
of the model's authors, for their own tools. Of an autoregressive drafter (model.gamma=1): ``causal``, a causal language
model. Of an EAGLE head: ``eagle``, the public layout. Of a block drafter of one Qwen3 layer: ``dflash`` and
``speculators``, for vLLM and SGLang; other block drafters are refused with the differences (``models.dflash_export``).
``--base`` names the folder of the base checkpoint, or of the verifier that a drafter is beside, where it has moved.

Of a training checkpoint (outputs/train/long/checkpoints/last.ckpt, of any strategy and any number of processes):
``drafter``, our own format, which all of the above start from.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from specdiff2.models.block_drafter import BlockDrafter
from specdiff2.models.causal_export import export_causal_lm
from specdiff2.models.dflash_export import DFLASH_LAYOUTS, export_dflash, refuse_unlike_dflash
from specdiff2.models.dtypes import DTYPES
from specdiff2.models.eagle_drafter import EagleDrafter
from specdiff2.models.eagle_files import export_eagle
from specdiff2.models.masked_lm_export import LAYOUTS, export_masked_lm
from specdiff2.models.pretrained import load_drafter, read_drafter_config
from specdiff2.models.verifier import HFVerifier
from specdiff2.runtime.checkpoint_export import export_checkpoint
from specdiff2.runtime.tool import run_tool
from specdiff2.types import ConfigError

BESIDE_VERIFIER = {"causal": BlockDrafter, "eagle": EagleDrafter, **dict.fromkeys(DFLASH_LAYOUTS, BlockDrafter)}


def export_beside_verifier(folder: Path, out: Path, layout: str, source: str | None, dtype: torch.dtype) -> Path:
    """Write ``out`` from a drafter that borrows its verifier's embedding; its path.

    Raises:
        ConfigError: ``out`` is not empty, or the drafter computes something that ``layout`` has no place for.
        CorruptFileError, MismatchError: the folder is damaged, or the verifier is not the one it was trained for.
    """
    config = read_drafter_config(folder)
    if layout in DFLASH_LAYOUTS:  # before the verifier loads
        refuse_unlike_dflash(config, layout, str(folder))
    name = source or config.verifier_name
    verifier = HFVerifier.from_pretrained(name, dtype="float32", device="cpu")
    drafter, expected = load_drafter(folder, verifier, dtype=dtype), BESIDE_VERIFIER[layout]
    if not isinstance(drafter, expected):
        found = type(drafter).__name__
        raise ConfigError(
            f"{folder} holds a {found}: layout {layout} is for a {expected.__name__}; choose another layout"
        )
    if isinstance(drafter, EagleDrafter):
        return export_eagle(drafter, out)
    if layout in DFLASH_LAYOUTS:
        return export_dflash(drafter, verifier, out, layout)
    return export_causal_lm(drafter, verifier, out)


def main(arguments: Sequence[str]) -> int:
    """Exit code 0, or 1 with one message."""
    parser = argparse.ArgumentParser(prog="python -m specdiff2.runtime.export", description=__doc__.split("\n")[0])
    parser.add_argument("drafter", type=Path, help="folder of the trained drafter, or a training checkpoint")
    parser.add_argument("out", type=Path, help="folder to write; must not exist or be empty")
    parser.add_argument("--layout", choices=[*LAYOUTS, *BESIDE_VERIFIER, "drafter"], required=True)
    parser.add_argument("--base", help="hub id or folder of the base (or verifier); default: where it was")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of merged weights; default: bfloat16")
    given = parser.parse_args(arguments)
    dtype = DTYPES[given.dtype]
    if given.layout == "drafter":
        return run_tool(lambda: export_checkpoint(given.drafter, given.out))
    if given.layout in BESIDE_VERIFIER:
        return run_tool(lambda: export_beside_verifier(given.drafter, given.out, given.layout, given.base, dtype))
    return run_tool(lambda: export_masked_lm(given.drafter, given.out, given.layout, source=given.base, dtype=dtype))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
