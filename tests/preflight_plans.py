"""Tiny models and settings that the tests of preflight plan for."""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from specdiff2.models.model_shapes import ModelShape, shape_of
from specdiff2.runtime.config_schema import HardwareSection
from specdiff2.runtime.preflight_settings import DrafterSettings, TrainingSettings, VerifierSettings

HARDWARE = HardwareSection("box", 1, 80.0, 2.0, 2039.0, 312.0, 19.5, 0.69, 0.5, 1.2, 0.024, 2.0, 300.0, 25.0, 0.8)
CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}


def tiny_config(model_type: str = "llama", **changes: Any) -> Any:
    values = dict(
        vocab_size=64, hidden_size=96, intermediate_size=160, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=False, attn_implementation="sdpa",
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return CONFIGS[model_type](**{**values, **changes})


def shape(config: Any) -> ModelShape:
    return shape_of(config, name="tiny", origin="a test")


def settings(*, mixed: bool, chunk: int = 4, law: bool = False, **changes: Any) -> TrainingSettings:
    values = dict(
        strategy="one", num_ranks=1, compute="bfloat16" if mixed else "float32", mixed=mixed, batch_size=2,
        windows_per_rollout=8, length=96, loss_chunk_windows=chunk, accumulate=1, max_steps=1,
        verifier_stays=True, only_for_probe=False, reads_law=law,
    )  # fmt: skip
    return TrainingSettings(**{**values, **changes})


def a_drafter(lora: Any = None, **changes: Any) -> DrafterSettings:
    found = shape(tiny_config())
    trained = found.num_parameters if lora is None else found.lora_parameters(lora["rank"], lora["targets"])
    values = dict(
        shape=found, num_trained=trained, draft_vocab=64, kind="masked_lm", attention="bidirectional", gamma=4,
        num_slots=4, denoising_steps=1, weights="float32", lora=lora, gradient_checkpointing=False,
    )  # fmt: skip
    return DrafterSettings(**{**values, **changes})


def a_verifier(split: str = "none", shards: int = 1, **changes: Any) -> VerifierSettings:
    values = dict(shape=shape(tiny_config()), dtype="bfloat16", quantization=None, split="none", num_shards=1)
    whole = VerifierSettings(**{**values, "first_share": 1.0, **changes})
    return whole.spread(split, shards)
