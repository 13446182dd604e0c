"""Sizes of the models that the configs name, for planning on a machine without network and without their files.

Only sizes: no tokenizer, no special id, nothing that loading or decoding reads. A config file that is at hand always
comes first (``models.model_shapes``). ``published`` is what the authors say the parameters add up to.

Sources, read in their stored public copies:

* Qwen2.5, Qwen3, Llama 2, Llama 3.x, SmolLM2: github.com/Lightning-AI/litgpt, litgpt/config.py (each entry there links
  the config.json it was taken from; SmolLM2 also huggingface.co/VIshalChak/SmolLM2-FT-DPO config.json). Tied or not:
  the config.json of each size. Qwen2.5-72B-Instruct's index says ``total_size`` 145412407296, two bytes a parameter.
* DiffuCoder and Dream: huggingface.co/apple/DiffuCoder-7B-Instruct config.json (Qwen2.5-7B's sizes).
* DiffuLLaMA: huggingface.co/myduy/test-diffusionlm-v2 config.json, whose ``_name_or_path`` is
  diffusionfamily/diffullama (Llama-2-7B's sizes).
* LLaDA: huggingface.co/Proximile/LLaDA-8B-Tools config.json, derived from GSAI-ML/LLaDA-8B-Instruct.
* Fast-dLLM v2: huggingface.co/Efficient-Large-Model/Fast_dLLM_v2_7B config.json (layers; its embedding is that of its
  parent Qwen2.5-7B-Instruct). SDAR: huggingface.co/JetLM/SDAR-4B-Chat config.json; SDAR-8B-Chat has Qwen3-8B's sizes,
  and its files add up to them (16.4 GB).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

LITGPT = "litgpt/config.py of Lightning-AI/litgpt"
DIFFUCODER = "config.json of apple/DiffuCoder-7B-Instruct"
DIFFULLAMA = "config.json of myduy/test-diffusionlm-v2, a copy of diffusionfamily/diffullama"
FAST_DLLM = "config.json of Efficient-Large-Model/Fast_dLLM_v2_7B and of its parent Qwen2.5-7B-Instruct"
SDAR = "config.json of JetLM/SDAR-4B-Chat and Qwen3-8B"
LLADA = "config.json of Proximile/LLaDA-8B-Tools, derived from GSAI-ML/LLaDA-8B-Instruct"


@dataclass(frozen=True, slots=True)
class PublishedShape:
    """Sizes of one architecture in the words of a transformers config; ``published``: parameters as announced."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    tie_word_embeddings: bool
    max_position_embeddings: int
    published: str
    source: str


def _qwen2(
    vocab: int, hidden: int, inner: int, layers: int, heads: int, kv: int, tied: bool, published: str
) -> PublishedShape:
    return PublishedShape(
        "qwen2", vocab, hidden, inner, layers, heads, kv, hidden // heads, tied, 32768, published, LITGPT
    )


def _qwen3(
    hidden: int, inner: int, layers: int, heads: int, tied: bool, published: str, source: str = LITGPT
) -> PublishedShape:
    return PublishedShape("qwen3", 151936, hidden, inner, layers, heads, 8, 128, tied, 40960, published, source)


def _llama(
    vocab: int, hidden: int, inner: int, layers: int, heads: int, kv: int, context: int, published: str,
    source: str = LITGPT, *, tied: bool = False,
) -> PublishedShape:  # fmt: skip
    return PublishedShape(
        "llama", vocab, hidden, inner, layers, heads, kv, hidden // heads, tied, context, published, source
    )


_LLAMA_70B = (8192, 28672, 80, 64, 8)
_DREAM = PublishedShape("qwen2", 152064, 3584, 18944, 28, 28, 4, 128, False, 131072, "7.6B", DIFFUCODER)

# by the name of the repository without its owner; suffixes that change no size are listed apart
SHAPES: dict[str, PublishedShape] = {
    "Qwen2.5-0.5B": _qwen2(151936, 896, 4864, 24, 14, 2, True, "0.49B"),
    "Qwen2.5-1.5B": _qwen2(151936, 1536, 8960, 28, 12, 2, True, "1.54B"),
    "Qwen2.5-3B": _qwen2(151936, 2048, 11008, 36, 16, 2, True, "3.09B"),
    "Qwen2.5-7B": _qwen2(152064, 3584, 18944, 28, 28, 4, False, "7.61B"),
    "Qwen2.5-14B": _qwen2(152064, 5120, 13824, 48, 40, 8, False, "14.7B"),
    "Qwen2.5-32B": _qwen2(152064, 5120, 27648, 64, 40, 8, False, "32.5B"),
    "Qwen2.5-72B": _qwen2(152064, 8192, 29568, 80, 64, 8, False, "72.7B"),
    "Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, True, "0.6B"),
    "Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, True, "1.7B"),
    "Qwen3-4B": _qwen3(2560, 9728, 36, 32, True, "4.0B"),
    "Qwen3-8B": _qwen3(4096, 12288, 36, 32, False, "8.2B"),
    "Qwen3-14B": _qwen3(5120, 17408, 40, 40, False, "14.8B"),
    "Qwen3-32B": _qwen3(5120, 25600, 64, 64, False, "32.8B"),
    "Llama-2-7b-hf": _llama(32000, 4096, 11008, 32, 32, 32, 4096, "6.74B"),
    "Llama-2-13b-hf": _llama(32000, 5120, 13824, 40, 40, 40, 4096, "13.02B"),
    "Llama-2-70b-hf": _llama(32000, *_LLAMA_70B, 4096, "68.98B"),
    "Meta-Llama-3-8B": _llama(128256, 4096, 14336, 32, 32, 8, 8192, "8.03B"),
    "Meta-Llama-3-70B": _llama(128256, *_LLAMA_70B, 8192, "70.55B"),
    "Llama-3.1-8B": _llama(128256, 4096, 14336, 32, 32, 8, 131072, "8.03B"),
    "Llama-3.1-70B": _llama(128256, *_LLAMA_70B, 131072, "70.55B"),
    "Llama-3.2-1B": _llama(128256, 2048, 8192, 16, 32, 8, 131072, "1.24B", tied=True),
    "Llama-3.2-3B": _llama(128256, 3072, 8192, 28, 24, 8, 131072, "3.21B", tied=True),
    "Llama-3.3-70B": _llama(128256, *_LLAMA_70B, 131072, "70.55B"),
    "SmolLM2-135M": _llama(49152, 576, 1536, 30, 9, 3, 8192, "0.135B", tied=True),
    "DiffuCoder-7B-Base": _DREAM,
    "DiffuCoder-7B-Instruct": _DREAM,
    "DiffuCoder-7B-cpGRPO": _DREAM,
    "Dream-v0-Base-7B": _DREAM,
    "Dream-v0-Instruct-7B": _DREAM,
    "Dream-Coder-v0-Instruct-7B": _DREAM,
    "diffullama": _llama(32000, 4096, 11008, 32, 32, 32, 4096, "6.74B", DIFFULLAMA),
    "Fast_dLLM_v2_7B": replace(_DREAM, max_position_embeddings=32768, source=FAST_DLLM),
    "SDAR-4B-Chat": _qwen3(2560, 9728, 36, 32, False, "4.4B", SDAR),
    "SDAR-8B-Chat": _qwen3(4096, 12288, 36, 32, False, "8.2B", SDAR),
    "LLaDA-8B-Base": _llama(126464, 4096, 12288, 32, 32, 32, 4096, "8.02B", LLADA),
    "LLaDA-8B-Instruct": _llama(126464, 4096, 12288, 32, 32, 32, 4096, "8.02B", LLADA),
}
_SAME_SIZE = {"-instruct": "", "-base": "", "-chat-hf": "-hf"}  # endings that name another training, not another size
_BY_NAME = {name.lower(): shape for name, shape in SHAPES.items()}


def published_shape(source: str) -> PublishedShape | None:
    """The shape of a hub id or of a folder of that name; None where the table has none.

    Quantised variants (``...-AWQ``, ``...-GPTQ-Int4``) are not listed: their weights are stored otherwise.
    """
    name = source.rstrip("/").rsplit("/", 1)[-1].lower().replace("meta-llama-3.1-", "llama-3.1-")
    candidates = [name, *(name.removesuffix(old) + new for old, new in _SAME_SIZE.items() if name.endswith(old))]
    return next((_BY_NAME[candidate] for candidate in candidates if candidate in _BY_NAME), None)
