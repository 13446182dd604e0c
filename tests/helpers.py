"""Small stand-ins shared by the tests: tiny models, tokenizers, table verifiers, scripted drafters.

Import with ``from helpers import ...`` (pytest puts ``tests/`` on the path because of ``conftest.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from specdiff2.protocols import RandomSource, Verifier
from specdiff2.rng import TorchRandomSource
from specdiff2.tree import TokenTree
from specdiff2.types import Draft, SamplingParams, WindowBatch

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<s>' + m['role'] + ': ' + m['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant: ' }}{% endif %}"
)


# ---------------------------------------------------------------- models
def _tiny(config_class: Any, model_class: Any, vocab: int, dtype: torch.dtype, attn: str, seed: int, **changes: Any):
    values = dict(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10.0},  # small, so that wrong positions show
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    values.update(changes)
    config = config_class(**values)
    config._attn_implementation = attn
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config)
    return model.to(dtype).eval().requires_grad_(False)


def tiny_llama(
    vocab: int = 64, dtype: torch.dtype = torch.float32, attn: str = "sdpa", *, seed: int = 0, **changes: Any
) -> LlamaForCausalLM:
    """Random Llama; ``changes`` are LlamaConfig arguments (num_hidden_layers=4, eos_token_id=2, ...)."""
    return _tiny(LlamaConfig, LlamaForCausalLM, vocab, dtype, attn, seed, **changes)


def tiny_qwen2(
    vocab: int = 64, dtype: torch.dtype = torch.float32, attn: str = "sdpa", *, seed: int = 0, **changes: Any
) -> Qwen2ForCausalLM:
    return _tiny(Qwen2Config, Qwen2ForCausalLM, vocab, dtype, attn, seed, **changes)


def tiny_verifier(
    vocab: int = 64,
    dtype: torch.dtype = torch.float32,
    attn: str = "sdpa",
    *,
    tokenizer: Any = None,
    vocab_size: int | None = None,
    eos_ids: Sequence[int] | None = None,
    family: str = "llama",
    output_features: bool = False,
    thinking: bool | None = None,
    seed: int = 0,
    **changes: Any,
):
    """An HFVerifier around ``tiny_llama`` / ``tiny_qwen2``."""
    from specdiff2.models.verifier import HFVerifier

    build = {"llama": tiny_llama, "qwen2": tiny_qwen2}[family]
    model = build(vocab, dtype, attn, seed=seed, **changes)
    return HFVerifier(
        model, tokenizer, name=f"tiny-{family}", vocab_size=vocab_size, eos_ids=eos_ids,
        output_features=output_features, thinking=thinking,
    )  # fmt: skip


def reference_logits(model: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    """``[token, head rows]`` of one plain forward without a cache."""
    with torch.no_grad():
        return model(torch.tensor([list(tokens)]), use_cache=False).logits[0]


def reference_greedy(
    model: PreTrainedModel,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    vocab_size: int | None = None,
    eos_ids: Sequence[int] = (),
) -> list[int]:
    """`ref`: full forward + argmax for every token, no cache; new tokens only, EOS included."""
    tokens = list(prompt)
    for _ in range(max_new_tokens):
        tokens.append(int(reference_logits(model, tokens)[-1, :vocab_size].argmax()))
        if tokens[-1] in eos_ids:
            break
    return tokens[len(prompt) :]


# ---------------------------------------------------------------- window batches
def make_batch(rows: list[list[int]], windows: list[tuple[int, int]], gamma: int = 4, pad: int = 0) -> WindowBatch:
    """Windows are (row, anchor); targets are the row's own tokens, where it has them."""
    length = max(map(len, rows))
    targets = [[rows[r][a + 1 + j] if a + 1 + j < len(rows[r]) else 0 for j in range(gamma)] for r, a in windows]
    valid = [[a + 1 + j < len(rows[r]) for j in range(gamma)] for r, a in windows]
    return WindowBatch(
        input_ids=torch.tensor([row + [pad] * (length - len(row)) for row in rows]),
        lengths=torch.tensor([len(row) for row in rows]),
        window_row=torch.tensor([r for r, _ in windows]),
        anchor=torch.tensor([a for _, a in windows]),
        targets=torch.tensor(targets),
        valid=torch.tensor(valid),
        revealed=torch.zeros(len(windows), gamma, dtype=torch.bool),
    )


def random_tokens(count: int, seed: int = 0, vocab: int = 64) -> list[int]:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def gap(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


# ---------------------------------------------------------------- tokenizers
def char_tokenizer(
    folder: Path | None = None, *, size: int | None = None, chat: bool = True, add_bos: bool = False
) -> PreTrainedTokenizerFast:
    """One token per character (58 ids: fits vocab-64 models). ids: 0 <pad>, 1 <s>, 2 </s>, 3 <unk>."""
    specials = ["<pad>", "<s>", "</s>", "<unk>"]
    chars = list("abcdefghijklmnopqrstuvwxyz0123456789 .,:?!+-*/='\n()<>|")
    vocab = {token: i for i, token in enumerate((specials + chars)[:size])}
    raw = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    raw.decoder = decoders.Fuse()
    return _wrap(raw, folder, chat, add_bos)


def byte_tokenizer(
    folder: Path | None = None, *, size: int = 300, chat: bool = True, add_bos: bool = False
) -> PreTrainedTokenizerFast:
    """Byte-level BPE (every text round-trips; multi-byte characters span tokens)."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<pad>", "<s>", "</s>", "<unk>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    raw.train_from_iterator(["the answer is 42. so the total is 12 + 30 = 42 apples and the rest is 7"] * 4, trainer)
    return _wrap(raw, folder, chat, add_bos)


def _wrap(raw: Tokenizer, folder: Path | None, chat: bool, add_bos: bool) -> PreTrainedTokenizerFast:
    if add_bos:
        from tokenizers.processors import TemplateProcessing

        raw.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    if folder is not None:
        tokenizer.save_pretrained(folder)
    return tokenizer


# ---------------------------------------------------------------- table verifier
Law = Sequence[float] | Tensor | Callable[[tuple[int, ...]], Sequence[float] | Tensor]


class Tab:
    """Verifier with a given next-token law: one fixed vector, or a function of ALL tokens so far (prompt included).

    Logits are log-probabilities in float64 (-inf where the law is 0).
    """

    def __init__(
        self,
        law: Law,
        *,
        eos_ids: Sequence[int] = (),
        max_length: int = 4096,
        sampling: SamplingParams | None = None,
        tokenizer: Any = None,
    ) -> None:
        self._law = law
        self.eos_ids = frozenset(eos_ids)
        self.max_length = max_length
        self.sampling = sampling or SamplingParams()
        self.tokenizer = tokenizer
        self.name, self.fingerprint = "tab", "tab"
        self.dtype, self.device = torch.float64, torch.device("cpu")
        self.vocab_size = int(self.probs((0,)).numel())
        self.num_forwards = 0

    def probs(self, context: tuple[int, ...]) -> Tensor:
        law = self._law(context) if callable(self._law) else self._law
        return torch.as_tensor(law, dtype=torch.float64)

    def start(self, prompt: Sequence[int], max_new_tokens: int) -> TabSession:
        return TabSession(self, list(prompt))


class TabSession:
    def __init__(self, verifier: Tab, tokens: list[int]) -> None:
        self._verifier, self.tokens = verifier, tokens
        self._tree: TokenTree | None = None

    @property
    def num_committed(self) -> int:
        return len(self.tokens)

    def score(self, tree: TokenTree) -> Tensor:
        assert tree.tokens[0] == self.tokens[-1], "the root must be the last committed token"
        self._tree = tree
        self._verifier.num_forwards += 1
        contexts: list[tuple[int, ...]] = []
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            contexts.append(tuple(self.tokens) if parent < 0 else (*contexts[parent], token))
        return torch.stack([self._verifier.probs(context).log() for context in contexts])

    def commit(self, path: Sequence[int], next_token: int) -> None:
        assert self._tree is not None
        parent = 0
        for node in path:
            assert self._tree.parents[node] == parent, "path must go down the tree"
            parent = node
            self.tokens.append(self._tree.tokens[node])
        self.tokens.append(next_token)

    def features(self, path: Sequence[int]) -> None:
        return None


# ---------------------------------------------------------------- drafters
class TableLaw:
    """A ``DraftLaw`` of given probabilities: ``[gamma, vocab]``, or, conditioned on the token before, ``[gamma, vocab,
    vocab]`` (position, previous token, token)."""

    def __init__(self, probs: Tensor, ids: Sequence[int] | None = None) -> None:
        self._log_probs = probs.log()
        self.gamma, self.factorised = probs.shape[0], probs.ndim == 2
        self.ids = torch.arange(probs.shape[-1]) if ids is None else torch.tensor(ids)
        self.num_calls = 0

    def log_probs(self, depth: int, previous: Tensor) -> Tensor:
        self.num_calls += 1
        rows = self._log_probs[depth]
        return rows.expand(len(previous), -1) if self.factorised else rows[previous]

    def candidates(self, depth: int, previous: Tensor) -> tuple[Tensor, Tensor]:
        return self.log_probs(depth, previous), self.ids

    def position_log_probs(self) -> Tensor:
        assert self.factorised, "positions of a conditioned law cannot be told apart from their parents"
        self.num_calls += 1
        return self._log_probs


class FunctionDrafter:
    """Drafter around ``propose(context, gamma, num_drafts, rng) -> (tokens [K, gamma], draft_probs | None)``."""

    offers_path_law = True

    def __init__(self, gamma: int, function: Callable[..., tuple[Tensor, Tensor | None]]) -> None:
        self.gamma, self.function = gamma, function

    def start(self, prompt: Sequence[int], sampling: SamplingParams, max_new_tokens: int) -> FunctionDrafterSession:
        return FunctionDrafterSession(self, list(prompt))


class FunctionDrafterSession:
    ids: Tensor = torch.empty(0)

    def __init__(self, drafter: FunctionDrafter, tokens: list[int]) -> None:
        self._drafter, self.tokens = drafter, tokens

    def propose(self, gamma: int, num_drafts: int, rng: RandomSource, *, needs_probs: bool) -> Draft:
        tokens, probs = self._drafter.function(self.tokens, gamma, num_drafts, rng)
        return Draft(tokens, probs if needs_probs else None)

    def law(self, gamma: int) -> TableLaw:
        """The law that the function reports; it must not depend on its RandomSource."""
        _, probs = self._drafter.function(self.tokens, gamma, 1, TorchRandomSource(0))
        assert probs is not None, "this drafter reports no law"
        return TableLaw(probs)

    def start_tree(self) -> Tensor:
        """The same law as one of paths (``protocols.PathLawSession``)."""
        self._path_law, self._depths = self.law(self._drafter.gamma), [0]
        self.ids = self._path_law.ids
        return self._path_law.log_probs(0, torch.tensor(self.tokens[-1:]))[0]

    def expand(self, tokens: Sequence[int], parents: Sequence[int]) -> Tensor:
        depths = [self._depths[parent] + 1 for parent in parents]
        self._depths += depths
        rows = [self._path_law.log_probs(d, torch.tensor([t]))[0] for d, t in zip(depths, tokens, strict=True)]
        return torch.stack(rows)

    def observe(self, tokens: Sequence[int], features: Tensor | None = None) -> None:
        self.tokens.extend(tokens)


def one_hot(tokens: Tensor, vocab_size: int) -> Tensor:
    return torch.nn.functional.one_hot(tokens, vocab_size).double()


def Script(chains: Sequence[Any], vocab_size: int = 64) -> FunctionDrafter:
    """Proposes exactly these tokens every round: one chain ``[a, b]`` or K chains ``[[a, b], [c, d]]``.

    One chain is repeated for K > 1. A shorter window cuts the chains. draft_probs: one-hot on the first chain.
    """
    rows = torch.tensor(chains)
    rows = rows[None] if rows.ndim == 1 else rows

    def propose(context: list[int], gamma: int, num_drafts: int, rng: RandomSource) -> tuple[Tensor, Tensor]:
        picked = rows.expand(num_drafts, -1) if rows.shape[0] == 1 else rows[:num_drafts]
        return picked[:, :gamma].clone(), one_hot(rows[0, :gamma], vocab_size)

    return FunctionDrafter(rows.shape[1], propose)


def TableDrafter(draft_probs: Sequence[Sequence[float]]) -> FunctionDrafter:
    """Draws its chains from a fixed ``draft_probs [gamma, vocab]`` through the RandomSource."""
    probs = torch.tensor(draft_probs, dtype=torch.float64)

    def propose(context: list[int], gamma: int, num_drafts: int, rng: RandomSource) -> tuple[Tensor, Tensor]:
        return rng.chains(probs[:gamma], num_drafts), probs[:gamma]

    return FunctionDrafter(probs.shape[0], propose)


def _greedy_continuation(verifier: Verifier, context: Sequence[int], gamma: int) -> list[int]:
    session = verifier.start(list(context), min(gamma + 1, verifier.max_length - len(context)))
    token, out = context[-1], []
    for _ in range(gamma):
        token = int(session.score(TokenTree.root_only(token))[0].argmax())
        session.commit([], token)
        out.append(token)
    return out


def PerfectDrafter(verifier: Verifier, gamma: int = 4, *, offset: int = 0) -> FunctionDrafter:
    """Always the verifier's own greedy continuation (every chain the same)."""

    def propose(context: list[int], gamma: int, num_drafts: int, rng: RandomSource) -> tuple[Tensor, Tensor]:
        row = torch.tensor([(t + offset) % verifier.vocab_size for t in _greedy_continuation(verifier, context, gamma)])
        return row.expand(num_drafts, -1).clone(), one_hot(row, verifier.vocab_size)

    return FunctionDrafter(gamma, propose)


def WrongDrafter(verifier: Verifier, gamma: int = 4) -> FunctionDrafter:
    """Never right at the first position under greedy decoding (the verifier's token + 1)."""
    return PerfectDrafter(verifier, gamma, offset=1)


def RandomDrafter(vocab_size: int, gamma: int = 4) -> FunctionDrafter:
    """Uniform over the vocabulary."""
    probs = torch.full((gamma, vocab_size), 1.0 / vocab_size, dtype=torch.float64)

    def propose(context: list[int], gamma: int, num_drafts: int, rng: RandomSource) -> tuple[Tensor, Tensor]:
        return rng.chains(probs[:gamma], num_drafts), probs[:gamma]

    return FunctionDrafter(gamma, propose)
