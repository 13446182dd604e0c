"""The families of published masked-diffusion language models, and what tells them apart.

Each of them is an ordinary causal transformer (Qwen2, Llama, Qwen3) run with another attention mask, so it loads as
that class without running any code from the checkpoint. A ``Family`` holds only facts, a ``FamilyModel`` one loaded
checkpoint; how files are read is ``family_loading``'s business.

Sources, read 2026-11-30. The published configs, modelling code and tokenizers: github.com/HKUNLP/Dream,
apple/ml-diffucoder, HKUNLP/DiffuLLaMA (``inf_diffullama.py`` loads LlamaForCausalLM; its LLaMA-Factory loader sets mask
811 and pad 30399), ML-GSAI/LLaDA (``generate.py``: 126336), NVlabs/Fast-dLLM (v2), JetAstra/SDAR.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdiff2.models.fingerprint import model_fingerprint
from specdiff2.models.vocab import real_vocab_size
from specdiff2.types import ConfigError

# The special tokens that a plain Qwen verifier has too. A tokenizer's other added tokens mean nothing to it.
_QWEN2_TOKENS = frozenset([
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
    "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>",
    "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>",
    "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>",
])  # fmt: skip
_QWEN3_TOKENS = _QWEN2_TOKENS | frozenset(["<tool_response>", "</tool_response>", "<think>", "</think>"])


@dataclass(frozen=True)
class Family:
    """Facts about one family.

    Attributes:
        name: key in ``FAMILIES``.
        target: model type of the transformers class that computes the same function.
        shifted: row t-1 of the logits predicts position t (else row t does).
        mask_token_id: the published one, used when neither config.json nor the tokenizer tells.
        mask_token: its name in the tokenizer; None where it is an ordinary token.
        attention: of the two attention modes of our drafters, the one nearest to how the family was trained.
        block_size: positions that see each other in a block-causal family; None for a fully bidirectional one.
        shared_tokens: added tokens that a verifier with the parent's tokenizer has too; all other added tokens are
            never drafted.
        unused_ids: further ids that are never drafted (a pad that is an ordinary token).
        remote_classes: names in ``architectures`` or ``auto_map`` that give the family away.
        source: where these facts come from.
    """

    name: str
    target: Literal["qwen2", "llama", "qwen3"]
    shifted: bool
    mask_token_id: int
    mask_token: str | None
    attention: Literal["bidirectional", "causal_prefix"]
    remote_classes: tuple[str, ...]
    source: str
    block_size: int | None = None
    shared_tokens: frozenset[str] = frozenset()
    unused_ids: frozenset[int] = frozenset()


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(
            name="dream",  # and DiffuCoder, which adds the pad <|dlm_pad|> = 151667
            target="qwen2",
            shifted=True,
            mask_token_id=151666,
            mask_token="<|mask|>",
            attention="bidirectional",
            shared_tokens=_QWEN2_TOKENS,
            remote_classes=("DreamModel",),
            source="Dream-org/Dream-v0-*-7B and apple/DiffuCoder-7B-* config.json; github.com/HKUNLP/Dream",
        ),
        Family(
            name="diffullama",
            target="llama",
            shifted=True,
            mask_token_id=811,
            mask_token=None,
            attention="bidirectional",
            unused_ids=frozenset({30399}),
            remote_classes=(),
            source="github.com/HKUNLP/DiffuLLaMA, LLaMA-Factory/src/llamafactory/model/loader.py",
        ),
        Family(
            name="llada",
            target="llama",
            shifted=False,
            mask_token_id=126336,
            mask_token="<|mdm_mask|>",
            attention="bidirectional",
            remote_classes=("LLaDAModelLM",),
            source="GSAI-ML/LLaDA-8B-* config.json and modeling_llada.py; github.com/ML-GSAI/LLaDA",
        ),
        Family(
            name="fast_dllm_v2",
            target="qwen2",
            shifted=True,
            mask_token_id=151665,
            mask_token="|<MASK>|",
            attention="causal_prefix",
            block_size=32,  # bd_size in config.json
            shared_tokens=_QWEN2_TOKENS,
            remote_classes=("Fast_dLLM_QwenForCausalLM",),
            source="Efficient-Large-Model/Fast_dLLM_v2_7B; github.com/NVlabs/Fast-dLLM/v2",
        ),
        Family(
            name="sdar",
            target="qwen3",
            shifted=False,
            mask_token_id=151669,
            mask_token="<|MASK|>",
            attention="causal_prefix",
            block_size=4,
            shared_tokens=_QWEN3_TOKENS,
            remote_classes=("SDARForCausalLM",),
            source="JetLM/SDAR-*-Chat; github.com/JetAstra/SDAR, training/model/SDAR-4B-Chat/modeling_sdar.py",
        ),
    )
}


@dataclass
class FamilyModel:
    """A loaded checkpoint.

    Attributes:
        model: a plain transformers Qwen2-, Llama- or Qwen3ForCausalLM on the CPU, in eval mode. Move it with
            ``.to(device)``; ``.to(dtype)`` would round its rotary frequencies.
        tokenizer: its own.
        mask_token_id: the id that stands for a masked position.
        forbidden_ids: ids that are never drafted (see ``family_tokenizers.forbidden_ids``).
        name: the source as given.
        revision: commit of a hub checkpoint, else None.
        folder: where its files lie.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    family: Family
    mask_token_id: int
    forbidden_ids: frozenset[int]
    name: str
    revision: str | None
    folder: Path

    @cached_property
    def fingerprint(self) -> str:
        """Digest of config and weights. Read it before adapters are put in or weights are trained: it stays."""
        return model_fingerprint(self.model, real_vocab_size(self.model, self.tokenizer))


def get_family(name: str) -> Family:
    """Raises ConfigError when ``name`` is none of ``FAMILIES``."""
    if name not in FAMILIES:
        raise ConfigError(f"family={name!r}: unknown; expected one of {', '.join(FAMILIES)}")
    return FAMILIES[name]


def detect_family(config: Mapping[str, Any], source: str | Path = "") -> Family:
    """The family of a checkpoint, from the class names in its config.json.

    DiffuLLaMA's config is that of a plain Llama, so it is known by the word "diffullama" in ``source`` (or in the
    config's ``_name_or_path``), or has to be named.

    Raises:
        ConfigError: it is none of the known families, or a plain autoregressive model.
    """
    auto_map = config.get("auto_map") or {}
    remote = [value for value in auto_map.values() if isinstance(value, str)] if isinstance(auto_map, Mapping) else []
    names = {str(name).rpartition(".")[2] for name in [*(config.get("architectures") or []), *remote]}
    for family in FAMILIES.values():
        if names.intersection(family.remote_classes):
            return family
    told = f"{source} {config.get('_name_or_path', '')}".lower()
    if "LlamaForCausalLM" in names and "diffullama" in told:
        return FAMILIES["diffullama"]
    raise ConfigError(
        f"{source or 'config.json'}: model_type={config.get('model_type')!r}, architectures="
        f"{config.get('architectures')!r} is no known family of masked-diffusion models; expected one of "
        f"{', '.join(FAMILIES)}. Set family=... if it is one of them under another name (a DiffuLLaMA checkpoint calls "
        "itself a plain Llama); mixture-of-experts variants are not supported"
    )
