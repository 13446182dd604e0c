"""Compiled passes against the eager ones: logits, hidden states, drafts, decoding, and the edges of the buckets.

Most tests capture the same graphs without inductor (seconds instead of minutes); one runs what users run.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from helpers import gap, random_tokens, reference_greedy, tiny_verifier

from specdiff2.decoding.autoregressive import AutoregressiveDecoder
from specdiff2.decoding.samplers import make_decoder
from specdiff2.models import compiled_stack, verifier_session
from specdiff2.models.block_drafter import BlockDrafter
from specdiff2.models.verifier import HFVerifier
from specdiff2.tree import TokenTree
from specdiff2.types import SamplingParams

EXACT = 1e-5
GAMMA = 4
PROMPT = [5, 9, 11, 40, 2]
GREEDY = SamplingParams(temperature=0.0)
CAPTURED = "eager"  # dynamo captures the whole graph, torch runs it


def pair(backend: str = CAPTURED, **options) -> tuple[HFVerifier, HFVerifier]:
    """The same model twice: eager, and with compiled passes."""
    eager, compiled = tiny_verifier(**options), tiny_verifier(**options)
    compiled.compile(backend=backend)
    return eager, compiled


def some_trees(root: int, seed: int = 0) -> Iterator[TokenTree]:
    """One node; a chain; bushy trees with shared prefixes, below, at and above a bucket's size."""
    generator = torch.Generator().manual_seed(seed)
    yield TokenTree.root_only(root)
    yield TokenTree.from_chains(root, [[1, 2, 3]])
    yield TokenTree.from_chains(root, [[1, 2, 3], [1, 2, 4], [1, 7, 7], [8, 1, 2]])
    for num_nodes in (9, 10):
        parents = [int(torch.randint(0, node + 1, (), generator=generator)) for node in range(num_nodes - 1)]
        yield TokenTree.best_first(root, random_tokens(num_nodes - 1, seed), parents)


def compare(eager: HFVerifier, compiled: HFVerifier) -> float:
    """The largest difference of logits and hidden states over trees and cache lengths."""
    worst = 0.0
    one, other = eager.start(PROMPT, 60), compiled.start(PROMPT, 60)
    for step, length in enumerate((0, 3, 9)):
        for token in random_tokens(length, step):
            for session in (one, other):
                session.score(TokenTree.root_only(session.last_token))
                session.commit([], token)
        for tree in some_trees(one.last_token, step):
            expected, scored = one.score(tree), other.score(tree)
            assert scored.shape == expected.shape and scored.dtype == expected.dtype
            assert other.cache.length == one.cache.length
            worst = max(worst, gap(scored, expected))
            for seen, wanted in zip(other._hidden or (), one._hidden or (), strict=True):
                worst = max(worst, gap(seen[:, : tree.num_nodes], wanted))
    return worst


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"output_features": True, "num_hidden_layers": 3}),
        ("qwen2", {"dtype": torch.float64}),
        ("llama", {"attn": "eager", "vocab_size": 60, "num_key_value_heads": 1, "attention_bias": True}),
    ],
)
def test_scores_equal_eager(family: str, options: dict) -> None:
    eager, compiled = pair(family=family, **options)
    assert compare(eager, compiled) < EXACT
    assert compiled.passes.num_graphs == 3  # 1, 9 and 17 nodes


def test_functionalised_graphs_write_the_cache() -> None:
    """What inductor starts from: mutation of the cache taken out of the graph and put back."""
    assert compare(*pair("aot_eager")) < EXACT


@pytest.mark.parametrize("mistake", ["siblings are seen", "padding is seen", "only parents are seen"])
def test_planted_mistakes_are_noticed(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def ancestors(parents, real=compiled_stack.ancestor_mask):
        mask = real(parents)
        if mistake == "siblings are seen":
            mask = mask | (parents[:, None] == parents)
        elif mistake == "padding is seen":
            mask[0, -1] = True
        else:
            mask = torch.eye(len(mask), dtype=torch.bool)
            mask[torch.arange(len(mask)), parents.clamp(min=0)] = True
        return mask

    monkeypatch.setattr(compiled_stack, "ancestor_mask", ancestors)
    assert compare(*pair()) > 1e-3


def conditioned(verifier: HFVerifier, num_layers: int = 2, **options) -> BlockDrafter:
    """A drafter with random inputs: nothing that is zero could hide a mistake."""
    drafter = BlockDrafter.from_verifier(
        verifier, num_layers=num_layers, gamma=GAMMA, shifted=True, conditioning="verifier_kv", **options
    )
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in [
            *drafter.context_input.parameters(),
            *(drafter.markov.parameters() if drafter.markov else ()),
        ]:
            parameter.normal_(std=0.3, generator=generator)
    return drafter.eval()


def compare_drafts(eager: HFVerifier, compiled: HFVerifier, **options) -> float:
    """The largest difference of states and logits over prompts, committed texts and window lengths."""
    worst, drafters = 0.0, [conditioned(verifier, **options) for verifier in (eager, compiled)]
    for prompt in ([7], PROMPT):
        sessions = eager.start(prompt, 60), compiled.start(prompt, 60)
        drafts = [d.start(prompt, GREEDY, 60, s) for d, s in zip(drafters, sessions, strict=True)]
        for token in random_tokens(6, 5):
            for gamma in (GAMMA, 2, 1):
                (wanted, wanted_logits), (states, logits) = (draft.window_outputs(gamma, None) for draft in drafts)
                assert states.shape == wanted.shape and logits.shape == wanted_logits.shape
                worst = max(worst, gap(states, wanted), gap(logits, wanted_logits))
            tree = TokenTree.from_chains(sessions[0].last_token, [[1, 2, 3], [token, 4, 5]])
            for session in sessions:
                assert session.cache.length == session.num_committed - 1, "a draft leaves no trace"
                session.score(tree)
                session.commit(tree.chain_nodes[1][:2], token)
    return worst


@pytest.mark.parametrize("options", [{}, {"markov_rank": 3, "draft_vocab_ids": list(range(0, 60, 2))}])
def test_drafts_equal_eager(options: dict) -> None:
    eager, compiled = pair(num_hidden_layers=2)
    assert compare_drafts(eager, compiled, **options) < EXACT


def test_a_window_that_sees_unused_columns_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_columns(num_columns, *rest, real=compiled_stack.static_window_mask):
        return real(num_columns * 0 + GAMMA, *rest)

    monkeypatch.setattr(compiled_stack, "static_window_mask", all_columns)
    assert compare_drafts(*pair(num_hidden_layers=2)) > 1e-3


def test_several_denoising_steps_stay_eager() -> None:
    eager, compiled = pair(num_hidden_layers=2)
    laws = []
    for verifier in (eager, compiled):
        drafter = conditioned(verifier, denoising_steps=2)
        laws.append(drafter.start(PROMPT, GREEDY, 20, verifier.start(PROMPT, 20)).law(GAMMA))
    assert compiled.passes.num_graphs == 0
    assert torch.equal(laws[0].position_log_probs(), laws[1].position_log_probs())


@pytest.mark.slow
def test_what_users_run() -> None:
    """Inductor with frozen weights: verify and draft, then greedy decoding token for token."""
    eager, compiled = pair("inductor", num_hidden_layers=2, vocab_size=60, output_features=True)
    drafter = conditioned(compiled, num_layers=1)
    compiled.passes.warm({9}, 60 + verifier_session.TREE_HEADROOM, [drafter])
    assert compiled.passes.num_graphs == 3 and compiled.runtime_mode == "compiled"
    reference = eager.start(PROMPT, 10)
    session = compiled.start(PROMPT, 10)
    for tree in [tree for tree in some_trees(PROMPT[-1]) if tree.num_nodes <= 9]:
        assert gap(session.score(tree), reference.score(tree)) < EXACT
    decoder = make_decoder(compiled, drafter, sampler="tree", num_nodes=8, verifier_sampling=GREEDY)
    expected = reference_greedy(eager.model, PROMPT, 20, vocab_size=60)
    assert decoder.generate(PROMPT, max_new_tokens=20).tokens == expected
    assert AutoregressiveDecoder(compiled).generate(PROMPT, max_new_tokens=20).tokens == expected
    assert compiled.passes.num_graphs == 3, "nothing is compiled while decoding"
    with torch.no_grad():  # the graph has weights of its own
        compiled.model.model.layers[0].mlp.up_proj.weight.zero_()
    assert gap(session.score(tree), reference.score(tree)) < EXACT


@pytest.mark.slow
def test_bfloat16_passes_compile() -> None:
    """Packed products, which float32 graphs do not have. Rounding differs: the same to two digits."""
    eager, compiled = pair("inductor", num_hidden_layers=1, dtype=torch.bfloat16)
    drafters = [conditioned(verifier, num_layers=1).to(torch.bfloat16) for verifier in (eager, compiled)]
    compiled.passes.warm((), 5 + verifier_session.TREE_HEADROOM, drafters[1:])
    one, other = eager.start(PROMPT, 5), compiled.start(PROMPT, 5)
    tree = TokenTree.root_only(PROMPT[-1])
    wanted = one.score(tree)
    assert gap(other.score(tree), wanted) < 0.02 * float(wanted.abs().max())
    drafts = [d.start(PROMPT, GREEDY, 5, s) for d, s in zip(drafters, (one, other), strict=True)]
    (states, logits), (found, found_logits) = (draft.window_outputs(GAMMA, None) for draft in drafts)
    assert gap(found, states) < 0.03 * float(states.abs().max())
    assert gap(found_logits, logits) < 0.03 * float(logits.abs().max()) and found_logits.dtype == torch.float32
    assert compiled.passes.num_graphs == 2


@pytest.mark.parametrize("sampler", ["autoregressive", "specdiff2", "tree"])
def test_greedy_decoding_equals_the_reference(sampler: str) -> None:
    verifier = tiny_verifier(num_hidden_layers=2)
    verifier.compile(backend=CAPTURED)
    if sampler == "autoregressive":
        decoder = AutoregressiveDecoder(verifier)
    else:
        sizes = {"num_nodes": 8} if sampler == "tree" else {"num_drafts": 2}
        decoder = make_decoder(verifier, conditioned(verifier), sampler=sampler, verifier_sampling=GREEDY, **sizes)
    for prompt in ([3], PROMPT):
        expected = reference_greedy(verifier.model, prompt, 24)
        assert decoder.generate(prompt, max_new_tokens=24).tokens == expected


def test_accepting_the_last_branch_then_decoding_on() -> None:
    """Case 14 with compiled passes."""
    verifier = tiny_verifier()
    verifier.compile(backend=CAPTURED)
    truth = reference_greedy(verifier.model, PROMPT, 16)
    session = verifier.start(PROMPT, 30)
    tree = TokenTree.from_chains(PROMPT[-1], [[1, 1, 1], [truth[0], 1, 1], [truth[0], truth[1], 1], truth[:3]])
    path = tree.chain_nodes[-1]
    root = int(session.score(tree)[path[-1]].argmax())
    session.commit(path, root)
    produced = [*truth[:3], root]
    for _ in range(10):
        root = int(session.score(TokenTree.root_only(root))[0].argmax())
        session.commit([], root)
        produced.append(root)
    assert produced == truth[: len(produced)]
    assert session.cache.length == session.num_committed - 1


def test_a_full_cache_and_one_that_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """119 cached tokens and 9 nodes fill 128 slots exactly; one token more needs the next capacity."""
    monkeypatch.setattr(verifier_session, "TREE_HEADROOM", 0)
    eager, compiled = pair(num_hidden_layers=2)
    prompt = random_tokens(120, 8)
    drafters = [conditioned(verifier) for verifier in (eager, compiled)]
    one, other = eager.start(prompt, 8), compiled.start(prompt, 8)
    drafts = [d.start(prompt, GREEDY, 8, s) for d, s in zip(drafters, (one, other), strict=True)]
    for capacity in (128, 256, 256):
        tree = next(tree for tree in some_trees(one.last_token) if tree.num_nodes == 9)
        assert gap(other.score(tree), one.score(tree)) < EXACT
        assert other.cache.capacity == capacity
        for session in (one, other):
            session.commit([], 7)
        (_, wanted), (_, logits) = (draft.window_outputs(GAMMA, None) for draft in drafts)
        assert gap(logits, wanted) < EXACT, "the drafter reads the cache that the verifier now uses"
