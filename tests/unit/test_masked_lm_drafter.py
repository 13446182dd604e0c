"""Whole masked-diffusion language models as drafters: every family, loaded from a checkpoint in its own layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from family_checkpoints import write_checkpoint
from helpers import gap, make_batch, reference_greedy, tiny_verifier
from torch import Tensor

from specdiff2.decoding.samplers import make_decoder
from specdiff2.evaluation.losslessness import enumerate_outcomes, total_variation
from specdiff2.models.families import FAMILIES, FamilyModel
from specdiff2.models.family_loading import load_family_model
from specdiff2.models.masked_lm_drafter import MaskedLMDrafter
from specdiff2.models.verifier import HFVerifier
from specdiff2.rng import TorchRandomSource
from specdiff2.types import ConfigError, SamplingParams

GAMMA, EXACT = 4, 1e-5
GREEDY = SamplingParams(temperature=0.0)
MODES = ("bidirectional", "causal_prefix")
PROMPT = [40, 41, 42, 50, 61, 44, 40]


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield write_checkpoint(tmp_path_factory.mktemp("family") / request.param, request.param)


@pytest.fixture
def base(folder: Path) -> FamilyModel:
    return load_family_model(folder, dtype="float32")


def verifier_for(base: FamilyModel, **changes) -> HFVerifier:
    """A tiny verifier with the drafter's tokenizer."""
    return tiny_verifier(max(base.tokenizer.get_vocab().values()) + 1, tokenizer=base.tokenizer, **changes)


def make(base: FamilyModel, verifier: HFVerifier, **changes) -> MaskedLMDrafter:
    return MaskedLMDrafter.from_base(base, verifier, **{"gamma": GAMMA, "trainable": False} | changes)


@torch.no_grad()
def eager_logits(base: FamilyModel, tokens: list[int], slots: list[int], attention: str) -> Tensor:
    """Logits of the window ``slots`` behind ``tokens``: one plain forward of the model, no cache, nothing packed."""
    ids, known = torch.tensor([tokens + slots]), len(tokens)
    allowed = torch.ones(ids.shape[1], ids.shape[1])
    if attention == "causal_prefix":
        allowed[:known] = allowed.tril()[:known]
    bias = torch.where(allowed > 0, 0.0, torch.finfo(torch.float32).min)[None, None]
    logits = base.model(input_ids=ids, attention_mask=bias, use_cache=False).logits[0]
    first = known - 1 if base.family.shifted else known
    return logits[first : first + len(slots)]


@pytest.mark.parametrize("attention", MODES)
def test_marginals_equal_an_eager_forward(base: FamilyModel, attention: str) -> None:
    drafter = make(base, verifier_for(base), attention=attention)
    session = drafter.start(PROMPT, GREEDY, 30)
    masks = [base.mask_token_id] * GAMMA
    for new in ([], [45, 46, 47], [60]):
        session.observe(new)
        tokens = PROMPT if not new else [*tokens, *new]
        expected = eager_logits(base, tokens, masks, attention)
        assert gap(session.window_logits(GAMMA), expected[:, drafter.draft_vocab_ids]) < EXACT
    one_off = dataclasses.replace(base, family=dataclasses.replace(base.family, shifted=not base.family.shifted))
    assert gap(session.window_logits(GAMMA), eager_logits(one_off, tokens, masks, attention)[:, drafter.draft_vocab_ids]) > 0.1  # fmt: skip  # noqa: E501


@pytest.mark.parametrize("attention", MODES)
def test_training_computes_what_decoding_proposes(base: FamilyModel, attention: str) -> None:
    drafter = make(base, verifier_for(base), attention=attention)
    rows = [[*PROMPT, 45, 46, 47, 60, 61], [50, 40, 44, 43, 42]]
    windows = [(0, 6), (1, 2), (0, 9), (0, 0)]
    packed = drafter(make_batch(rows, windows))
    for logits, (row, anchor) in zip(packed, windows, strict=True):
        session = drafter.start(rows[row][: anchor + 1], GREEDY, 30)
        assert gap(session.window_logits(GAMMA), logits) < EXACT


@pytest.mark.parametrize("attention", MODES)
def test_rewritten_tokens_leave_no_trace(base: FamilyModel, attention: str) -> None:
    drafter = make(base, verifier_for(base), attention=attention)
    session = drafter.start(PROMPT, GREEDY, 30)
    for tokens in ([*PROMPT, 45, 46], [*PROMPT[:4], 60, 61], PROMPT[:2], [*PROMPT, 47]):
        session.rewrite(tokens)
        fresh = drafter.start(tokens, GREEDY, 30)
        assert gap(session.window_logits(GAMMA), fresh.window_logits(GAMMA)) < EXACT


def test_later_passes_see_what_earlier_ones_fixed(base: FamilyModel) -> None:
    """Two passes from left to right against two eager forwards."""
    drafter = make(base, verifier_for(base), attention="bidirectional", denoising_steps=2, unmasking="left_to_right")
    ids, mask = drafter.draft_vocab_ids, base.mask_token_id
    first = eager_logits(base, PROMPT, [mask] * GAMMA, "bidirectional")[:, ids].argmax(-1)
    fixed = ids[first[:2]].tolist()
    second = eager_logits(base, PROMPT, [*fixed, mask, mask], "bidirectional")[:, ids]
    law = drafter.start(PROMPT, GREEDY, 30).law(GAMMA).position_log_probs()
    assert law[:2].exp().argmax(-1).tolist() == first[:2].tolist() and torch.allclose(law[:2].exp().max(-1).values, torch.ones(2))  # fmt: skip  # noqa: E501
    assert gap(law[2:], second[2:].log_softmax(-1)) < EXACT
    assert gap(law[2:], eager_logits(base, PROMPT, [mask] * GAMMA, "bidirectional")[2:, ids].log_softmax(-1)) > 0.01


@pytest.mark.parametrize("unmasking", ["confidence", "entropy", "random"])
def test_every_order_fixes_half_of_the_window(base: FamilyModel, unmasking: str) -> None:
    drafter = make(base, verifier_for(base), denoising_steps=2, unmasking=unmasking)
    law = drafter.start(PROMPT, GREEDY, 30).law(GAMMA).position_log_probs().exp()
    assert int((law.max(-1).values > 1 - 1e-6).sum()) == GAMMA // 2


def test_what_is_never_drafted(base: FamilyModel) -> None:
    """The mask, the other forbidden ids and padded rows, however probable the head calls them (cases 17 and 19)."""
    verifier = verifier_for(base)
    barred = {base.mask_token_id, *base.forbidden_ids}
    head = base.model.get_output_embeddings()
    with torch.no_grad():
        for row in [*barred, *range(verifier.vocab_size, head.weight.shape[0])]:
            if row < head.weight.shape[0]:
                head.weight[row] *= 50
    drafter = make(base, verifier)
    assert not barred & set(drafter.draft_vocab_ids.tolist()) and len(drafter.draft_vocab_ids) > 40
    session = drafter.start(PROMPT, SamplingParams(temperature=5.0), 30)
    tokens = session.propose(GAMMA, 200, TorchRandomSource(0), needs_probs=False).tokens
    assert not barred & set(tokens.flatten().tolist()) and int(tokens.max()) < verifier.vocab_size


def test_a_committed_mask_id_is_not_shown_as_a_mask(base: FamilyModel) -> None:
    """To the verifier the id may be an ordinary token (811 of LLaMA-2, another added token of Qwen3)."""
    verifier = verifier_for(base)
    drafter = make(base, verifier)
    end = base.tokenizer.eos_token_id
    with_mask = drafter.start([*PROMPT, base.mask_token_id, 45], GREEDY, 30).window_logits(GAMMA)
    with_end = drafter.start([*PROMPT, end, 45], GREEDY, 30).window_logits(GAMMA)
    assert torch.equal(with_mask, with_end)


@pytest.mark.parametrize("attention", MODES)
@pytest.mark.parametrize("sampler", ["specdiff", "specdiff2", "tree_match", "tree"])
def test_greedy_text_is_the_verifiers_own(base: FamilyModel, sampler: str, attention: str) -> None:
    verifier = verifier_for(base)
    drafter = make(base, verifier, attention=attention)
    extra = {"num_nodes": 6} if sampler == "tree" else {}
    decoder = make_decoder(verifier, drafter, sampler=sampler, verifier_sampling=GREEDY, **extra)
    found = decoder.generate(PROMPT, max_new_tokens=24, rng=TorchRandomSource(1))
    assert found.tokens == reference_greedy(
        verifier.model, PROMPT, 24, vocab_size=verifier.vocab_size, eos_ids=verifier.eos_ids
    )


@pytest.mark.parametrize(("sampler", "num_drafts"), [("specdiff2", 2), ("tree_match", 2), ("block", 1)])
def test_sampled_text_follows_the_verifiers_law(base: FamilyModel, sampler: str, num_drafts: int) -> None:
    """Every random branch of drafter and verifier, on the real models; float32 passes differ by about 1e-5."""
    verifier = verifier_for(base)
    law = SamplingParams(temperature=1.5, top_k=2)
    decoder = make_decoder(
        verifier, make(base, verifier), sampler=sampler, num_drafts=num_drafts, gamma=1, verifier_sampling=law,
        draft_sampling=SamplingParams(temperature=1.5, top_k=2),
    )  # fmt: skip

    def enumerate_law(run) -> dict[tuple[int, ...], float]:
        return enumerate_outcomes(lambda rng: tuple(run(PROMPT, max_new_tokens=2, rng=rng).tokens))

    from specdiff2.decoding.autoregressive import AutoregressiveDecoder

    alone = enumerate_law(AutoregressiveDecoder(verifier, sampling=law).generate)
    assert len(alone) >= 3 and total_variation(enumerate_law(decoder.generate), alone) < 1e-4


@pytest.mark.parametrize("attention", MODES)
def test_what_training_learns_decoding_proposes(base: FamilyModel, attention: str) -> None:
    """Case 21 for the family's shift: a text that counts up is continued for a whole window; one off, it breaks."""
    verifier = verifier_for(base)
    drafter = make(base, verifier, attention=attention, trainable=True).train()
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    rows = [list(range(start, start + 16)) for start in (30, 38, 46)]
    batch = make_batch(rows, [(r, a) for r in range(3) for a in (2, 5, 8, 11)])
    targets = drafter.to_draft_vocab(batch.targets)
    for _ in range(80):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(drafter(batch).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
    drafter.eval()

    def streak(drafter: MaskedLMDrafter) -> int:
        draft = drafter.start([38, 39, 40], GREEDY, 20).propose(GAMMA, 1, TorchRandomSource(0), needs_probs=False)
        hits = [token == 41 + j for j, token in enumerate(draft.tokens[0].tolist())]
        return GAMMA if all(hits) else hits.index(False)

    assert streak(drafter) == GAMMA
    drafter.config = dataclasses.replace(drafter.config, shifted=not drafter.config.shifted)
    assert streak(drafter) < GAMMA


def test_bad_settings_are_refused(base: FamilyModel) -> None:
    verifier = verifier_for(base)
    for changes, named in (
        ({"unmasking": "best"}, "unmasking='best'"),
        ({"attention": "causal"}, "attention='causal'"),
        ({"gamma": 0}, "gamma=0"),
        ({"lora": {"rank": 4}}, "lora="),
        ({"draft_vocab_ids": [base.mask_token_id]}, "no token can be drafted"),
    ):
        with pytest.raises(ConfigError, match=named):
            make(base, verifier, **changes)
    with pytest.raises(ConfigError, match="tokenizer"):
        make(base, tiny_verifier(64))
