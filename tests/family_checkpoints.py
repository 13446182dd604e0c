"""Tiny checkpoints of every masked-diffusion family in its authors' on-disk layout: the same files, keys, tensor and
special-token names; small shapes, vocabularies and ids. The remote code in them raises when it is run.

    folder = write_checkpoint(tmp_path / "dream", "dream")
    base = load_family_model(folder, dtype="float32")
    verifier = tiny_verifier(family="qwen2", vocab=..., tokenizer=write_parent_tokenizer(tmp_path / "qwen", "dream"))
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from family_tokenizer_files import write_family_tokenizer, write_parent_tokenizer
from safetensors.torch import load_file, save_file
from torch import Tensor

__all__ = [
    "FAMILY_NAMES",
    "random_tensors",
    "read_tensors",
    "write_checkpoint",
    "write_parent_tokenizer",
    "write_tensors",
]

FAMILY_NAMES = ("dream", "diffullama", "llada", "fast_dllm_v2", "sdar")
_REMOTE_CODE = 'raise RuntimeError("remote code of a checkpoint was run")\n'
_REMOTE_FILES = {
    "dream": ("configuration_dream.py", "modeling_dream.py", "generation_utils.py", "tokenization_dream.py"),
    "llada": ("configuration_llada.py", "modeling_llada.py"),
    "fast_dllm_v2": ("configuration.py", "modeling.py"),
    "sdar": ("configuration_sdar.py", "modeling_sdar.py"),
    "diffullama": (),
}
_SHAPE = dict(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=None,
    max_position_embeddings=512,
    rope_theta=10.0,  # small, so that wrong positions show
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
)


def write_checkpoint(
    folder: Path,
    family_name: str,
    *,
    seed: int = 0,
    vocab: int | None = None,
    num_shards: int = 2,
    dtype: torch.dtype = torch.float32,
    bin_files: bool = False,
    first_special_id: int | None = None,
    **shape: Any,
) -> Path:
    """A checkpoint in ``folder``; returns it.

    Args:
        vocab: rows of embedding and head; None: the tokens and some padded rows.
        num_shards: weight files; 1 writes a single file without an index.
        bin_files: pytorch_model*.bin instead of safetensors.
        first_special_id: id of the first special token; the ids below are filled up with tokens that no text uses.
            151643 gives the real ids of the Qwen families.
        shape: any key of ``_SHAPE``, by Llama's names also for LLaDA.
    """
    folder.mkdir(parents=True, exist_ok=True)
    unknown = sorted(set(shape) - set(_SHAPE))
    assert not unknown, f"unknown shape keys {unknown}"
    values = {**_SHAPE, **shape}
    ids = write_family_tokenizer(folder, family_name, first_special_id)
    rows = vocab if vocab is not None else (max(ids.values()) // 32 + 2) * 32
    config = _config(family_name, values, ids, rows, str(dtype).removeprefix("torch."))
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": config["eos_token_id"]}))
    for name in _REMOTE_FILES[family_name]:
        (folder / name).write_text(_REMOTE_CODE)
    tensors = {name: tensor.to(dtype) for name, tensor in random_tensors(family_name, values, rows, seed).items()}
    write_tensors(folder, tensors, num_shards=num_shards, bin_files=bin_files)
    return folder


def write_tensors(folder: Path, tensors: dict[str, Tensor], *, num_shards: int = 2, bin_files: bool = False) -> None:
    """The weight files (and their index) of ``folder``, in place of those that are there."""
    for old in (*folder.glob("model*.safetensors*"), *folder.glob("pytorch_model*")):
        old.unlink()
    stem, suffix = ("pytorch_model", ".bin") if bin_files else ("model", ".safetensors")
    names = list(tensors)
    size = -(-len(names) // num_shards)
    weight_map: dict[str, str] = {}
    for number in range(num_shards):
        part = names[number * size : (number + 1) * size]
        file = f"{stem}-{number + 1:05d}-of-{num_shards:05d}{suffix}" if num_shards > 1 else stem + suffix
        table = {name: tensors[name].contiguous() for name in part}
        if bin_files:
            torch.save(table, folder / file)
        else:
            save_file(table, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    if num_shards > 1:
        total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / f"{stem}{suffix}.index.json").write_text(json.dumps(index, indent=2))


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors checkpoint, under the authors' names."""
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


# ---------------------------------------------------------------- config.json
def _config(family: str, shape: dict[str, Any], ids: dict[str, int], rows: int, dtype: str) -> dict[str, Any]:
    if family == "llada":
        return _llada_config(shape, ids, rows, dtype)
    config = {
        **{key: value for key, value in shape.items() if key != "head_dim"},
        "vocab_size": rows,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "rope_scaling": None,
        "torch_dtype": dtype,
        "transformers_version": "4.46.2",
        "use_cache": True,
    }
    if family == "diffullama":  # a plain Llama; the mask is an ordinary token that its config does not tell (811)
        return config | {
            "_name_or_path": "diffusionfamily/diffullama",
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": False,
            "mlp_bias": False,
            "pretraining_tp": 1,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "mask_token_id": ids["▁"],  # only here, since 811 is beyond the tiny vocabulary
        }
    config |= {"max_window_layers": 28, "sliding_window": None, "use_sliding_window": False}
    end = ids["<|endoftext|>"]
    if family == "dream":
        return config | {
            "architectures": ["DreamModel"],
            "auto_map": {"AutoConfig": "configuration_dream.DreamConfig", "AutoModel": "modeling_dream.DreamModel"},
            "model_type": "Dream",
            "bos_token_id": end,
            "eos_token_id": end,
            "pad_token_id": end,  # DiffuCoder's too, though its tokenizer pads with <|dlm_pad|>
            "mask_token_id": ids["<|mask|>"],
        }
    if family == "fast_dllm_v2":  # no mask_token_id: the modelling code holds it
        turn_end = ids["<|im_end|>"]
        return config | {
            "architectures": ["Fast_dLLM_QwenForCausalLM"],
            "auto_map": {
                "AutoConfig": "configuration.Fast_dLLM_QwenConfig",
                "AutoModel": "modeling.Fast_dLLM_QwenModel",
                "AutoModelForCausalLM": "modeling.Fast_dLLM_QwenForCausalLM",
            },
            "model_type": "Fast_dLLM_Qwen",
            "bd_size": 32,
            "layer_types": ["full_attention"] * shape["num_hidden_layers"],
            "bos_token_id": end,
            "eos_token_id": turn_end,
            "pad_token_id": turn_end,
        }
    return config | {
        "architectures": ["SDARForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_sdar.SDARConfig",
            "AutoModel": "modeling_sdar.SDARModel",
            "AutoModelForCausalLM": "modeling_sdar.SDARForCausalLM",
        },
        "model_type": "sdar",
        "attention_bias": False,
        "head_dim": _head_dim(shape),
        "block_size": 4,
        "fuse_cross_entropy": True,
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": end,
        "mask_token_id": ids["<|MASK|>"],
    }


def _llada_config(shape: dict[str, Any], ids: dict[str, int], rows: int, dtype: str) -> dict[str, Any]:
    return {
        "activation_type": "silu",
        "alibi": False,
        "alibi_bias_max": 8.0,
        "architectures": ["LLaDAModelLM"],
        "attention_dropout": 0.0,
        "attention_layer_norm": False,
        "attention_layer_norm_with_affine": True,
        "auto_map": {
            "AutoConfig": "configuration_llada.LLaDAConfig",
            "AutoModelForCausalLM": "modeling_llada.LLaDAModelLM",
            "AutoModel": "modeling_llada.LLaDAModelLM",
        },
        "bias_for_layer_norm": False,
        "block_group_size": 1,
        "block_type": "llama",
        "d_model": shape["hidden_size"],
        "embedding_dropout": 0.0,
        "embedding_size": rows,
        "eos_token_id": ids["<|endoftext|>"],
        "flash_attention": False,
        "include_bias": False,
        "include_qkv_bias": False,
        "init_cutoff_factor": None,
        "init_device": "meta",
        "init_fn": "mitchell",
        "init_std": 0.02,
        "input_emb_norm": False,
        "layer_norm_type": "rms",
        "layer_norm_with_affine": True,
        "mask_token_id": ids["<|mdm_mask|>"],
        "max_sequence_length": shape["max_position_embeddings"],
        "mlp_hidden_size": shape["intermediate_size"],
        "mlp_ratio": 4,
        "model_type": "llada",
        "multi_query_attention": None,
        "n_heads": shape["num_attention_heads"],
        "n_kv_heads": shape["num_key_value_heads"],
        "n_layers": shape["num_hidden_layers"],
        "pad_token_id": ids["<|endoftext|>"],
        "precision": "amp_bf16",
        "residual_dropout": 0.0,
        "rms_norm_eps": shape["rms_norm_eps"],
        "rope": True,
        "rope_full_precision": True,
        "rope_theta": shape["rope_theta"],
        "scale_logits": False,
        "torch_dtype": dtype,
        "transformers_version": "4.46.3",
        "use_cache": False,
        "vocab_size": rows,
        "weight_tying": shape["tie_word_embeddings"],
    }


# ---------------------------------------------------------------- tensors
def _head_dim(shape: dict[str, Any]) -> int:
    return shape["head_dim"] or shape["hidden_size"] // shape["num_attention_heads"]


def random_tensors(family: str, shape: dict[str, Any], rows: int, seed: int) -> dict[str, Tensor]:
    """Every tensor of the family's checkpoint by the authors' names. Large values, so that wrong masks show."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, head = shape["hidden_size"], shape["intermediate_size"], _head_dim(shape)
    wide, narrow = shape["num_attention_heads"] * head, shape["num_key_value_heads"] * head
    llada = family == "llada"
    layer = {
        "attn_norm" if llada else "input_layernorm": (hidden,),
        "ff_norm" if llada else "post_attention_layernorm": (hidden,),
        "q_proj" if llada else "self_attn.q_proj": (wide, hidden),
        "k_proj" if llada else "self_attn.k_proj": (narrow, hidden),
        "v_proj" if llada else "self_attn.v_proj": (narrow, hidden),
        "attn_out" if llada else "self_attn.o_proj": (hidden, wide),
        "ff_proj" if llada else "mlp.gate_proj": (inner, hidden),
        "up_proj" if llada else "mlp.up_proj": (inner, hidden),
        "ff_out" if llada else "mlp.down_proj": (hidden, inner),
    }
    if family == "sdar":
        layer |= {"self_attn.q_norm": (head,), "self_attn.k_norm": (head,)}
    top = "model.transformer" if llada else "model"
    shapes: dict[str, tuple[int, ...]] = {f"{top}.{'wte' if llada else 'embed_tokens'}.weight": (rows, hidden)}
    for number in range(shape["num_hidden_layers"]):
        prefix = f"{top}.{'blocks' if llada else 'layers'}.{number}"
        shapes |= {f"{prefix}.{name}.weight": size for name, size in layer.items()}
        if family in ("dream", "fast_dllm_v2"):  # Qwen2's biases
            sizes = {"q_proj": wide, "k_proj": narrow, "v_proj": narrow}
            shapes |= {f"{prefix}.self_attn.{name}.bias": (size,) for name, size in sizes.items()}
    shapes[f"{top}.{'ln_f' if llada else 'norm'}.weight"] = (hidden,)
    if not shape["tie_word_embeddings"]:
        shapes["model.transformer.ff_out.weight" if llada else "lm_head.weight"] = (rows, hidden)
    return {
        name: torch.randn(size, generator=generator) * 0.2 + ("norm" in name or "ln_f" in name)
        for name, size in shapes.items()
    }
