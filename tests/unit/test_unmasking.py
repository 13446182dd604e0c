"""Unmasking orders: what is fixed first, and what several denoising passes then show to the last one."""

from __future__ import annotations

import pytest
import torch

from specdiff2.functional.unmasking import UNMASKING_ORDERS, unmasking_scores
from specdiff2.types import ConfigError

# the most probable token of position 0 is surest, the flattest row is position 1, position 2 hesitates between two
LOGITS = torch.tensor([[4.0, 0.0, 0.0, 0.0], [0.1, 0.0, 0.0, 0.0], [3.0, 3.0, -9.0, -9.0]])


def order_of(scores: torch.Tensor) -> list[int]:
    return scores.argsort(descending=True).tolist()


def test_confidence_and_entropy_order_positions_by_their_definitions() -> None:
    probs = LOGITS.softmax(-1)
    assert torch.allclose(unmasking_scores(LOGITS, "confidence"), probs.max(-1).values)
    assert torch.allclose(unmasking_scores(LOGITS, "entropy"), (probs * probs.log()).sum(-1), atol=1e-6)
    assert order_of(unmasking_scores(LOGITS, "confidence")) == [0, 2, 1]
    two_sure_one_flat = torch.tensor([[2.0, 0.0, 0.0, 0.0, 0.0], [2.2, 2.2, -9.0, -9.0, -9.0]])
    assert order_of(unmasking_scores(two_sure_one_flat, "confidence")) == [0, 1]
    assert order_of(unmasking_scores(two_sure_one_flat, "entropy")) == [1, 0], "the two orders differ here"


def test_forbidden_tokens_do_not_make_the_entropy_nan() -> None:
    scores = unmasking_scores(torch.tensor([[0.0, -torch.inf], [0.0, 0.0]]), "entropy")
    assert scores[0] == 0.0 and torch.allclose(scores[1], -torch.tensor(2.0).log())


def test_left_to_right_and_random() -> None:
    assert order_of(unmasking_scores(LOGITS, "left_to_right")) == [0, 1, 2]
    draws = [
        tuple(order_of(unmasking_scores(LOGITS, "random", torch.Generator().manual_seed(seed)))) for seed in range(40)
    ]
    assert len(set(draws)) == 6, "every order of three positions occurs"
    assert draws[0] == tuple(order_of(unmasking_scores(LOGITS, "random", torch.Generator().manual_seed(0))))


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"unmasking='best'.*confidence, entropy, random, left_to_right"):
        unmasking_scores(LOGITS, "best")
    assert len(UNMASKING_ORDERS) == 4
