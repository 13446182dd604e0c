"""A round outside its two passes: masks without loops, one token per node at temperature 0, marks instead of waits."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from helpers import random_tokens, tiny_verifier
from torch.utils._python_dispatch import TorchDispatchMode

from specdiff2.decoding.acceptance import RULES
from specdiff2.decoding.autoregressive import AutoregressiveDecoder
from specdiff2.decoding.greedy_law import GreedyLaw, draw
from specdiff2.decoding.probs import ProbsBuffer
from specdiff2.decoding.samplers import make_decoder
from specdiff2.decoding.selection import SelfSelection
from specdiff2.decoding.timing import Stopwatch
from specdiff2.functional.attention_masks import (
    additive_mask,
    ancestor_mask,
    static_tree_mask,
    static_window_mask,
    tree_attention_mask,
)
from specdiff2.functional.sampling import logits_to_probs
from specdiff2.models.block_drafter import BlockDrafter
from specdiff2.rng import TorchRandomSource
from specdiff2.tree import TokenTree
from specdiff2.types import SamplingParams, SpecDiffError

GREEDY = SamplingParams(temperature=0.0)


def random_tree(num_nodes: int, seed: int) -> TokenTree:
    generator = torch.Generator().manual_seed(seed)
    parents = [int(torch.randint(0, node + 1, (), generator=generator)) for node in range(num_nodes - 1)]
    return TokenTree.best_first(3, random_tokens(num_nodes - 1, seed), parents)


def trees() -> list[TokenTree]:
    chain = TokenTree.best_first(3, [1] * 16, list(range(16)))
    return [TokenTree.root_only(3), chain, *(random_tree(n, n) for n in (2, 3, 8, 9, 33, 65))]


def test_ancestors_by_doubling_equal_the_walk_over_the_nodes() -> None:
    for tree in trees():
        assert torch.equal(ancestor_mask(torch.tensor(tree.parents)), tree.ancestor_mask())


def test_static_masks_equal_the_growing_ones() -> None:
    for tree in trees():
        parents, num_cached, num_nodes = torch.tensor(tree.parents), 7, tree.num_nodes
        whole = static_tree_mask(ancestor_mask(parents), torch.tensor(num_cached), 100, torch.float32)
        used = num_cached + num_nodes
        assert torch.equal(whole[:, :used], tree_attention_mask(parents, num_cached, torch.float32)[0, 0])
        assert (whole[:, used:] == torch.finfo(torch.float32).min).all()
    window = static_window_mask(torch.tensor(3), torch.tensor(7), 20, torch.float32)
    assert torch.equal(window, additive_mask(torch.arange(20) < 10, torch.float32))


# ---------------------------------------------------------------- temperature 0
class Shapes(TorchDispatchMode):
    """Records how large the results of all operations are, and how often a value is read back one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.largest: dict[torch.dtype, int] = {}
        self.num_reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_reads += func is torch.ops.aten._local_scalar_dense.default
        result = func(*args, **(kwargs or {}))
        for part in result if isinstance(result, tuple | list) else [result]:
            if isinstance(part, torch.Tensor):
                self.largest[part.dtype] = max(self.largest.get(part.dtype, 0), part.numel())
        return result


def test_no_row_of_probabilities_per_node_is_made() -> None:
    tree, vocab = random_tree(33, 1), 500
    logits = torch.randn(33, vocab).bfloat16()
    with Shapes() as seen:
        law = ProbsBuffer(GREEDY)(logits)
        RULES["tree_match"]()(tree, law, None, TorchRandomSource(0))
    assert seen.largest.get(torch.float32, 0) < vocab and seen.largest[torch.float64] <= 2 * 33
    assert seen.num_reads == 0, "the tokens come to the host in one transfer"
    with Shapes() as seen:  # the recorder does notice the dense law
        logits_to_probs(logits, GREEDY)
    assert seen.largest[torch.float32] == 33 * vocab and seen.num_reads > 0


def test_a_greedy_decode_reads_nothing_value_by_value() -> None:
    """No ``.item()`` anywhere in a round: draft, tree, scores, rule and commit together."""
    verifier = tiny_verifier()
    drafter = BlockDrafter.from_verifier(verifier, num_layers=1, gamma=4, shifted=True, conditioning="verifier_kv")
    tree = make_decoder(verifier, drafter.eval(), sampler="tree", num_nodes=8, verifier_sampling=GREEDY)
    for decoder in (tree, AutoregressiveDecoder(verifier)):
        with Shapes() as seen:
            assert decoder.generate([5, 9, 2], max_new_tokens=12).num_tokens == 12
        assert seen.num_reads == 0


def dense(law: GreedyLaw) -> torch.Tensor:
    return torch.stack([law[node] for node in range(len(law.tokens))])


def test_a_greedy_law_is_the_one_hot_tensor() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        logits = torch.randn(9, 30, generator=torch.Generator().manual_seed(1)).to(dtype)
        logits[2, 5] = logits[2, 9] = 50.0  # a tie goes to the first
        law, expected = ProbsBuffer(GREEDY)(logits), logits_to_probs(logits, GREEDY)
        assert isinstance(law, GreedyLaw) and torch.equal(dense(law), expected) and law[0].dtype == expected.dtype
        assert law.shape == expected.shape and law.device == expected.device and law.tokens[2] == 5
        nodes, tokens = torch.tensor([0, 2, 2]), torch.tensor([law.tokens[0], 5, 9])
        assert torch.equal(law[nodes, tokens], expected[nodes, tokens])
        assert [draw(law, node, TorchRandomSource(0)) for node in range(9)] == law.tokens
        assert [draw(expected, node, TorchRandomSource(0)) for node in range(9)] == law.tokens


@pytest.mark.parametrize("rule", sorted(RULES))
def test_every_rule_decides_as_with_the_tensor(rule: str) -> None:
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        law = GreedyLaw(torch.randint(0, 3, (13,), generator=generator).tolist(), 3, torch.device("cpu"), torch.float32)
        num_chains = 4 if RULES[rule]().walks_tree else 1
        tree = TokenTree.from_chains(0, torch.randint(0, 3, (num_chains, 3), generator=generator))
        draft_probs = torch.full((3, 3), 1 / 3)
        results = [RULES[rule]()(tree, probs, draft_probs, TorchRandomSource(seed)) for probs in (law, dense(law))]
        assert results[0] == results[1]
        assert SelfSelection()(tree, law) == SelfSelection()(tree, dense(law))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_no_law_are_refused(bad: float) -> None:
    logits = torch.zeros(3, 5)
    logits[1] = bad
    for sampling in (GREEDY, SamplingParams()):
        with pytest.raises(SpecDiffError, match="largest value of a row is"):
            ProbsBuffer(sampling)(logits)


# ---------------------------------------------------------------- clock
def test_marked_stages_are_consecutive_and_belong_to_one_stage_each() -> None:
    watch = Stopwatch()
    time.sleep(0.01)
    watch.mark()
    watch.mark()
    time.sleep(0.02)
    first, second, last = watch.laps()
    assert first >= 0.01 > second >= 0 and last >= 0.02
    assert watch.laps()[0] < 0.01, "what was told is not told again"
    assert watch.lap() < 0.01
