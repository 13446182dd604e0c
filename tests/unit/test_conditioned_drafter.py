"""The conditioned drafter: training forward against decoding on the verifier's live cache, Markov head, refusals."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from helpers import gap, make_batch, random_tokens, tiny_verifier

from specdiff2.decoding.samplers import make_decoder
from specdiff2.functional.previous_tokens import previous_tokens
from specdiff2.models import window_law
from specdiff2.models.block_drafter import BlockDrafter
from specdiff2.models.context_drafter_session import ContextDrafterSession
from specdiff2.models.pretrained import load_drafter, save_drafter
from specdiff2.models.projection_fit import fit_context_input
from specdiff2.models.verifier_session import HFVerifierSession
from specdiff2.rng import TorchRandomSource
from specdiff2.tree import TokenTree
from specdiff2.types import ConfigError, MismatchError, SamplingParams

GAMMA = 4
EXACT = 1e-5
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=1.0)


def verifier_of(**changes):
    return tiny_verifier(num_hidden_layers=4, **changes)


def conditioned(verifier, *, markov_rank: int = 0, **changes) -> BlockDrafter:
    """A drafter with random inputs and Markov head: nothing that is zero could hide a mistake."""
    options = {"num_layers": 2, "gamma": GAMMA, "shifted": True, "conditioning": "verifier_kv", **changes}
    drafter = BlockDrafter.from_verifier(verifier, markov_rank=markov_rank, **options)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        parts = [*drafter.context_input.parameters(), *(drafter.markov.parameters() if drafter.markov else ())]
        for parameter in parts:
            parameter.normal_(std=0.3, generator=generator)
    return drafter


def commit_text(session: HFVerifierSession, text: list[int]) -> None:
    """Bring the session to ``text`` in rounds of up to three tokens, scoring trees with wrong branches as well."""
    while session.num_committed < len(text):
        left = text[session.num_committed :]
        wrong = (left[0] + 1) % 60
        right = [*left, 7][:2]
        chains = [[wrong, 5, 6], [*right, 9]]
        tree = TokenTree.from_chains(session.last_token, torch.tensor(chains))
        session.score(tree)
        num_accepted = min(len(left) - 1, 2)
        session.commit(tree.chain_nodes[1][:num_accepted], left[num_accepted])


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("markov_rank", [0, 3])
def test_session_equals_packed_forward(markov_rank: int, attn: str, family: str) -> None:
    verifier = verifier_of(attn=attn, family=family)
    drafter = conditioned(verifier, markov_rank=markov_rank)
    rows = [random_tokens(24, 1, 60), random_tokens(15, 2, 60)]
    anchors = [2, 3, 6, 9, 15, 22]
    batch = make_batch(rows, [(0, a) for a in anchors] + [(1, 0), (1, 9)])
    packed = drafter(batch)
    assert packed.shape == (8, GAMMA, 64) and packed.dtype == torch.float32
    states, previous = drafter.window_states(batch), previous_tokens(batch)
    assert torch.equal(drafter.states_logits(states, previous), packed)
    session = verifier.start(rows[0][:3], 40)
    drafting = drafter.start(rows[0][:3], GREEDY, 40, session)
    for window, anchor in enumerate(anchors):
        commit_text(session, rows[0][: anchor + 1])
        for _ in range(2):  # a second look changes nothing
            law = drafting.law(GAMMA)
            rows_of_law = [law.log_probs(depth, previous[window, depth : depth + 1])[0] for depth in range(GAMMA)]
            assert gap(torch.stack(rows_of_law), packed[window].log_softmax(-1)) < EXACT
        assert session.cache.length == session.num_committed - 1, "the window leaves no trace in the verifier's cache"
    one = verifier.start(rows[1][:1], 40)
    law = drafter.start(rows[1][:1], GREEDY, 40, one).law(GAMMA)
    assert gap(law.log_probs(0, previous[6, :1])[0], packed[6, 0].log_softmax(-1)) < EXACT


def test_a_shorter_window_is_the_law_of_a_shorter_training_window() -> None:
    verifier = verifier_of()
    drafter = conditioned(verifier, markov_rank=2)
    row = random_tokens(12, 4, 60)
    batch = make_batch([row], [(0, 8)], gamma=2)
    session = verifier.start(row[:9], 10)
    law = drafter.start(row[:9], GREEDY, 10, session).law(2)
    previous = previous_tokens(batch)
    rows = torch.stack([law.log_probs(depth, previous[0, depth : depth + 1])[0] for depth in range(2)])
    assert gap(rows, drafter(batch)[0].log_softmax(-1)) < EXACT


def test_drafting_does_not_change_what_the_verifier_scores() -> None:
    verifier = verifier_of()
    drafter = conditioned(verifier)
    row = random_tokens(12, 5, 60)
    alone, shared = verifier.start(row, 10), verifier.start(row, 10)
    tree = TokenTree.from_chains(row[-1], torch.tensor([[1, 2], [1, 3]]))
    drafter.start(row, GREEDY, 10, shared).law(GAMMA)
    assert torch.equal(alone.score(tree), shared.score(tree))


def test_stale_features_are_noticed(monkeypatch) -> None:
    """The planted mistake: hidden states of the round before. The check that catches it is the one above."""

    def stale(self, path, next_token, commit=HFVerifierSession.commit):
        before = self._anchor
        commit(self, path, next_token)
        self._anchor = before

    monkeypatch.setattr(HFVerifierSession, "commit", stale)
    with pytest.raises(AssertionError):
        test_session_equals_packed_forward(0, "sdpa", "llama")


def test_features_of_the_wrong_node_are_noticed(monkeypatch) -> None:
    def wrong(self, path, next_token, commit=HFVerifierSession.commit):
        hidden = self._hidden
        commit(self, path, next_token)
        self._anchor = hidden, 0, 0

    monkeypatch.setattr(HFVerifierSession, "commit", wrong)
    with pytest.raises(AssertionError):
        test_session_equals_packed_forward(0, "sdpa", "llama")


def test_packed_windows_do_not_see_each_other_nor_their_future() -> None:
    verifier = verifier_of()
    drafter = conditioned(verifier)
    row = random_tokens(20, 6, 60)
    together = drafter(make_batch([row], [(0, 4), (0, 9), (0, 5)]))
    for index, anchor in enumerate((4, 9, 5)):
        assert gap(drafter(make_batch([row], [(0, anchor)]))[0], together[index]) < EXACT
        changed = row[: anchor + 1] + [(token + 7) % 60 for token in row[anchor + 1 :]]
        assert gap(drafter(make_batch([changed], [(0, anchor)]))[0], together[index]) < EXACT
    assert gap(drafter(make_batch([[row[0] + 1 & 31, *row[1:]]], [(0, 9)]))[0], together[1]) > EXACT, "reads its prefix"


@pytest.mark.parametrize("markov_rank", [0, 2])
@pytest.mark.parametrize("sampler", ["specdiff", "specdiff2", "tree_match", "tree", "traversal", "block"])
def test_greedy_decoding_equals_the_verifier_alone(sampler: str, markov_rank: int) -> None:
    verifier = verifier_of(eos_ids=())
    drafter = conditioned(verifier, markov_rank=markov_rank)
    prompt = random_tokens(9, 7, 60)
    options = {"num_nodes": 9} if sampler == "tree" else {}
    decoder = make_decoder(verifier, drafter, sampler=sampler, verifier_sampling=GREEDY, **options)
    found = decoder.generate(prompt, max_new_tokens=25, rng=TorchRandomSource(0)).tokens
    tokens = list(prompt)
    for _ in range(25):
        with torch.no_grad():
            tokens.append(int(verifier.model(torch.tensor([tokens])).logits[0, -1].argmax()))
    assert found == tokens[len(prompt) :]


# ---------------------------------------------------------------- Markov head
NUM_DRAWS = 20_000


class PairLaw:
    """The law a session states for its first two positions, and how far drawn pairs are from it."""

    def __init__(self, drafter: BlockDrafter, session: ContextDrafterSession) -> None:
        law = session.law(2)
        self.drafter, self.law = drafter, law
        self.first = law.log_probs(0, torch.tensor([session.last_token]))[0].exp()
        self.joint = self.first[:, None] * law.log_probs(1, law.ids).exp()
        self.second = self.joint.sum(0)
        # pairs that the stated law likes better than independent draws with the same two marginals do
        self.liked = self.joint > self.first[:, None] * self.second

    @property
    def dependence(self) -> float:
        """Total variation between the stated law and independent draws: the difference in P(liked)."""
        independent = self.first[:, None] * self.second
        return float((self.joint - independent)[self.liked].sum())

    def distances(self, tokens: torch.Tensor) -> dict[str, float]:
        """Total variation of both marginals, and the gap in P(liked)."""
        index = self.drafter.to_draft_vocab(tokens)
        counts = torch.zeros_like(self.joint)
        counts.index_put_((index[:, 0], index[:, 1]), torch.ones(len(index)), accumulate=True)
        found = counts / len(tokens)
        return {
            "first": (found.sum(1) - self.first).abs().sum().item() / 2,
            "second": (found.sum(0) - self.second).abs().sum().item() / 2,
            "pairs": abs(float((found - self.joint)[self.liked].sum())),
        }


# With n draws from the stated law over v tokens the expected total variation of a marginal is at most
# sqrt(v / n) / 2 = 0.028 (Cauchy-Schwarz), exceeded by 0.02 with probability below exp(-2 n 0.02^2) = 1e-7 (bounded
# differences); the gap in P(liked) exceeds 0.02 with probability below 2 exp(-2 n 0.02^2) = 3e-7 (Hoeffding).
BOUNDS = {"first": 0.048, "second": 0.048, "pairs": 0.02}


def markov_pair() -> tuple[BlockDrafter, ContextDrafterSession, PairLaw]:
    verifier = verifier_of()
    drafter = conditioned(verifier, markov_rank=3)
    with torch.no_grad():
        drafter.markov.token_in.mul_(8.0)  # neighbours that depend on each other strongly
    row = random_tokens(6, 8, 60)
    session = drafter.start(row, SAMPLED, 10, verifier.start(row, 10))
    return drafter, session, PairLaw(drafter, session)


def test_markov_drafts_follow_the_law_they_state() -> None:
    _, session, stated = markov_pair()
    distances = stated.distances(session.propose(2, NUM_DRAWS, TorchRandomSource(1), needs_probs=False).tokens)
    assert all(distances[name] < bound for name, bound in BOUNDS.items()), distances


def test_the_check_of_the_law_finds_independent_draws() -> None:
    """Planted: each position from its right marginal, but without looking at its neighbour; and one law for all."""
    _, session, stated = markov_pair()
    assert stated.dependence > 10 * BOUNDS["pairs"]
    marginals = TorchRandomSource(1).chains(torch.stack([stated.first, stated.second]), NUM_DRAWS)
    distances = stated.distances(stated.law.ids[marginals])
    assert distances["first"] < BOUNDS["first"] and distances["second"] < BOUNDS["second"]
    assert distances["pairs"] > 9 * BOUNDS["pairs"]
    common = session.propose(2, NUM_DRAWS, TorchRandomSource(1), needs_probs=True)  # meant for ratio rules only
    assert stated.distances(common.tokens)["second"] > BOUNDS["second"]


def test_markov_draft_probs_are_those_the_tokens_are_drawn_from() -> None:
    _, session, stated = markov_pair()
    law, ids = stated.law, stated.law.ids
    one = session.propose(2, 1, TorchRandomSource(2), needs_probs=True)
    expected = law.log_probs(1, one.tokens[0, :1])[0].exp()
    assert gap(one.draft_probs[1][ids], expected) < EXACT, "K=1: the law given the drawn token"
    several = session.propose(2, NUM_DRAWS, TorchRandomSource(2), needs_probs=True)
    chain = ids[stated.first.argmax()]
    assert gap(several.draft_probs[1][ids], law.log_probs(1, chain[None])[0].exp()) < EXACT, "K>1: one law for all"
    drawn = torch.bincount(several.tokens[:, 1], minlength=64) / NUM_DRAWS
    assert (drawn - several.draft_probs[1]).abs().sum().item() / 2 < BOUNDS["second"]


def test_a_longer_window_than_the_drafters_own_is_refused() -> None:
    drafter = conditioned(verifier_of())
    row = random_tokens(12, 13, 60)
    session = drafter.start(row, GREEDY, 20, drafter.context.verifier.start(row, 20))
    for ask in (lambda: session.law(GAMMA + 1), lambda: drafter(make_batch([row], [(0, 4)], gamma=GAMMA + 1))):
        with pytest.raises(ConfigError, match=f"gamma={GAMMA + 1}: expected at most {GAMMA}"):
            ask()


def test_another_dtype_reads_a_copy_of_the_cache() -> None:
    verifier = verifier_of()
    drafter = conditioned(verifier)
    row = random_tokens(10, 9, 60)
    expected = drafter.start(row, GREEDY, 10, verifier.start(row, 10)).window_logits(GAMMA)
    double = copy.deepcopy(drafter).double()
    session = verifier.start(row, 10)
    assert gap(double.start(row, GREEDY, 10, session).window_logits(GAMMA).float(), expected) < 1e-4
    assert session.cache.length == len(row) - 1


def test_save_and_load_round_trip(tmp_path) -> None:
    verifier = verifier_of()
    drafter = conditioned(verifier, markov_rank=2, draft_vocab_ids=[3, 5, 9, 40])
    batch = make_batch([random_tokens(10, 10, 60)], [(0, 4)])
    loaded = load_drafter(save_drafter(drafter, tmp_path / "d"), verifier)
    assert loaded.config == drafter.config
    assert torch.equal(loaded(batch), drafter.eval()(batch))


def test_features_of_another_verifier_are_refused() -> None:
    drafter = conditioned(verifier_of())
    other = verifier_of(seed=1)
    other.output_features = True
    with pytest.raises(MismatchError, match="features of verifier"):
        drafter.start([1, 2, 3], GREEDY, 5, other.start([1, 2, 3], 5))
    with pytest.raises(MismatchError, match="another prompt"):
        drafter.start([1, 2, 3], GREEDY, 5, drafter.context.verifier.start([1, 2, 4], 5))
    with pytest.raises(ConfigError, match="verifier_session"):
        drafter.start([1, 2, 3], GREEDY, 5)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"conditioning": "kv"}, "conditioning='kv'"),
        ({"shifted": False}, "shifted=true"),
        ({"attention": "bidirectional"}, "causal_prefix"),
        ({"feature_layers": [9]}, "hidden states 0..4"),
        ({"feature_layers": []}, "feature_layers"),
        ({"layer_indices": [3]}, "layer_indices"),
        ({"layer_indices": [3, 2]}, "layer_indices"),
        ({"markov_rank": -1}, "markov_rank"),
    ],
)
def test_bad_settings_are_refused(changes, match) -> None:
    with pytest.raises(ConfigError, match=match):
        conditioned(verifier_of(), **changes)


def test_the_fit_recovers_a_linear_relation_and_starts_better_than_nothing() -> None:
    verifier = verifier_of(seed=5)
    drafter = conditioned(verifier, markov_rank=2)
    rows = [(random_tokens(60, seed, 60), 3) for seed in range(12)]
    tokens = torch.tensor([rows[0][0]])
    _, hidden = verifier.forward(tokens, cache=None, logits_to_keep=1, output_hidden_states=True)
    target = hidden[drafter.config.layer_indices[0]][0, 3:]

    def error() -> float:
        context = drafter.context.read(make_batch([rows[0][0]], [(0, 3)]))
        features = context.features()[0, 2:-1]
        embedding = drafter.embeddings.embed(torch.tensor(rows[0][0][3:]), torch.float32)
        fused = drafter.context_input.fuse(embedding, features)
        return (drafter.context_input.anchor(fused) - target).square().mean().item()

    before = error()
    r_squared = fit_context_input(drafter, rows)
    assert 0.3 < r_squared <= 1.0
    assert error() < min(before, target.var().item())


def test_the_context_memory_is_asked_once_per_rollout_and_changes_nothing() -> None:
    drafter = conditioned(verifier_of())
    row = random_tokens(14, 11, 60)
    batch = make_batch([row], [(0, 4), (0, 6)])
    expected = drafter(batch)
    kept: dict[tuple[int, ...], torch.Tensor] = {}
    calls = itertools.count()

    def memory(ids, compute):
        if tuple(ids) not in kept:
            next(calls)
            kept[tuple(ids)] = compute(ids)
        return kept[tuple(ids)]

    drafter.context.memory = memory
    assert torch.equal(drafter(batch), expected) and torch.equal(drafter(batch), expected)
    assert next(calls) == 1


def test_gradients_reach_every_trained_part_and_nothing_of_the_verifier() -> None:
    verifier = verifier_of()
    drafter = conditioned(verifier, markov_rank=2)
    drafter(make_batch([random_tokens(14, 12, 60)], [(0, 4), (0, 9)])).square().mean().backward()
    missing = [name for name, parameter in drafter.named_parameters() if parameter.grad is None]
    assert not missing
    assert all(parameter.grad is None for parameter in verifier.model.parameters())
    assert not any("context." in name or "verifier" in name for name in drafter.state_dict())


@pytest.mark.parametrize("num_candidates", [256, 10])
def test_candidates_are_the_law_on_a_short_list(monkeypatch, num_candidates: int) -> None:
    monkeypatch.setattr(window_law, "NUM_CANDIDATES", num_candidates)
    verifier = verifier_of()
    drafter = conditioned(verifier, markov_rank=3, draft_vocab_ids=list(range(5, 45)))
    row = random_tokens(8, 13, 60)
    law = drafter.start(row, GREEDY, 10, verifier.start(row, 10)).law(3)
    previous = torch.tensor([row[-1], 7, 3])  # 3 is outside the draft vocabulary
    for depth in range(3):
        log_probs, ids = law.candidates(depth, previous)
        assert len(ids) == min(num_candidates, 40) and len(set(ids.tolist())) == len(ids)
        full = law.log_probs(depth, previous)[:, drafter.to_draft_vocab(ids)]
        assert gap(log_probs, full.log_softmax(-1)) < EXACT
        assert set(ids.tolist()) == set(law.ids[law.base[depth].topk(len(ids)).indices].tolist())


@pytest.mark.parametrize("markov_rank", [0, 3])
def test_confidence_shortens_the_window_before_anything_is_drawn(markov_rank: int) -> None:
    verifier = verifier_of()
    drafter = conditioned(verifier, markov_rank=markov_rank)
    row = random_tokens(9, 14, 60)
    session = drafter.start(row, SAMPLED, 10, verifier.start(row, 10))
    rows = session.law(GAMMA).given_argmax_chain()
    path = rows.log_softmax(-1).amax(-1).cumsum(-1).exp().tolist()
    for length in range(1, GAMMA + 1):
        session.min_confidence = path[length - 1] * 0.999
        lengths = {session.propose(GAMMA, 3, TorchRandomSource(i), needs_probs=True).tokens.shape[1] for i in range(9)}
        assert lengths == {length}, "the same for every draw"
    session.min_confidence = 0.999999
    assert session.propose(GAMMA, 1, TorchRandomSource(0), needs_probs=True).draft_probs.shape == (1, 64)


@pytest.mark.parametrize("sampler", ["block", "leviathan", "specdiff2", "traversal"])
def test_a_shortened_window_keeps_greedy_decoding(sampler: str) -> None:
    verifier = verifier_of(eos_ids=())
    drafter = conditioned(verifier, markov_rank=2)
    prompt = random_tokens(9, 7, 60)
    plain = make_decoder(verifier, drafter, sampler=sampler, verifier_sampling=GREEDY)
    short = make_decoder(verifier, drafter, sampler=sampler, verifier_sampling=GREEDY, min_confidence=0.01)
    a, b = (d.generate(prompt, max_new_tokens=25, rng=TorchRandomSource(0)) for d in (plain, short))
    assert a.tokens == b.tokens
    assert sum(r.num_drafted for r in b.rounds) / len(b.rounds) < sum(r.num_drafted for r in a.rounds) / len(a.rounds)
    assert short.describe() == {"min_confidence": 0.01}


@pytest.mark.parametrize("value", [-0.1, 1.0, True])
def test_a_bad_confidence_is_refused(value) -> None:
    verifier = verifier_of()
    with pytest.raises(ConfigError, match="min_confidence"):
        make_decoder(verifier, conditioned(verifier), sampler="block", min_confidence=value)
    with pytest.raises(ConfigError, match="grown tree"):
        make_decoder(verifier, conditioned(verifier), sampler="tree", num_nodes=9, min_confidence=0.5)
