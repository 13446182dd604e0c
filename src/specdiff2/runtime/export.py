"""Write a trained masked-diffusion LM for other programs.

python -m specdiff2.runtime.export outputs/train/long/drafter/best exported --layout merged

``merged``: a plain transformers folder. ``adapter``: peft's two files. ``family``: the layout of the model's authors,
for their own tools. ``--base`` names the folder of the base checkpoint where it has moved since training.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from specdiff2.models.dtypes import DTYPES
from specdiff2.models.masked_lm_export import LAYOUTS, export_masked_lm
from specdiff2.runtime.tool import run_tool


def main(arguments: Sequence[str]) -> int:
    """Exit code 0, or 1 with one message."""
    parser = argparse.ArgumentParser(prog="python -m specdiff2.runtime.export", description=__doc__.split("\n")[0])
    parser.add_argument("drafter", type=Path, help="folder of the trained drafter")
    parser.add_argument("out", type=Path, help="folder to write; must not exist or be empty")
    parser.add_argument("--layout", choices=LAYOUTS, required=True)
    parser.add_argument("--base", help="hub id or folder of the base checkpoint; default: where it was trained from")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of merged weights; default: bfloat16")
    given = parser.parse_args(arguments)
    dtype = DTYPES[given.dtype]
    return run_tool(lambda: export_masked_lm(given.drafter, given.out, given.layout, source=given.base, dtype=dtype))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
