"""Tokenizer files of the masked-diffusion families: the authors' files and special-token names, tiny vocabularies.

The real ones: Dream and DiffuCoder ship vocab.json, merges.txt and added_tokens.json; SDAR too; Fast-dLLM v2 also a
tokenizer.json; LLaDA a tokenizer.json; DiffuLLaMA Llama 2's tokenizer.model and tokenizer.json (only the latter here).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

QWEN_SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
    "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>",
    "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
]  # fmt: skip
QWEN_ORDINARY = [
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
    "<|repo_name|>", "<|file_sep|>",
]  # fmt: skip
QWEN3_ORDINARY = ["<tool_response>", "</tool_response>", "<think>", "</think>"]
LLADA_SPECIAL = [
    "<|startoftext|>", "<|endoftext|>", "[CLS]", "[gMASK]", "<|reserved_token_0|>", "<|reserved_token_1|>",
    "<|mdm_mask|>", "<role>", "</role>", "<|arithmetic_start|>", "<|arithmetic_end|>", "<|number_start|>",
    "<|number_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
]  # fmt: skip
OWN_TOKENS = {  # what a family adds to its parent's tokenizer
    "dream": ["<|beginoftext|>", "<|mask|>", "<|dlm_pad|>"],  # the last one: DiffuCoder only
    "fast_dllm_v2": ["|<MASK>|"],
    "sdar": ["<|MASK|>"],
}
QWEN_CHAT = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLADA_CHAT = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' "
    "+ m['content'] + '<|eot_id|>' }}{% endfor %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
)
_QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEXT = ["the answer is 42. so the total is 12 + 30 = 42 apples and the rest is 7, def main(): return x"] * 4


def write_parent_tokenizer(
    folder: Path, family_name: str, first_special_id: int | None = None
) -> PreTrainedTokenizerFast:
    """The tokenizer of the model that the family comes from (Qwen2.5, Qwen3, Llama 2): the same ids without the
    family's own tokens. LLaDA has no parent; its own tokenizer is returned."""
    folder.mkdir(parents=True, exist_ok=True)
    raw = _raw_tokenizer(family_name, first_special_id)
    if family_name not in ("diffullama", "llada"):
        raw.add_tokens(_added(family_name, own=False))
    names = {key: entry for key, entry in _special_map(family_name, own=False).items() if isinstance(entry, str)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, clean_up_tokenization_spaces=False, **names)
    tokenizer.chat_template = LLADA_CHAT if family_name == "llada" else QWEN_CHAT
    tokenizer.save_pretrained(folder)
    return tokenizer


def _added(family: str, *, own: bool) -> list[AddedToken]:
    """The added tokens of a Qwen family in id order; ``own``: with the family's own ones."""
    extra = OWN_TOKENS[family] if own else []
    ordinary = QWEN_ORDINARY + QWEN3_ORDINARY if family == "sdar" else QWEN_ORDINARY
    names = [(name, True) for name in QWEN_SPECIAL] + [(name, False) for name in ordinary]
    return [AddedToken(n, special=s, normalized=False) for n, s in [*names, *((name, True) for name in extra)]]


def _special_map(family: str, *, own: bool) -> dict[str, Any]:
    if family == "diffullama":
        return {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    end = "<|endoftext|>"
    if family == "llada":
        return {"bos_token": "<|startoftext|>", "cls_token": "[CLS]", "eos_token": end, "pad_token": end}
    names: dict[str, Any] = {"eos_token": end, "pad_token": end}
    if not own:
        return names | {"eos_token": "<|im_end|>"}
    if family == "dream":
        names |= {"bos_token": "<|beginoftext|>", "mask_token": "<|mask|>", "pad_token": "<|dlm_pad|>"}
    if family == "fast_dllm_v2":
        names |= {"eos_token": "<|im_end|>"}
    return names | {"additional_special_tokens": QWEN_SPECIAL[1:]}


def write_family_tokenizer(folder: Path, family: str, first_special_id: int | None) -> dict[str, int]:
    """Tokenizer files; returns token -> id."""
    raw = _raw_tokenizer(family, first_special_id)
    config: dict[str, Any] = {
        "clean_up_tokenization_spaces": False,
        "model_max_length": 131072,
        **_special_map(family, own=True),
    }
    if family in OWN_TOKENS:
        _write_vocabulary(folder, raw)
        added = _added(family, own=True)
        raw.add_tokens(added)
        ids = {token.content: raw.token_to_id(token.content) for token in added}
        (folder / "added_tokens.json").write_text(json.dumps(ids, indent=2))
        config |= {"tokenizer_class": "Qwen2Tokenizer", "chat_template": QWEN_CHAT, "errors": "replace"}
        config |= {"unk_token": None, "split_special_tokens": False, "add_prefix_space": False}
        config |= {"added_tokens_decoder": {str(ids[t.content]): _entry(t) for t in added}}
    if family == "dream":
        config |= {
            "tokenizer_class": "DreamTokenizer",
            "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
        }
    if family == "llada":
        config |= {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": LLADA_CHAT}
        special = [token for token in raw.get_added_tokens_decoder().items()]
        config["added_tokens_decoder"] = {str(token_id): _entry(token) for token_id, token in special}
    if family == "diffullama":
        config |= {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": False, "legacy": False}
    if family in ("llada", "diffullama", "fast_dllm_v2"):
        raw.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    (folder / "special_tokens_map.json").write_text(json.dumps(_special_map(family, own=True), indent=2))
    return raw.get_vocab(with_added_tokens=True)


def _entry(token: AddedToken) -> dict[str, Any]:
    flags = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    return {flag: getattr(token, flag) for flag in flags}


def _write_vocabulary(folder: Path, raw: Tokenizer) -> None:
    model = json.loads(raw.to_str())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"], ensure_ascii=False), encoding="utf-8")
    pairs = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(pairs) + "\n", encoding="utf-8")


def _raw_tokenizer(family: str, first_special_id: int | None) -> Tokenizer:
    """The byte-level BPE of the Qwen families without added tokens, LLaDA's with them, or Llama 2's."""
    if family == "diffullama":
        return _llama_tokenizer()
    vocab, merges = _byte_level_bpe()
    fill = range(len(vocab), first_special_id or 0)
    raw = Tokenizer(models.BPE(vocab | {f"<unused {number}>": number for number in fill}, merges))
    if family != "llada":
        raw.normalizer = normalizers.NFC()
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    raw.decoder = decoders.ByteLevel()
    if family == "llada":
        raw.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in LLADA_SPECIAL])
    return raw


@cache
def _byte_level_bpe() -> tuple[dict[str, int], list[tuple[str, str]]]:
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return _train(raw, trainers.BpeTrainer(vocab_size=300, show_progress=False, initial_alphabet=sorted(alphabet)))


@cache
def _spaced_bpe() -> tuple[dict[str, int], list[tuple[str, str]]]:
    raw = Tokenizer(models.BPE())
    raw.normalizer = _SPACES
    return _train(raw, trainers.BpeTrainer(vocab_size=80, show_progress=False))


_SPACES = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


def _train(raw: Tokenizer, trainer: Any) -> tuple[dict[str, int], list[tuple[str, str]]]:
    raw.train_from_iterator(_TEXT, trainer)
    model = json.loads(raw.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


def _llama_tokenizer() -> Tokenizer:
    """<unk>, <s>, </s>, 256 byte tokens, then pieces with "▁" for a space: Llama 2's order."""
    pieces, merges = _spaced_bpe()
    names: Sequence[str] = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    names = [*names, *sorted(pieces, key=pieces.__getitem__)]
    vocab = {name: number for number, name in enumerate(names)}
    raw = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    raw.normalizer = _SPACES
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in ("<unk>", "<s>", "</s>")])
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return raw
