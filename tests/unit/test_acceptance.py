"""Rule and selector registries, and which combinations are refused."""

from __future__ import annotations

import pytest
import torch

from specdiff2.decoding.acceptance import RULES, check_combination, make_rule
from specdiff2.decoding.selection import SelfSelection, make_selector
from specdiff2.tree import TokenTree
from specdiff2.types import ConfigError, NotLosslessError


def test_registries() -> None:
    assert set(RULES) == {"greedy", "tree_match", "leviathan", "block", "specinfer", "traversal"}
    assert all(make_rule(name).name == name for name in RULES)
    assert make_selector(None) is None
    assert isinstance(make_selector("self_selection"), SelfSelection)
    with pytest.raises(ConfigError, match=r"rule='gredy'.*block, greedy, leviathan, specinfer, traversal, tree_match"):
        make_rule("gredy")
    with pytest.raises(ConfigError, match=r"selection='best'.*self_selection"):
        make_selector("best")


@pytest.mark.parametrize(
    ("rule", "selection", "num_drafts"),
    [
        ("greedy", None, 1),
        ("greedy", "self_selection", 1),
        ("greedy", "self_selection", 8),
        ("tree_match", None, 8),
        ("specinfer", None, 8),
        ("traversal", None, 1),
        ("traversal", None, 4),
        ("leviathan", None, 1),
        ("block", None, 1),
    ],
)
def test_allowed(rule: str, selection: str | None, num_drafts: int) -> None:
    check_combination(make_rule(rule), make_selector(selection), num_drafts)


@pytest.mark.parametrize(
    ("rule", "selection", "num_drafts", "error", "remedy"),
    [
        ("leviathan", "self_selection", 4, NotLosslessError, "greedy"),
        ("block", "self_selection", 4, NotLosslessError, "greedy"),
        ("specinfer", "self_selection", 4, ConfigError, "selection to null"),
        ("traversal", "self_selection", 4, ConfigError, "selection to null"),
        ("tree_match", "self_selection", 4, ConfigError, "selection to null"),
        ("greedy", None, 2, ConfigError, "self_selection"),
        ("leviathan", None, 2, ConfigError, "specinfer"),
        ("block", None, 2, ConfigError, "K=1"),
        ("block", None, 2, ConfigError, "traversal"),
        ("traversal", None, 0, ConfigError, "K=0"),
        ("greedy", None, 0, ConfigError, "K=0"),
        ("tree_match", None, True, ConfigError, "integer"),
        ("tree_match", None, 1.5, ConfigError, "integer"),
    ],
)
def test_refused(rule: str, selection: str | None, num_drafts, error: type[Exception], remedy: str) -> None:
    with pytest.raises(error, match=remedy) as caught:
        check_combination(make_rule(rule), make_selector(selection), num_drafts)
    assert type(caught.value) is error


@pytest.mark.parametrize("rule", ["greedy", "leviathan", "block"])
def test_one_chain_rules_refuse_several_chains(rule: str) -> None:
    tree = TokenTree.from_chains(0, [[0], [1]])
    with pytest.raises(ConfigError, match="2 chains"):
        make_rule(rule)(tree, torch.full((3, 2), 0.5), torch.full((1, 2), 0.5), None)


class NoRandomness:
    def bernoulli(self, prob: float) -> bool:
        return True

    def categorical(self, probs) -> int:
        return int(probs.argmax())


@pytest.mark.parametrize("rule", ["leviathan", "block", "specinfer", "traversal"])
def test_ratio_rules_name_what_is_wrong_with_draft_probs(rule: str) -> None:
    tree, probs = TokenTree.from_chains(0, [[0, 0]]), torch.full((3, 2), 0.5)
    for draft_probs, message in (
        (None, "needs_probs"),
        (torch.full((1, 2), 0.5), "at least 2 rows"),
        (torch.full((2, 3), 0.3), "draft vocabulary"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_rule(rule)(tree, probs, draft_probs, NoRandomness())


def test_selection_without_chains_is_refused() -> None:
    with pytest.raises(ConfigError, match="without chains"):
        SelfSelection()(TokenTree.root_only(0), torch.ones(1, 2))


def test_ragged_chains() -> None:
    tree, probs = TokenTree.from_chains(0, [[0], [1, 1, 1]]), torch.tensor([[0.5, 0.5]]).expand(5, 2)
    assert SelfSelection()(tree, probs) == 1
    accepted = make_rule("specinfer")(tree, probs, torch.tensor([[0.5, 0.5]] * 3), NoRandomness())
    assert accepted.path == [1]
