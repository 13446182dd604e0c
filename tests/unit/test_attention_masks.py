"""Masks against the plain meaning of "may look at"."""

import pytest
import torch
from helpers import reference_logits, tiny_verifier

from specdiff2.functional.attention_masks import (
    additive_mask,
    left_padded_causal_mask,
    left_padding_mask,
    tree_attention_mask,
)
from specdiff2.tree import TokenTree

BLOCKED = torch.finfo(torch.float32).min
CHAINS = [[3, 4, 5], [3, 4, 9], [3, 7, 7], [8, 1, 2]]
PROMPT = [5, 9, 11, 40, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_additive_mask_is_finite(dtype: torch.dtype):
    mask = additive_mask(torch.tensor([True, False]), dtype)
    assert mask.tolist() == [0.0, torch.finfo(dtype).min]
    assert mask.dtype == dtype


def test_tree_mask_sees_cache_ancestors_and_itself():
    tree = TokenTree.from_chains(2, CHAINS)
    mask = tree_attention_mask(torch.tensor(tree.parents), 4, torch.float32)
    assert mask.shape == (1, 1, tree.num_nodes, 4 + tree.num_nodes)
    for node in range(tree.num_nodes):
        seen, walker = set(range(4)), node
        while walker >= 0:
            seen.add(4 + walker)
            walker = tree.parents[walker]
        expected = [0.0 if key in seen else BLOCKED for key in range(4 + tree.num_nodes)]
        assert mask[0, 0, node].tolist() == expected


def test_left_padding_masks():
    padding = torch.tensor([0, 2])
    assert left_padding_mask(padding, 3, torch.float32)[:, 0, 0].tolist() == [[0, 0, 0], [BLOCKED, BLOCKED, 0]]
    causal = left_padded_causal_mask(padding, 3, torch.float32)[:, 0]
    assert causal[0].tolist() == [[0, BLOCKED, BLOCKED], [0, 0, BLOCKED], [0, 0, 0]]
    assert causal[1].tolist() == [[0, BLOCKED, BLOCKED], [BLOCKED, 0, BLOCKED], [BLOCKED, BLOCKED, 0]]


def paths(tree: TokenTree) -> list[list[int]]:
    """Every root-to-leaf path, as node indices."""
    inner = set(tree.parents)
    result = []
    for leaf in (node for node in range(tree.num_nodes) if node not in inner):
        path = [leaf]
        while tree.parents[path[0]] >= 0:
            path.insert(0, tree.parents[path[0]])
        result.append(path)
    return result


def largest_error(verifier, tree: TokenTree, logits: torch.Tensor) -> float:
    worst = 0.0
    for path in paths(tree):
        tokens = PROMPT[:-1] + [tree.tokens[node] for node in path]
        expected = reference_logits(verifier.model, tokens)[len(PROMPT) - 1 :]
        worst = max(worst, float((logits[path] - expected).abs().max()))
    return worst


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_tree_logits_equal_plain_forward_of_each_path(attn: str, family: str):
    """Cases 12 and 13: rope_theta=10 makes wrong positions show."""
    verifier = tiny_verifier(attn=attn, family=family)
    tree = TokenTree.from_chains(PROMPT[-1], CHAINS)
    logits = verifier.start(PROMPT, 10).score(tree)
    assert largest_error(verifier, tree, logits) < 1e-5


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("flip", ["hide an ancestor", "show another branch", "hide a cached token", "drop positions"])
def test_one_wrong_mask_bit_or_missing_positions_fail(attn: str, flip: str, monkeypatch: pytest.MonkeyPatch):
    """The check of case 12 must notice one flipped bit, that of case 13 missing positions."""
    verifier = tiny_verifier(attn=attn)
    tree = TokenTree.from_chains(PROMPT[-1], CHAINS)
    last = tree.num_nodes - 1
    session = verifier.start(PROMPT, 10)
    forward = verifier.forward

    def broken(ids, *, mask=None, positions=None, **rest):
        mask = mask.clone()
        if flip == "hide an ancestor":
            mask[0, 0, last, -2] = BLOCKED
        elif flip == "show another branch":
            mask[0, 0, last, -4] = 0.0
        elif flip == "hide a cached token":
            mask[0, 0, last, 0] = BLOCKED
        else:
            positions = None
        return forward(ids, mask=mask, positions=positions, **rest)

    monkeypatch.setattr(verifier, "forward", broken)
    assert largest_error(verifier, tree, session.score(tree)) > 1e-3
