"""Static and dynamic trees over a law of paths: against brute force, cut windows, missing tokens, wrong pairs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from helpers import FunctionDrafter, RandomDrafter, Tab, tiny_verifier
from torch import Tensor

from specdiff2.decoding import path_tree
from specdiff2.decoding.path_tree import RankTree, grow_dynamic, grow_static
from specdiff2.decoding.samplers import SAMPLERS, check_sampler, make_decoder
from specdiff2.decoding.tree_growth import GrowthSettings, growth_settings
from specdiff2.models.block_drafter import BlockDrafter
from specdiff2.models.eagle_drafter import EagleDrafter
from specdiff2.runtime.factories import SamplerSettings
from specdiff2.tree import TokenTree
from specdiff2.types import ConfigError

Path = tuple[int, ...]


class PathTable:
    """A random law for every path, over ids 10, 11, ...; ``num_dead`` tokens of each law have probability 0."""

    def __init__(self, seed: int, vocab: int = 5, num_dead: int = 0) -> None:
        self.seed, self.vocab, self.num_dead = seed, vocab, num_dead
        self.ids = torch.arange(vocab) + 10
        self.num_passes = 0

    def law(self, path: Path) -> Tensor:
        generator = torch.Generator().manual_seed(hash((self.seed, path)) % 2**31)
        logits = 2 * torch.randn(self.vocab, generator=generator, dtype=torch.float64)
        logits[torch.randperm(self.vocab, generator=generator)[: self.num_dead]] = -torch.inf
        return logits.log_softmax(-1)

    def start_tree(self) -> Tensor:
        self.paths: list[Path] = [()]
        return self.law(())

    def expand(self, tokens: Sequence[int], parents: Sequence[int]) -> Tensor:
        added = [(*self.paths[parent], token) for token, parent in zip(tokens, parents, strict=True)]
        self.paths += added
        self.num_passes += 1
        return torch.stack([self.law(path) for path in added])

    def score(self, path: Path) -> float:
        return sum(float(self.law(path[:i])[token - 10]) for i, token in enumerate(path))

    def children(self, path: Path) -> list[Path]:
        """Best first; tokens of probability 0 left out."""
        order = sorted(range(self.vocab), key=lambda t: -float(self.law(path)[t]))
        return [(*path, t + 10) for t in order if self.law(path)[t] > -torch.inf]


def paths_of(tree: TokenTree) -> list[Path]:
    paths: list[Path] = [()]
    for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


def brute_force_dynamic(table: PathTable, gamma: int, branching: int, num_nodes: int) -> set[Path]:
    """EAGLE-2 by its definition: expand the best of each level, rank everything listed again."""
    level, listed = table.children(())[:branching], list[Path]()
    for depth in range(gamma):
        listed += level
        best = sorted(level, key=lambda path: -table.score(path))[:branching]
        level = list(itertools.chain.from_iterable(table.children(path)[:branching] for path in best))
        if depth + 1 == gamma:
            break
    return set(sorted(listed, key=lambda path: -table.score(path))[:num_nodes])


@pytest.mark.parametrize(("gamma", "branching", "num_nodes"), [(1, 3, 2), (3, 2, 5), (4, 3, 8), (3, 5, 40), (5, 1, 9)])
@pytest.mark.parametrize("num_dead", [0, 3])
def test_dynamic_equals_brute_force(gamma: int, branching: int, num_nodes: int, num_dead: int) -> None:
    for seed in range(8):
        table = PathTable(seed, num_dead=num_dead)
        tree = grow_dynamic(table, 7, gamma, branching, num_nodes)
        assert set(paths_of(tree)) == brute_force_dynamic(table, gamma, branching, num_nodes)
        assert len(paths_of(tree)) == len(set(paths_of(tree))) and tree.tokens[0] == 7 and tree.depth <= gamma
        assert table.num_passes <= gamma - 1
        assert tree.chain_nodes[0][0] == 1 and paths_of(tree)[0] == table.children(())[0]


def test_a_rerank_without_ancestors_is_no_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: among equals children come before their parents, and parents drop out."""
    certain = PathTable(0, vocab=3, num_dead=2)  # every path has probability 1
    assert grow_dynamic(certain, 7, 4, 1, 2).depth == 2
    monkeypatch.setattr(path_tree, "best_nodes", lambda nodes, n: sorted(nodes, key=lambda x: (-x.score, -x.key))[:n])
    with pytest.raises(KeyError):
        grow_dynamic(certain, 7, 4, 1, 2)


@pytest.mark.parametrize("gamma", [1, 2, 5])
@pytest.mark.parametrize("num_dead", [0, 3])
def test_static_holds_the_ranks_it_says(gamma: int, num_dead: int) -> None:
    ranks = RankTree.of([[0, 0, 0], [0, 3], [2, 1], [4]])
    assert ranks.num_nodes == 3 + 1 + 2 + 1
    for seed in range(8):
        table = PathTable(seed, num_dead=num_dead)
        tree = grow_static(table, 7, ranks, gamma)
        expected: dict[Path, Path] = {(): ()}
        for path in itertools.chain.from_iterable(ranks.levels[:gamma]):
            children = table.children(expected[path[:-1]]) if path[:-1] in expected else []
            if path[-1] < len(children):
                expected[path] = children[path[-1]]
        assert set(paths_of(tree)) == set(expected.values()) - {()}
        assert table.num_passes <= min(gamma, 3) - 1


def test_likely_ranks() -> None:
    """The default: about 25 nodes, five deep, wide where it is likely; every prefix inside, nested in larger ones."""
    tree = RankTree.likely(25, 5)
    nodes = set(itertools.chain.from_iterable(tree.levels))
    assert tree.num_nodes == 25 and len(tree.levels) == 5 and (0,) * 5 in nodes
    assert all(path[:-1] in nodes or len(path) == 1 for path in nodes)
    assert nodes < set(itertools.chain.from_iterable(RankTree.likely(40, 5).levels))
    assert RankTree.likely(3, 1).levels == (((0,), (1,), (2,)),)
    assert RankTree.likely(1000, 1).num_nodes == len(path_tree.RANK_SHARES)


# ---------------------------------------------------------------- settings
@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"shape": "star"}, "shape='star'"),
        ({"shape": "dynamic"}, "branching=None"),
        ({"shape": "dynamic", "branching": 0}, "branching=0"),
        ({"shape": "static", "branching": 2}, "branching=2"),
        ({"branching": 2}, "branching=2"),
        ({"rank_paths": [[0]]}, "rank_paths="),
        ({"shape": "static", "rank_paths": [[0, 1]]}, "num_nodes=6.*expected 2"),
        ({"shape": "static", "rank_paths": [[0, -1]]}, "rank_paths="),
        ({"shape": "static", "num_nodes": "auto"}, "num_nodes='auto'"),
        ({"shape": "static", "tree_temperature": 2.0}, "tree_temperature=2.0"),
        ({"shape": "dynamic", "branching": 2, "lookup_tokens": 3}, "lookup_tokens=3"),
    ],
)
def test_settings_that_do_not_go_together(values: dict, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        GrowthSettings(**({"num_nodes": 6} | values))


def test_growth_settings_count_the_nodes_of_rank_paths() -> None:
    settings = growth_settings(None, shape="static", rank_paths=[[0, 0], [1]])
    assert settings is not None and settings.budget == 3
    assert settings.describe() == {"num_nodes": 3, "shape": "static", "branching": None, "rank_paths": [[0, 0], [1]]}
    assert set(GrowthSettings(6).describe()) == {
        "num_nodes", "max_nodes", "tree_temperature", "lookup_tokens", "lookup_ngram"
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"shape='static'.*draws its drafts"):
        growth_settings(None, shape="static")
    with pytest.raises(ConfigError, match="rank_paths"):
        make_decoder(Tab([0.5, 0.5]), RandomDrafter(2), sampler="specdiff", rank_paths=[[0]])


def test_samplers_of_yaml_and_python_are_the_same() -> None:
    """``conf/sampler`` and ``SAMPLERS`` describe the same decoders."""
    from pathlib import Path as File

    from omegaconf import OmegaConf

    for name in ("eagle", "eagle2"):
        node = OmegaConf.load(File(__file__).parents[2] / "conf/sampler" / f"{name}.yaml")
        node["drafter"] = "x"
        settings = SamplerSettings(**{key: value for key, value in node.items() if key != "_target_"})
        known = check_sampler(name)
        assert settings.growth() == known.growth(None, None, None, None, None) and settings.gamma == known.gamma
        assert settings.draft_sampling().temperature == 1.0


# ---------------------------------------------------------------- pairs
def test_wrong_pairs_are_refused_before_decoding() -> None:
    verifier = tiny_verifier(64)
    block, head = BlockDrafter.from_verifier(verifier, num_layers=1), EagleDrafter.from_verifier(verifier)
    for sampler in ("eagle", "eagle2"):
        with pytest.raises(ConfigError, match=f"{sampler}.*drafter BlockDrafter.*smollm2_eagle"):
            make_decoder(verifier, block, sampler=sampler)
        with pytest.raises(ConfigError, match="K=2"):
            make_decoder(verifier, head, sampler=sampler, num_drafts=2)
    with pytest.raises(ConfigError, match=r"sampler tree.*EagleDrafter.*eagle2"):
        make_decoder(verifier, head, sampler="tree")
    with pytest.raises(ConfigError, match="denoising_steps=2 with drafter EagleDrafter"):
        make_decoder(verifier, head, sampler="specdiff", denoising_steps=2).generate([1, 2], max_new_tokens=4)


def test_only_drafters_without_limit_go_deeper_than_their_own_window() -> None:
    verifier = tiny_verifier(64)
    head = EagleDrafter.from_verifier(verifier, gamma=2)
    assert make_decoder(verifier, head, sampler="eagle").drafting.gamma == SAMPLERS["eagle"].gamma == 5
    assert make_decoder(verifier, head, sampler="specdiff").drafting.gamma == 2
    assert make_decoder(verifier, head, sampler="eagle2", gamma=7).drafting.gamma == 7
    limited = FunctionDrafter(2, RandomDrafter(64, 2).function)
    assert make_decoder(verifier, limited, sampler="eagle").drafting.gamma == 2
    for drafter, gamma in ((limited, 3), (head, 0), (head, True)):
        with pytest.raises(ConfigError, match=f"gamma={gamma}"):
            make_decoder(verifier, drafter, sampler="eagle", gamma=gamma)
