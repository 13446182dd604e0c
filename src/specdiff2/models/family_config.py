"""config.json of a masked-diffusion model -> config of the plain transformers class that computes the same function.

Only keys that are known to matter are carried over, and settings that this class cannot compute are refused, so an
unusual checkpoint fails here instead of drafting nonsense. Remote code (``auto_map``) is never looked at. It reads no
file and knows no tensor.

Sources: modeling_llada.py / configuration_llada.py (LLaDALlamaBlock: ``act(ff_proj(x)) * up_proj(x)``), the Dream
and SDAR modelling files, which are Qwen2's and Qwen3's with another mask (see ``models.families``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from specdiff2.models.families import Family
from specdiff2.types import ConfigError

_CLASSES: dict[str, type[PreTrainedConfig]] = {"qwen2": Qwen2Config, "llama": LlamaConfig, "qwen3": Qwen3Config}
_DEFAULT_THETA = 10000.0  # of every config class here, where the file has no rope_theta
_PLAIN_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
)
_OPTIONAL_KEYS = (
    "hidden_act",
    "attention_dropout",
    "initializer_range",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
_TARGET_KEYS = {
    "qwen2": (),
    "llama": ("head_dim", "attention_bias", "mlp_bias"),
    "qwen3": ("head_dim", "attention_bias"),
}
# LLaDA is a configurable OLMo; these are the settings that make it a Llama
_LLADA_FIXED: dict[str, tuple[Any, ...]] = {
    "block_type": ("llama",),
    "activation_type": ("silu",),
    "layer_norm_type": ("rms",),
    "layer_norm_with_affine": (True,),
    "rope": (True,),
    "alibi": (False, None),
    "include_bias": (False, None),
    "include_qkv_bias": (False, None),
    "bias_for_layer_norm": (False, None),
    "attention_layer_norm": (False, None),
    "input_emb_norm": (False, None),
    "scale_logits": (False, None),
    "multi_query_attention": (False, None),
    "clip_qkv": (None,),
    "block_group_size": (1, None),
}
_LLADA_NAMES = {
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "max_position_embeddings": "max_sequence_length",
    "intermediate_size": "mlp_hidden_size",
    "tie_word_embeddings": "weight_tying",
    "initializer_range": "init_std",
}


def to_target_config(config: Mapping[str, Any], family: Family, source: object = "config.json") -> PreTrainedConfig:
    """The transformers config of ``family.target`` for a checkpoint's ``config``.

    Raises:
        ConfigError: a key is missing or malformed, or asks for something that the target class does not compute.
    """
    if config.get("quantization_config"):
        raise ConfigError(f"{source}: quantised weights; expected the family's own bfloat16 or float32 checkpoint")
    values = _llada_values(config, source) if family.name == "llada" else dict(config)
    missing = [key for key in _PLAIN_KEYS if values.get(key) is None and key != "num_key_value_heads"]
    if missing:
        raise ConfigError(f"{source}: config.json lacks {', '.join(missing)}, which a {family.name} model needs")
    if values.get("use_sliding_window"):
        raise ConfigError(f"{source}: use_sliding_window=true; a drafter's masks need full attention in every layer")
    keys = (*_PLAIN_KEYS, *_OPTIONAL_KEYS, *_TARGET_KEYS[family.target])
    kept = {key: values[key] for key in keys if values.get(key) is not None}
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        kept.setdefault(key, None)  # else the target's own defaults, which are another tokenizer's
        _check_ids(kept[key], int(kept["vocab_size"]), key, source)
    kept["rope_parameters"] = rope_parameters(values)
    try:
        target = _CLASSES[family.target](**kept)
    except (StrictDataclassError, ValueError, TypeError, KeyError) as error:  # a value of the wrong type or range
        raise ConfigError(f"{source}: config.json does not describe a {family.target} model: {error}") from error
    target.architectures = None
    return target


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """transformers 5's ``rope_parameters`` from the older ``rope_theta`` and ``rope_scaling`` keys, or as they are."""
    found = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope_type = found.pop("rope_type", None) or found.pop("type", None) or "default"
    found.pop("type", None)
    theta = found.pop("rope_theta", None) or config.get("rope_theta") or _DEFAULT_THETA
    return {"rope_type": rope_type, "rope_theta": float(theta), **found}


def mask_id_of(config: Mapping[str, Any]) -> int | None:
    """The mask id that config.json names, if it does."""
    value = config.get("mask_token_id")
    return None if value is None else int(value)


def _llada_values(config: Mapping[str, Any], source: object) -> dict[str, Any]:
    """LLaDA's own key names -> Llama's."""
    for key, allowed in _LLADA_FIXED.items():
        if config.get(key) not in allowed:
            raise ConfigError(f"{source}: {key}={config.get(key)!r}; expected {allowed[0]!r}, else it is no Llama")
    values = {name: config.get(own) for name, own in _LLADA_NAMES.items()}
    if values["intermediate_size"] is None and config.get("mlp_ratio") and config.get("d_model"):
        values["intermediate_size"] = int(config["mlp_ratio"]) * int(config["d_model"])
    rows = config.get("embedding_size") or config.get("vocab_size")  # the head may be padded beyond vocab_size
    kept = ("rms_norm_eps", "rope_theta", "attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id")
    return {**values, "vocab_size": rows, **{key: config.get(key) for key in kept}}


def _check_ids(value: Any, vocab_size: int, key: str, source: object) -> None:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    wrong = [item for item in ids if not (isinstance(item, int) and 0 <= item < vocab_size)]
    if wrong:
        raise ConfigError(f"{source}: {key}={wrong[0]!r} is not an id below vocab_size={vocab_size}")
