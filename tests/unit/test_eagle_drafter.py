"""EAGLE heads: drafts and trees equal a plain forward per path, round after round; planted faults do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from eagle_reference import path_law
from helpers import gap, make_batch, random_tokens, tiny_verifier
from torch import Tensor, nn

from specdiff2.decoding.path_tree import RankTree, grow_dynamic, grow_static
from specdiff2.functional.sampling import logits_to_probs
from specdiff2.models.eagle_config import EagleConfig
from specdiff2.models.eagle_drafter import EagleDrafter
from specdiff2.models.eagle_session import EagleSession
from specdiff2.models.eagle_start import fit_fc
from specdiff2.protocols import LawSession, PathLawSession, StatesDrafter
from specdiff2.rng import TorchRandomSource
from specdiff2.tree import TokenTree
from specdiff2.types import ConfigError, MismatchError, SamplingParams

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9}
PROMPT = random_tokens(7, seed=5)
ROUNDS = [[0, 1], [], [0], [0, 0, 2]]  # accepted rank paths of consecutive rounds


class WideNorm(nn.Module):
    """The RMS norm in the dtype of its input: transformers' rounds to float32 inside."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


def make_head(
    dtype: torch.dtype = torch.float64,
    *,
    num_layers: int = 1,
    family: str = "llama",
    attn: str = "sdpa",
    **changes: Any,
) -> tuple[Any, EagleDrafter]:
    verifier = tiny_verifier(64, dtype, attn, family=family, seed=3)
    drafter = EagleDrafter.from_verifier(verifier, num_layers=num_layers, gamma=3, dtype=dtype, **changes)
    rows = [(random_tokens(30, seed), 2) for seed in range(6)]
    fit_fc(drafter, rows)
    for model in (verifier.model, drafter):
        for name, norm in list(model.named_modules()):
            if name.endswith("norm") and not isinstance(norm, nn.Identity):
                model.set_submodule(name, WideNorm(norm))
    return verifier, drafter.eval()


def paths_of(tree: TokenTree) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return paths


class Spy:
    """A session that remembers the log-probabilities it gave, by path."""

    def __init__(self, session: EagleSession) -> None:
        self.session, self.ids = session, session.ids
        self.seen: dict[tuple[int, ...], Tensor] = {}

    def start_tree(self) -> Tensor:
        self.seen, self._paths = {(): self.session.start_tree()}, [()]
        return self.seen[()]

    def expand(self, tokens: list[int], parents: list[int]) -> Tensor:
        log_probs = self.session.expand(tokens, parents)
        added = [(*self._paths[parent], token) for token, parent in zip(tokens, parents, strict=True)]
        self._paths += added
        self.seen |= dict(zip(added, log_probs, strict=True))
        return log_probs


def worst_gap(drafter: EagleDrafter, verifier: Any, shape: str, *, session_class: Any = EagleSession) -> float:
    """Largest difference to the plain forward per path, over all nodes expanded in several rounds."""
    verifier_session = verifier.start(PROMPT, 32)
    session = session_class(drafter, PROMPT, SamplingParams(), 32, verifier_session)
    spy, committed, worst = Spy(session), list(PROMPT), 0.0
    for accepted in ROUNDS:
        if shape == "static":
            tree = grow_static(spy, committed[-1], RankTree.of([[0, 0, 2], [0, 1, 0], [2, 0, 1], [1]]), 3)
        else:
            tree = grow_dynamic(spy, committed[-1], 3, branching=3, num_nodes=9)
        assert len(spy.seen) >= 4
        for path, log_probs in spy.seen.items():
            worst = max(worst, gap(log_probs, path_law(drafter, committed, path)))
        verifier_session.score(tree)
        node, path = 0, []
        for rank in accepted:
            below = [n for n, parent in enumerate(tree.parents) if parent == node]
            if len(below) <= rank:
                break
            node = below[rank]
            path.append(node)
        features = verifier_session.features(path)
        tokens = [*(tree.tokens[node] for node in path), random_tokens(1, seed=len(committed))[0]]
        verifier_session.commit(path, tokens[-1])
        session.observe(tokens, features)
        committed += tokens
        assert session.num_committed == len(committed)
    return worst


# ---------------------------------------------------------------- parity
@pytest.mark.parametrize(("num_layers", "family"), [(1, "llama"), (2, "llama"), (1, "qwen2")])
@pytest.mark.parametrize(
    ("dtype", "attn"), [(torch.float64, "sdpa"), (torch.float32, "sdpa"), (torch.float32, "eager")]
)
@pytest.mark.parametrize("shape", ["static", "dynamic"])
def test_trees_equal_a_plain_forward_per_path(
    shape: str, dtype: torch.dtype, attn: str, num_layers: int, family: str
) -> None:
    """float64 under sdpa alone: transformers' eager attention computes its softmax in float32."""
    verifier, drafter = make_head(dtype, num_layers=num_layers, family=family, attn=attn)
    assert worst_gap(drafter, verifier, shape) < TOLERANCE[dtype]


def test_a_prompt_of_one_token_and_a_restricted_draft_vocabulary() -> None:
    verifier, drafter = make_head(draft_vocab_ids=list(range(3, 60, 2)))
    session = drafter.start([9], SamplingParams(), 8, verifier.start([9], 8))
    for _ in range(2):  # asking again changes nothing
        assert gap(session.start_tree(), path_law(drafter, [9], [])) < 1e-9
        assert gap(session.expand([5, 7], [0, 0])[1], path_law(drafter, [9], [7])) < 1e-9
    verifier_session = verifier.start([9], 8)
    verifier_session.score(TokenTree.root_only(9))
    session.observe([5], verifier_session.features([]))
    assert gap(session.start_tree(), path_law(drafter, [9, 5], [])) < 1e-9
    assert session.ids.tolist() == list(range(3, 60, 2))


def test_long_prompts_are_read_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdiff2.models.eagle_session.READ_CHUNK", 4)
    verifier, drafter = make_head()
    prompt = random_tokens(15, seed=2)
    session = drafter.start(prompt, SamplingParams(), 8, verifier.start(prompt, 8))
    assert gap(session.start_tree(), path_law(drafter, prompt, [])) < 1e-9
    assert gap(session.expand([5], [0])[0], path_law(drafter, prompt, [5])) < 1e-9


def test_training_computes_what_decoding_computes() -> None:
    """Position j of a window is the law along the teacher's path, at every anchor, the first token's included."""
    _, drafter = make_head()
    assert isinstance(drafter, StatesDrafter)
    rows = [random_tokens(12, 1), random_tokens(8, 2)]
    windows = [(0, 3), (1, 0), (0, 7), (1, 5), (0, 0), (1, 6)]
    with torch.no_grad():
        logits = drafter(make_batch(rows, windows, gamma=3))
    for window, (row, anchor) in enumerate(windows):
        for step in range(3):
            if anchor + step < len(rows[row]):
                path = rows[row][anchor + 1 : anchor + 1 + step]
                expected = path_law(drafter, rows[row][: anchor + 1], path)
                assert gap(logits[window, step].log_softmax(-1), expected) < 1e-9


def test_chains_follow_the_law_of_their_path() -> None:
    """``draft_probs`` are the conditional laws the tokens came from; K chains share no law and get none."""
    verifier, drafter = make_head(draft_vocab_ids=list(range(1, 50)))
    sampling = SamplingParams(0.7, top_k=20)
    session = drafter.start(PROMPT, sampling, 16, verifier.start(PROMPT, 16))
    draft = session.propose(4, 1, TorchRandomSource(1), needs_probs=True)
    path = draft.tokens[0].tolist()
    for step in range(4):
        expected = logits_to_probs(path_law(drafter, PROMPT, path[:step]), sampling)
        assert gap(draft.draft_probs[step, drafter.draft_vocab_ids], expected) < 1e-9
        assert draft.draft_probs[step, path[step]] > 0
    many = session.propose(3, 5, TorchRandomSource(1), needs_probs=False)
    assert many.tokens.shape == (5, 3) and many.draft_probs is None and len({*map(tuple, many.tokens.tolist())}) > 1
    with pytest.raises(ConfigError, match=r"K=2.*common law"):
        session.propose(3, 2, TorchRandomSource(1), needs_probs=True)
    assert isinstance(session, PathLawSession) and not isinstance(session, LawSession)


# ---------------------------------------------------------------- planted faults
class ShiftedFeatures(EagleSession):
    """Every token reads its own hidden state instead of that of the token before it."""

    def observe(self, tokens, features=None):
        super().observe(tokens, features.roll(-1, 0))


class KeptCache(EagleSession):
    """Nodes of a rejected branch stay in the cache."""

    def observe(self, tokens, features=None):
        kept, truncate = self._cache, self._cache.truncate
        kept.truncate = lambda length: None
        super().observe(tokens, features)
        kept.truncate = truncate


class WrongPositions(EagleSession):
    """Drafted nodes stand one position too far to the right."""

    def expand(self, tokens, parents):
        self._depths = [depth + 1 for depth in self._depths]
        return super().expand(tokens, parents)


class BlindNodes(EagleSession):
    """A node does not see its parent."""

    def expand(self, tokens, parents):
        self._visible = torch.zeros_like(self._visible)
        return super().expand(tokens, parents)


@pytest.mark.parametrize("fault", [ShiftedFeatures, KeptCache, WrongPositions, BlindNodes])
@pytest.mark.parametrize("shape", ["static", "dynamic"])
def test_planted_faults_show(shape: str, fault: Any) -> None:
    verifier, drafter = make_head()
    assert worst_gap(drafter, verifier, shape, session_class=fault) > 1e-3


# ---------------------------------------------------------------- refusals and the start
def test_refusals() -> None:
    verifier, drafter = make_head()
    with pytest.raises(ConfigError, match="verifier_session"):
        drafter.start(PROMPT, SamplingParams(), 8)
    other = tiny_verifier(64, torch.float64, seed=9, output_features=True)
    with pytest.raises(MismatchError, match="features of verifier"):
        drafter.start(PROMPT, SamplingParams(), 8, other.start(PROMPT, 8))
    with pytest.raises(MismatchError, match="another prompt"):
        drafter.start(PROMPT, SamplingParams(), 8, verifier.start(PROMPT[1:], 8))
    session = drafter.start(PROMPT, SamplingParams(), 8, verifier.start(PROMPT, 8))
    with pytest.raises(ConfigError, match="output_features=True"):
        session.observe([1], None)
    verifier.output_features = False
    with pytest.raises(ConfigError, match="output_features=True"):
        drafter.start(PROMPT, SamplingParams(), 8, verifier.start(PROMPT, 8))
    for wrong in ({"gamma": 0}, {"feature_loss_weight": -1.0}, {"layer_indices": [1, 0]}, {"draft_vocab_ids": [99]}):
        values = {"gamma": 3, "num_layers": 1, "layer_indices": [1], "vocab_size": 64, "base_config": {}} | wrong
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            EagleConfig(**values)


def test_the_fitted_start_is_better_than_the_plain_one() -> None:
    """Before any training the head drafts what the verifier's last layer makes of the regressed input."""
    verifier = tiny_verifier(64, seed=3)
    rows = [(random_tokens(40, seed), 2) for seed in range(16)]
    batch = make_batch([row for row, _ in rows], [(index, 20) for index in range(16)], gamma=1)
    errors = []
    for fit in (False, True):
        drafter = EagleDrafter.from_verifier(verifier, gamma=1)
        if fit:
            assert fit_fc(drafter, rows) > 0.1
        with torch.no_grad():
            errors.append(float(drafter.auxiliary_loss(batch, drafter.window_states(batch))))
    assert errors[1] < 0.5 * errors[0]


def test_the_feature_loss_reads_positions_that_exist() -> None:
    _, drafter = make_head()
    row = random_tokens(6, 1)
    batch = make_batch([row, random_tokens(9, 2)], [(0, 4), (1, 2)], gamma=3)
    truth = drafter.true_features(batch)
    states = torch.stack([truth[0, [4, 5, 5]], truth[1, [2, 3, 4]]])
    states[0, 2] += 100.0  # behind the end of its rollout: token 5 is the last one
    assert float(drafter.auxiliary_loss(batch, states)) == 0.0
    states[0, 1] += 2.0
    assert float(drafter.auxiliary_loss(batch, states)) == pytest.approx(1.5 / 3)
