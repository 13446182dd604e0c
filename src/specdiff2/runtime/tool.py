"""What the small commands (``python -m specdiff2.runtime.NAME``) share: one line of result, or one line of error."""

from __future__ import annotations

import sys
from collections.abc import Callable

from specdiff2.runtime.logging import keep_stdout_clean
from specdiff2.types import SpecDiffError


def run_tool(work: Callable[[], object]) -> int:
    """Print what ``work`` returns. Exit code 0, or 1 with the message of an error that a user can act on."""
    keep_stdout_clean()
    try:
        print(work())
    except SpecDiffError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
