"""The block drafter: training forward against decoding session, masks, vocabulary, gradients."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from helpers import gap, make_batch, random_tokens, tiny_verifier

from specdiff2.functional import window_masks
from specdiff2.functional.previous_tokens import previous_tokens
from specdiff2.functional.sampling import logits_to_probs
from specdiff2.models import layer_stack, packed_forward
from specdiff2.models.block_drafter import BlockDrafter
from specdiff2.models.block_drafter_config import evenly_spaced
from specdiff2.models.window_law import draw_drafts
from specdiff2.rng import TorchRandomSource
from specdiff2.types import ConfigError, SamplingParams, SpecDiffError

GAMMA = 4
EXACT = 1e-5
GREEDY = SamplingParams(temperature=0.0)
ALL_MODES = [(attention, shifted) for attention in ("causal_prefix", "bidirectional") for shifted in (False, True)]


@pytest.fixture(scope="module")
def verifier():
    return tiny_verifier(num_hidden_layers=4)


def make_drafter(verifier, **changes) -> BlockDrafter:
    return BlockDrafter.from_verifier(verifier, **{"num_layers": 3, "gamma": GAMMA, **changes})


# ---------------------------------------------------------------- training forward == decoding session
@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize(("attention", "shifted"), ALL_MODES)
def test_session_equals_packed_forward(attention: str, shifted: bool, attn: str, family: str) -> None:
    verifier = tiny_verifier(num_hidden_layers=4, attn=attn, family=family)
    drafter = make_drafter(verifier, attention=attention, shifted=shifted)
    rows = [random_tokens(24, 1), random_tokens(15, 2)]
    anchors = [2, 3, 7, 8, 15, 23]
    packed = drafter(make_batch(rows, [(0, a) for a in anchors] + [(1, 0), (1, 9)]))
    assert packed.shape == (8, GAMMA, 64) and packed.dtype == torch.float32
    session = drafter.start(rows[0][:3], GREEDY, 30)
    for window, anchor in enumerate(anchors):
        session.observe(rows[0][session.num_committed : anchor + 1])
        assert gap(session.window_logits(GAMMA), packed[window]) < EXACT
        assert gap(session.window_logits(GAMMA), packed[window]) < EXACT, "a second look changes nothing"
    one_token = drafter.start(rows[1][:1], GREEDY, 30)
    assert gap(one_token.window_logits(GAMMA), packed[6]) < EXACT


@pytest.mark.parametrize(("attention", "shifted"), ALL_MODES)
@pytest.mark.parametrize("gamma", [1, 2, 7])
def test_windows_of_other_sizes(verifier, attention: str, shifted: bool, gamma: int) -> None:
    drafter = make_drafter(verifier, attention=attention, shifted=shifted)
    row = random_tokens(12)
    packed = drafter(make_batch([row], [(0, 5), (0, 11)], gamma))
    session = drafter.start(row[:6], GREEDY, 1)  # too little room on purpose: the buffers grow
    assert gap(session.window_logits(gamma), packed[0]) < EXACT
    session.observe(row[6:])
    assert gap(session.window_logits(gamma), packed[1]) < EXACT


def test_prompt_longer_than_a_prefill_chunk(verifier, monkeypatch) -> None:
    monkeypatch.setattr("specdiff2.models.block_drafter_session.PREFILL_CHUNK", 5)
    drafter = make_drafter(verifier)
    row = random_tokens(17)
    packed = drafter(make_batch([row], [(0, 16)]))
    assert gap(drafter.start(row, GREEDY, 5).window_logits(GAMMA), packed[0]) < EXACT


def test_one_forward_pass_per_propose(verifier, monkeypatch) -> None:
    sizes = []
    original = layer_stack.run_stack
    monkeypatch.setattr(
        "specdiff2.models.block_drafter_session.run_stack",
        lambda stack, embeddings, *rest: (sizes.append(embeddings.shape[1]), original(stack, embeddings, *rest))[1],
    )
    session = make_drafter(verifier).start(random_tokens(9), GREEDY, 20)
    for new in ([], [1, 2, 3], [4]):
        session.observe(new)
        session.propose(GAMMA, 2, TorchRandomSource(0), needs_probs=False)
    assert sizes == [9, GAMMA, 3 + GAMMA, 1 + GAMMA]  # the prompt at the start, then only what is new


@pytest.mark.parametrize(("attention", "shifted"), ALL_MODES)
def test_what_training_learns_decoding_proposes(verifier, attention: str, shifted: bool) -> None:
    """Case 21 with the shipped forward and session: a text that counts up is continued for a whole window."""
    drafter = make_drafter(verifier, attention=attention, shifted=shifted, num_layers=2)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=5e-3)
    rows = [list(range(start, start + 16)) for start in (3, 11, 20, 30)]
    batch = make_batch(rows, [(r, a) for r in range(4) for a in (2, 5, 8, 11)])
    for _ in range(80):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(drafter(batch).flatten(0, 1), batch.targets.flatten())
        loss.backward()
        optimizer.step()
    session = drafter.start([20, 21, 22], GREEDY, 20)
    for anchor in (22, 25, 28):
        session.observe(range(20 + session.num_committed, anchor + 1))
        draft = session.propose(GAMMA, 1, TorchRandomSource(0), needs_probs=False)
        assert draft.tokens.tolist() == [[anchor + 1 + j for j in range(GAMMA)]]


# ---------------------------------------------------------------- planted errors must show
@pytest.mark.parametrize("attention", ["causal_prefix", "bidirectional"])
@pytest.mark.parametrize("mutant", ["mask bit", "positions", "slot sees beyond anchor"])
def test_mutants_change_the_logits(verifier, monkeypatch, mutant: str, attention: str) -> None:
    drafter = make_drafter(verifier, attention=attention)
    batch = make_batch([random_tokens(12)], [(0, 5), (0, 9)])
    right = drafter(batch)

    def mutated(*args, **kwargs):
        layout = window_masks.window_layout(*args, **kwargs)
        allowed, positions = layout.allowed.clone(), layout.position_ids.clone()
        if mutant == "positions":
            positions[:, layout.num_tokens :] += 1
        elif mutant == "mask bit":
            allowed[0, 0, -1 if attention == "bidirectional" else layout.num_tokens, 2] = False
        else:
            allowed[0, 0, -1 if attention == "bidirectional" else layout.num_tokens, 6] = True
        return replace(layout, allowed=allowed, position_ids=positions)

    monkeypatch.setattr(packed_forward, "window_layout", mutated)
    assert gap(drafter(batch), right) > 100 * EXACT


def test_order_of_tokens_and_masks_matters(verifier) -> None:
    """A drafter without positions, or one whose slots see nothing, would pass weaker tests."""
    logits = make_drafter(verifier)(make_batch([[5, 6, 7, 8], [6, 5, 7, 8]], [(0, 3), (1, 3)]))
    assert gap(logits[0], logits[1]) > 1e-3
    assert gap(logits[0, 0], logits[0, 1]) > 1e-3


def test_prefix_never_sees_the_window(verifier) -> None:
    """Changing the mask embedding changes slots only: what makes the cache exact."""
    drafter = make_drafter(verifier)
    batch = make_batch([random_tokens(10)], [(0, 4), (0, 8)])
    layout = window_masks.window_layout(batch.lengths, batch.window_row, batch.anchor, GAMMA)
    num_columns = layout.position_ids.numel()

    def outputs() -> Tensor:
        mask = torch.where(layout.allowed, 0.0, torch.finfo(torch.float32).min)
        embeddings = packed_forward.packed_embeddings(drafter, batch, layout)
        return layer_stack.run_stack(drafter.stack, embeddings, mask, layout.position_ids, torch.arange(num_columns))

    with torch.no_grad():
        before = outputs()
        drafter.mask_embedding.add_(torch.randn(32))
        after = outputs()
    assert torch.equal(before[: layout.num_tokens], after[: layout.num_tokens])
    assert (before[layout.num_tokens :] - after[layout.num_tokens :]).abs().amax(-1).min() > 1e-4


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_plain_equals_generic(family: str) -> None:
    """The loop that skips unread feed-forward rows, against the transformers model as it is."""
    drafter = make_drafter(tiny_verifier(num_hidden_layers=4, family=family))
    embeddings, positions = torch.randn(2, 7, 32), torch.arange(7).expand(2, -1)
    mask = torch.zeros(2, 1, 7, 7).masked_fill(torch.ones(7, 7).triu(1).bool(), torch.finfo(torch.float32).min)
    read = torch.tensor([[3, 9], [13, 0]])
    arguments = (drafter.stack, embeddings, mask, positions, read)
    assert gap(layer_stack.run_plain(*arguments), layer_stack.run_generic(*arguments)) < 1e-6


# ---------------------------------------------------------------- case 16: padding
@pytest.mark.parametrize(("attention", "shifted"), ALL_MODES)
@pytest.mark.parametrize("pad", [0, 2, -100])  # 2 is the EOS id and is real inside the row; -100 is no id at all
def test_row_alone_equals_row_in_padded_batch(attention: str, shifted: bool, pad: int) -> None:
    drafter = make_drafter(tiny_verifier(num_hidden_layers=3, eos_ids=[2]), attention=attention, shifted=shifted)
    short, long = [5, 2, 9, 11, 2], random_tokens(14)
    alone = drafter(make_batch([short], [(0, 1), (0, 4)]))
    together = drafter(make_batch([long, short], [(0, 3), (1, 1), (0, 12), (1, 4)], pad=pad))
    assert gap(together[[1, 3]], alone) < EXACT
    assert torch.isfinite(together).all()


# ---------------------------------------------------------------- revealed slots
@pytest.mark.parametrize(("attention", "shifted"), ALL_MODES)
def test_revealed_slots_show_the_teachers_token(verifier, attention: str, shifted: bool) -> None:
    """Every slot revealed is the plain text: the first window's logits must be those of a longer prefix."""
    drafter = make_drafter(verifier, attention=attention, shifted=shifted)
    row = random_tokens(12)
    batch = make_batch([row], [(0, 5)])
    hidden = drafter(batch)
    batch.revealed[0, 1] = True
    shown = drafter(batch)
    assert gap(shown, hidden) > 1e-3
    batch.targets[0, 1] = (row[7] + 1) % 64
    assert gap(drafter(batch), shown) > 1e-3
    batch.targets[0, 0] = (row[6] + 1) % 64  # a masked position's target is invisible
    assert torch.equal(drafter(batch), drafter(replace(batch, targets=torch.where(batch.revealed, batch.targets, 0))))
    batch.valid[0, 1] = False  # no target exists: nothing to reveal
    assert torch.equal(drafter(batch), hidden)


def test_session_with_fixed_tokens_equals_revealed_forward(verifier) -> None:
    ids = [3, 9, 11, 40, 41]
    for attention, shifted in ALL_MODES:
        drafter = make_drafter(verifier, attention=attention, shifted=shifted, draft_vocab_ids=ids)
        row = [1, 2, 3, 9, 40, 41, 9]
        batch = make_batch([row], [(0, 2)])
        batch.revealed[0, [0, 2]] = True
        fixed = torch.where(batch.revealed[0], drafter.to_draft_vocab(batch.targets[0]), -1)
        session = drafter.start(row[:3], GREEDY, 9)
        assert gap(session.window_logits(GAMMA, fixed), drafter(batch)[0]) < EXACT


# ---------------------------------------------------------------- drafts
def test_greedy_single_draft_is_the_argmax_chain(verifier) -> None:
    drafter = make_drafter(verifier)
    prompt = random_tokens(8)
    session = drafter.start(prompt, GREEDY, 10)
    draft = session.propose(GAMMA, 1, TorchRandomSource(0), needs_probs=True)
    best = drafter(make_batch([prompt], [(0, 7)]))[0].argmax(-1)
    assert draft.tokens.tolist() == [best.tolist()]
    assert torch.equal(draft.draft_probs.argmax(-1), best) and draft.draft_probs.sum() == GAMMA


def test_draft_law_is_what_tokens_are_drawn_from(verifier) -> None:
    """Empirical frequencies of 20,000 chains against draft_probs, with a draft vocabulary and tempering."""
    ids = [60, 3, 17, 22, 5]
    sampling = SamplingParams(temperature=1.7, top_k=4)
    session = make_drafter(verifier, draft_vocab_ids=ids).start(random_tokens(6), sampling, 10)
    draft = session.propose(3, 20_000, TorchRandomSource(0), needs_probs=True)
    assert draft.tokens.shape == (20_000, 3) and draft.draft_probs.shape == (3, 64)
    assert torch.allclose(draft.draft_probs.sum(-1), torch.ones(3))
    for j in range(3):
        counts = torch.bincount(draft.tokens[:, j], minlength=64) / 20_000
        assert (counts - draft.draft_probs[j]).abs().sum() / 2 < 0.02
    assert set(draft.tokens.unique().tolist()) <= set(ids)
    assert session.propose(3, 2, TorchRandomSource(0), needs_probs=False).draft_probs is None


@pytest.mark.parametrize(("attention", "shifted"), ALL_MODES)
@pytest.mark.parametrize("steps", [2, 3, 9])
def test_denoising_steps_fix_the_most_confident_positions(verifier, attention: str, shifted: bool, steps: int) -> None:
    """Against a plain loop over the training forward with revealed tokens."""
    drafter = make_drafter(verifier, attention=attention, shifted=shifted, denoising_steps=steps)
    prompt = random_tokens(7)
    session = drafter.start(prompt, SamplingParams(), 20)
    session.observe([1, 2])
    batch = make_batch([[*prompt, 1, 2]], [(0, 8)])
    batch.valid[:] = True
    for steps_left in range(min(steps, GAMMA), 1, -1):
        probs = drafter(batch)[0].softmax(-1)
        confidence = probs.amax(-1).masked_fill(batch.revealed[0], -1)
        share = -(-int((~batch.revealed).sum()) // steps_left)
        chosen = confidence.argsort(descending=True)[:share]
        batch.targets[0, chosen] = probs.argmax(-1)[chosen]
        batch.revealed[0, chosen] = True
    expected = logits_to_probs(drafter(batch)[0], SamplingParams())
    expected[batch.revealed[0]] = torch.nn.functional.one_hot(batch.targets[0][batch.revealed[0]], 64).float()
    law = session.draft_law(GAMMA)
    assert gap(law, expected) < EXACT
    assert 1 <= int((law.amax(-1) < 1).sum()) < GAMMA, "some positions are fixed, some are left to chance"
    again = session.propose(GAMMA, 3, TorchRandomSource(1), needs_probs=True)
    assert gap(again.draft_probs, law) < EXACT


# ---------------------------------------------------------------- vocabulary (case 17)
def test_padded_head_rows_are_never_drafted() -> None:
    verifier = tiny_verifier(vocab=80, vocab_size=60, num_hidden_layers=3)
    with torch.no_grad():  # padded rows boosted, as a careless head would leave them
        verifier.model.lm_head.weight[60:] = 50 * torch.randn(20, 32).sign()
    drafter = make_drafter(verifier)
    session = drafter.start(random_tokens(5, vocab=60), SamplingParams(temperature=3.0), 40)
    draft = session.propose(GAMMA, 50, TorchRandomSource(0), needs_probs=True)
    assert draft.draft_probs.shape == (GAMMA, 60) and int(draft.tokens.max()) < 60
    logits = drafter(make_batch([random_tokens(9, vocab=60)], [(0, 4)]))
    assert logits.shape[-1] == 60 and torch.isfinite(logits).all()


def test_to_draft_vocab_round_trip(verifier) -> None:
    drafter = make_drafter(verifier, draft_vocab_ids=[7, 3, 40])
    assert drafter.draft_vocab_ids.tolist() == [7, 3, 40]
    tokens = torch.tensor([[40, 7, 3], [0, -100, 64]])
    assert drafter.to_draft_vocab(tokens).tolist() == [[2, 0, 1], [-1, -1, -1]]


def test_draft_vocab_logits_are_columns_of_the_full_head(verifier) -> None:
    ids = [40, 7, 3]
    batch = make_batch([random_tokens(9)], [(0, 4)])
    assert gap(make_drafter(verifier, draft_vocab_ids=ids)(batch), make_drafter(verifier)(batch)[..., ids]) < EXACT


# ---------------------------------------------------------------- what belongs to the drafter (case 25, 26)
def test_only_its_own_tensors_and_every_one_gets_a_gradient(verifier) -> None:
    drafter = make_drafter(verifier)
    own = {name for name, _ in drafter.named_parameters()}
    assert set(drafter.state_dict()) == own
    assert all(name.split(".")[0] in ("stack", "mask_embedding") for name in own)
    borrowed = {id(parameter) for parameter in verifier.model.parameters()}
    assert not borrowed & {id(parameter) for parameter in drafter.parameters()}
    assert not any("embed_tokens" in name or "head" in name for name in own)
    batch = make_batch([random_tokens(12)], [(0, 4), (0, 7)])
    batch.revealed[0, 1] = True
    drafter(batch).log_softmax(-1)[..., 3].sum().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in drafter.parameters())
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in verifier.model.parameters())


def test_a_batch_without_windows_reaches_every_parameter(verifier) -> None:
    """A rank with nothing to train on still takes part in the gradient reduction (case 24)."""
    drafter = make_drafter(verifier)
    batch = make_batch([random_tokens(6)], [(0, 2)])
    empty = replace(
        batch, **{name: getattr(batch, name)[:0] for name in ("window_row", "anchor", "targets", "valid", "revealed")}
    )
    logits = drafter(empty)
    assert logits.shape == (0, GAMMA, 64)
    logits.sum().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() == 0 for parameter in drafter.parameters())


def test_training_still_works_after_decoding(verifier) -> None:
    """Head rows cached while decoding (inference mode) must not be inference tensors."""
    drafter = make_drafter(verifier)
    with torch.inference_mode():
        drafter.start([1, 2, 3], GREEDY, 5).propose(GAMMA, 1, TorchRandomSource(0), needs_probs=False)
    drafter(make_batch([random_tokens(8)], [(0, 4)])).sum().backward()
    drafter.start([1, 2, 3], GREEDY, 5).propose(GAMMA, 1, TorchRandomSource(0), needs_probs=True)


def test_gradient_checkpointing_changes_nothing(verifier) -> None:
    batch = make_batch([random_tokens(12)], [(0, 4), (0, 7)])
    gradients = []
    for flag in (False, True):
        drafter = make_drafter(verifier, gradient_checkpointing=flag).train()
        drafter(batch).square().mean().backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in drafter.parameters()]))
        session = drafter.start([1, 2, 3], GREEDY, 9)  # in training mode too: the probe decodes between steps
        assert gap(session.window_logits(GAMMA), drafter(make_batch([[1, 2, 3]], [(0, 2)]))[0]) < EXACT
    assert gap(*gradients) < 1e-6


def test_layers_start_as_copies_and_the_global_rng_is_untouched(verifier) -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    drafter = make_drafter(verifier, num_layers=2)
    assert torch.equal(torch.rand(1), expected)
    source = verifier.model.model
    assert drafter.config.layer_indices == [0, 3]
    assert torch.equal(drafter.stack.layers[1].mlp.up_proj.weight, source.layers[3].mlp.up_proj.weight)
    assert torch.equal(drafter.stack.norm.weight, source.norm.weight)
    assert drafter.stack.layers[1].mlp.up_proj.weight.data_ptr() != source.layers[3].mlp.up_proj.weight.data_ptr()


def test_evenly_spaced_layers() -> None:
    assert evenly_spaced(4, 30) == [0, 10, 19, 29]
    assert evenly_spaced(3, 3) == [0, 1, 2] and evenly_spaced(2, 9) == [0, 8] and evenly_spaced(1, 9) == [8]
    for available in range(1, 40):
        for count in range(1, available + 1):
            assert len(set(evenly_spaced(count, available))) == count
    with pytest.raises(ConfigError, match="num_layers=5"):
        evenly_spaced(5, 4)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.3), (torch.float64, 1e-4)])
def test_other_dtypes_than_the_verifiers(verifier, dtype: torch.dtype, tolerance: float) -> None:
    row = random_tokens(12)
    batch = make_batch([row], [(0, 11)])
    drafter = make_drafter(verifier)
    reference = drafter(batch)
    cast = copy.deepcopy(drafter).to(dtype)
    assert torch.equal(cast.stack.rotary_emb.inv_freq, drafter.stack.rotary_emb.inv_freq), "rounded frequencies"
    assert cast.embeddings is drafter.embeddings, "a copy borrows from the same verifier"
    for logits in (cast(batch)[0], cast.start(row, GREEDY, 9).window_logits(GAMMA)):
        assert gap(logits, reference[0]) < tolerance * reference.abs().max()
    assert cast(batch).dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_autocast_training_is_close_and_reaches_float32_weights(verifier) -> None:
    batch = make_batch([random_tokens(12)], [(0, 4), (0, 7)])
    drafter = make_drafter(verifier)
    with torch.autocast("cpu", torch.bfloat16):
        logits = drafter(batch)
    assert logits.dtype == torch.float32
    assert gap(logits, drafter(batch)) < 0.1 * logits.abs().max()
    logits.square().mean().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in drafter.parameters())


# ---------------------------------------------------------------- bad input (case 15, 19)
@pytest.mark.parametrize("mask_token_id", [0, 2, -1, 64, True])
def test_bad_mask_token_ids_are_refused(mask_token_id: int) -> None:
    verifier = tiny_verifier(num_hidden_layers=2, eos_ids=[2], pad_token_id=0)
    with pytest.raises(ConfigError, match=f"mask_token_id={mask_token_id}"):
        make_drafter(verifier, num_layers=2, mask_token_id=mask_token_id)


def test_a_mask_token_id_is_where_the_mask_embedding_starts_and_is_never_drafted(verifier) -> None:
    drafter = make_drafter(verifier, mask_token_id=63)
    assert torch.equal(drafter.mask_embedding, verifier.model.get_input_embeddings().weight[63])
    assert 63 not in drafter.draft_vocab_ids.tolist() and len(drafter.draft_vocab_ids) == 63


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"gamma": 0}, "gamma=0"),
        ({"gamma": True}, "gamma=True"),
        ({"gamma": "two"}, "gamma='two'"),
        ({"num_layers": 9}, "num_layers=9"),
        ({"num_layers": 0}, "num_layers=0"),
        ({"attention": "causal"}, "attention='causal'"),
        ({"denoising_steps": 0}, "denoising_steps=0"),
        ({"shifted": 1}, "shifted=1"),
        ({"draft_vocab_ids": []}, "draft_vocab_ids is empty"),
        ({"draft_vocab_ids": [1, 64]}, "draft_vocab_ids holds 64"),
        ({"draft_vocab_ids": [4, 4]}, "holds 4 twice"),
        ({"draft_vocab_ids": [4, 5], "mask_token_id": 5}, "mask_token_id=5"),
    ],
)
def test_bad_settings_are_refused_by_name(verifier, changes: dict, names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        make_drafter(verifier, **changes)


def test_bad_prompts_and_requests_are_refused(verifier) -> None:
    drafter = make_drafter(verifier)
    for prompt, names in (([], "prompt is empty"), ([1, 64], "id 64"), ([-1], "id -1")):
        with pytest.raises(ConfigError, match=names):
            drafter.start(prompt, GREEDY, 5)
    with pytest.raises(ConfigError, match="gamma=0"):
        drafter.start([1], GREEDY, 5).propose(0, 1, TorchRandomSource(0), needs_probs=False)


def test_per_layer_lists_are_cut_to_the_chosen_layers(verifier) -> None:
    config = copy.deepcopy(verifier.model.config)
    config.no_rope_layers = [1, 0, 1, 0]
    config.eos_token_id = [1, 2, 3, 4]  # as long as there are layers, but no list of layers
    config.attention_dropout = 0.1
    cut = layer_stack.stack_config(config, [0, 3])
    assert cut.no_rope_layers == [1, 0] and cut.num_hidden_layers == 2 and cut.attention_dropout == 0.0
    assert config.no_rope_layers == [1, 0, 1, 0], "the verifier's own config stays as it is"


def test_sliding_window_layers_are_refused(verifier) -> None:
    config = copy.deepcopy(verifier.model.config)
    config.sliding_window = 8
    with pytest.raises(ConfigError, match="sliding_window=8"):
        layer_stack.stack_config(config, [0, 1])


@pytest.mark.real
def test_smollm2_session_equals_packed_forward(smollm2) -> None:
    """The real layers and head, a long prompt, positions far from zero."""
    ids = random_tokens(400, vocab=smollm2.vocab_size)
    drafter = BlockDrafter.from_verifier(smollm2, num_layers=4, draft_vocab_ids=sorted(set(ids)))
    with torch.no_grad():
        packed = drafter(make_batch([ids], [(0, 299), (0, 303), (0, 399)], gamma=8))
    session = drafter.start(ids[:300], GREEDY, 120)
    for window, anchor in enumerate((299, 303, 399)):
        session.observe(ids[session.num_committed : anchor + 1])
        assert gap(session.window_logits(8), packed[window]) < 1e-4 * packed.abs().max()


# ---------------------------------------------------------------- prefix loss rows
def test_prefix_rows_are_first_positions_of_windows(verifier) -> None:
    """Every prefix logit is what position 1 of a window anchored at that token gives, with that token's successor."""
    drafter = make_drafter(verifier, shifted=True)
    rows = [random_tokens(14, 1), random_tokens(9, 2)]
    batch = make_batch(rows, [(0, 12), (1, 3), (1, 6)])
    batch = replace(batch, completion_start=torch.tensor([5, 3]))
    states, prefix_states, targets = drafter.window_and_prefix_states(batch)
    assert gap(states, drafter.window_states(batch)) < EXACT
    assert gap(drafter.states_logits(states, previous_tokens(batch)), drafter(batch)) < EXACT
    prefix = drafter.token_logits(prefix_states)
    expected = [(0, a) for a in range(4, 13)] + [(1, a) for a in range(2, 7)]  # to the row's own last anchor
    assert gap(prefix, drafter(make_batch(rows, expected))[:, 0]) < EXACT
    assert targets.tolist() == [rows[r][a + 1] for r, a in expected]


@pytest.mark.parametrize(
    "changes",
    [
        {"shifted": False},
        {"shifted": True, "attention": "bidirectional"},
        {"shifted": True, "conditioning": "verifier_kv"},
    ],
)
def test_prefix_loss_needs_a_shifted_causal_drafter(verifier, changes) -> None:
    batch = replace(make_batch([random_tokens(9)], [(0, 4)]), completion_start=torch.tensor([3]))
    with pytest.raises(ConfigError, match="prefix_loss_weight=0"):
        make_drafter(verifier, **changes).window_and_prefix_states(batch)


# ---------------------------------------------------------------- drafts at temperature 0
@pytest.mark.parametrize("markov_rank", [0, 4])
def test_greedy_drafts_are_what_one_hot_rows_give_and_leave_the_seed_alike(verifier, markov_rank: int) -> None:
    drafter = make_drafter(verifier, shifted=True, markov_rank=markov_rank)
    if drafter.markov is not None:
        torch.nn.init.normal_(drafter.markov.token_out)
    law = drafter.start(random_tokens(9), GREEDY, 9).law(GAMMA)
    drawn, expected = TorchRandomSource(3), TorchRandomSource(3)
    tokens = draw_drafts(law, 2, GREEDY, drawn, False).tokens
    rows = logits_to_probs(law.given_argmax_chain(), GREEDY)
    assert torch.equal(tokens, law.ids[expected.chains(rows, 2)])
    assert drawn.categorical(torch.ones(10**6)) == expected.categorical(torch.ones(10**6))


def test_greedy_drafts_refuse_logits_that_are_no_law(verifier) -> None:
    law = make_drafter(verifier).start(random_tokens(9), GREEDY, 9).law(GAMMA)
    with torch.inference_mode():
        law.base[1] = float("nan")
    with pytest.raises(SpecDiffError, match="nan"):
        draw_drafts(law, 1, GREEDY, TorchRandomSource(0), False)
