"""Random masks: exact counts, uniform subsets, one generator."""

import torch

from specdiff2.functional.masking import mask_ratio_weights, random_reveal


def masks(seed: int, valid: torch.Tensor) -> torch.Tensor:
    return random_reveal(valid, torch.Generator().manual_seed(seed))


def test_reveals_valid_positions_only_and_masks_at_least_one():
    valid = torch.arange(6) < torch.randint(0, 7, (500, 1))
    revealed = masks(0, valid)
    assert not (revealed & ~valid).any()
    assert ((valid & ~revealed).any(-1) == valid.any(-1)).all()


def test_number_and_places_of_masks_are_uniform():
    valid = torch.ones((40_000, 4), dtype=torch.bool)
    valid[:, 3] = False
    masked = valid & ~masks(1, valid)
    counts = masked.sum(-1).bincount(minlength=4) / len(masked)
    assert counts[0] == 0
    # 4 standard errors of a third over 40,000 windows
    torch.testing.assert_close(counts[1:], torch.full((3,), 1 / 3), atol=0.01, rtol=0)
    single = masked[masked.sum(-1) == 1].float().mean(0)[:3]
    torch.testing.assert_close(single, torch.full((3,), 1 / 3), atol=0.017, rtol=0)


def test_seed_decides():
    valid = torch.ones((20, 8), dtype=torch.bool)
    assert torch.equal(masks(5, valid), masks(5, valid))
    assert not torch.equal(masks(5, valid), masks(6, valid))


def test_weights_are_the_inverse_mask_ratio_per_token():
    masked = torch.tensor([[True, False, True, False], [True, True, True, True], [False, False, False, False]])
    weights = mask_ratio_weights(masked)
    # window of 4 with 2 masked: ratio 1/2, weight 2 per masked token, over 4 tokens
    torch.testing.assert_close(weights[0], torch.tensor([0.5, 0.0, 0.5, 0.0]))
    torch.testing.assert_close(weights[1], torch.full((4,), 0.25))
    assert weights[2].abs().max() == 0


def test_weighted_sum_is_unbiased_for_the_token_mean():
    """E[sum of weights at position i] = 1 / L: every token counts equally, whatever the mask ratio."""
    valid = torch.ones((40_000, 5), dtype=torch.bool)
    masked = valid & ~masks(2, valid)
    torch.testing.assert_close(mask_ratio_weights(masked).mean(0), torch.full((5,), 0.2), atol=0.006, rtol=0)
