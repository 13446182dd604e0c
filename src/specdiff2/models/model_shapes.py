"""How large a model is, from its configuration alone: parameters, bytes of weights, bytes of cache.

Parameters are counted on the model that transformers builds from the config on the meta device, which holds no
weights: exact for every architecture, tied heads counted once. The config comes from a local folder, the header of a
GGUF file, the local hub cache, or the table ``models.published_shapes``; no network is ever asked. It knows nothing of
devices, batches or speed.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig

from specdiff2.models.context_input import ContextInput
from specdiff2.models.families import Family, detect_family, get_family
from specdiff2.models.family_config import to_target_config
from specdiff2.models.family_loading import read_config
from specdiff2.models.hub import cached_folder
from specdiff2.models.layer_stack import stack_config
from specdiff2.models.markov_head import MarkovHead
from specdiff2.models.published_shapes import PublishedShape, published_shape
from specdiff2.models.wheel_checkpoint import WHEEL_PREFIX, find_wheel_gguf
from specdiff2.types import ConfigError, CorruptFileError

BYTES = {"bfloat16": 2.0, "float16": 2.0, "float32": 4.0, "float64": 8.0}
# bytes per weight of a linear layer inside the decoder, and per output row: bitsandbytes keeps one float32 scale per
# row for int8 and one per block of 64 weights for 4 bits (docs: transformers, quantization/bitsandbytes)
QUANTIZED = {"int8": (1.0, 4.0), "int4": (0.5 + 4.0 / 64, 0.0)}


@dataclass(frozen=True)
class ModelShape:
    """Sizes of one causal language model.

    Attributes:
        name, origin: as asked for, and where its configuration comes from.
        family: of a masked-diffusion model (``models.families``) whose config.json was read, else None.
        config: of transformers.
        num_parameters: all of them, tied ones once.
        num_embedding, num_head: numbers in the input embedding, and in the head where it has its own (0 where tied).
        linears: for each name of a linear layer inside a decoder layer: (how many, inputs, outputs).
    """

    name: str
    origin: str
    config: PreTrainedConfig
    num_parameters: int
    num_embedding: int
    num_head: int
    linears: Mapping[str, tuple[int, int, int]]
    family: Family | None = None

    @property
    def num_layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def intermediate_size(self) -> int:
        return int(self.config.intermediate_size)

    @property
    def vocab_size(self) -> int:
        """Rows of the head, padded ones included."""
        return int(self.config.vocab_size)

    @property
    def num_heads(self) -> int:
        return int(self.config.num_attention_heads)

    @property
    def num_kv_heads(self) -> int:
        return int(getattr(self.config, "num_key_value_heads", None) or self.num_heads)

    @property
    def head_dim(self) -> int:
        return int(getattr(self.config, "head_dim", None) or self.hidden_size // self.num_heads)

    @property
    def num_linear(self) -> int:
        """Weights of the linear layers inside the decoder layers."""
        return sum(count * inputs * outputs for count, inputs, outputs in self.linears.values())

    def weight_bytes(self, dtype: str, quantization: str | None = None) -> float:
        """All weights in ``dtype``; ``int8`` or ``int4`` store the layers' linears otherwise, never head and embedding.

        Raises:
            ConfigError: an unknown dtype or quantisation.
        """
        width = dtype_bytes(dtype)
        if quantization is None:
            return self.num_parameters * width
        if quantization not in QUANTIZED:
            raise ConfigError(f"quantization={quantization!r}: expected null or one of {', '.join(QUANTIZED)}")
        per_weight, per_row = QUANTIZED[quantization]
        rows = sum(count * outputs for count, _, outputs in self.linears.values())
        return (self.num_parameters - self.num_linear) * width + self.num_linear * per_weight + rows * per_row

    def read_bytes(self, dtype: str, quantization: str | None = None) -> float:
        """Weights that one forward pass reads: all but the input embedding, of which it looks up a few rows."""
        unread = self.num_embedding if self.num_head else 0  # a tied embedding is the head, which is read
        return self.weight_bytes(dtype, quantization) - unread * dtype_bytes(dtype)

    def layer_bytes(self, dtype: str) -> float:
        """Weights of the decoder layers and the final norm alone."""
        return (self.num_parameters - self.num_embedding - self.num_head) * dtype_bytes(dtype)

    def kv_bytes(self, dtype: str, num_tokens: int) -> float:
        """Keys and values of ``num_tokens`` tokens in every layer (``models.kv_cache.PreallocatedCache``)."""
        return 2.0 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes(dtype) * num_tokens

    def layer_flops(self, context: float) -> float:
        """Operations of the decoder layers for one token that sees ``context`` tokens (a multiply-add is 2)."""
        return 2.0 * self.num_linear + 4.0 * self.num_layers * self.num_heads * self.head_dim * context

    def token_flops(self, context: float) -> float:
        """``layer_flops`` and the head."""
        return self.layer_flops(context) + 2.0 * self.vocab_size * self.hidden_size

    def lora_parameters(self, rank: int, targets: Sequence[str]) -> int:
        """Weights of rank-``rank`` adapters beside the linears named in ``targets`` (``models.lora.add_lora``).

        Raises:
            ConfigError: no linear layer has such a name.
        """
        unknown = [target for target in targets if target not in self.linears]
        if unknown:
            raise ConfigError(
                f"model.lora.targets holds {unknown[0]!r}: expected some of {', '.join(sorted(self.linears))}"
            )
        return sum(rank * count * (inputs + outputs) for count, inputs, outputs in map(self.linears.get, set(targets)))  # type: ignore[misc]


def dtype_bytes(dtype: str) -> float:
    """Raises ConfigError for a name that is no floating-point format here."""
    if dtype not in BYTES:
        raise ConfigError(f"dtype={dtype!r}: expected one of {', '.join(BYTES)}")
    return BYTES[dtype]


def find_shape(
    source: str, *, revision: str | None = None, gguf_file: str | None = None, family: str | None = None
) -> ModelShape:
    """The shape of a folder, a GGUF file, ``wheel:NAME`` or a hub id; a masked-diffusion LM as the class it loads as.

    ``family``: of ``families.FAMILIES``; None tells it from config.json.

    Raises:
        ConfigError: nothing on this machine and not in the table: names the command that fetches the configuration.
        CorruptFileError: the configuration cannot be read.
    """
    config, origin, found = find_config(source, revision=revision, gguf_file=gguf_file, family=family)
    return replace(shape_of(config, name=source, origin=origin), family=found)


def shape_of(config: PreTrainedConfig, *, name: str, origin: str) -> ModelShape:
    """Build the model of ``config`` on the meta device and count."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    head: Any = model.get_output_embeddings()
    embedding: Any = model.get_input_embeddings()
    tied = head.weight is embedding.weight
    linears: dict[str, tuple[int, int, int]] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not head:
            leaf = path.rpartition(".")[2]
            linears[leaf] = (linears.get(leaf, (0, 0, 0))[0] + 1, module.in_features, module.out_features)
    return ModelShape(
        name, origin, config,
        num_parameters=count_parameters(model),
        num_embedding=embedding.weight.numel(),
        num_head=0 if tied else head.weight.numel(),
        linears=linears,
    )  # fmt: skip


def count_parameters(module: nn.Module) -> int:
    """Numbers in all parameters, shared ones once."""
    return sum(parameter.numel() for parameter in module.parameters())


def block_drafter_shape(verifier: ModelShape, settings: Mapping[str, Any], draft_vocab: int) -> tuple[ModelShape, int]:
    """(its layers as a model without embedding and head, trained parameters) of a drafter of verifier layers.

    ``settings``: section ``model`` with the keys of ``BlockDrafter.from_verifier``. Embedding and head are borrowed.
    """
    hidden, depth = verifier.hidden_size, verifier.num_layers
    num_layers = settings["num_layers"]
    config = stack_config(verifier.config, list(range(depth - num_layers, depth)))
    with torch.device("meta"):
        stack = AutoModel.from_config(config)
        stack.set_input_embeddings(nn.Identity())
        parts = count_parameters(stack)
        if settings.get("conditioning", "none") == "none":
            parts += hidden  # the mask embedding
        else:
            features = settings.get("feature_layers") or {depth // 2, depth * 4 // 5, depth}
            parts += count_parameters(ContextInput(hidden, len(features), settings["gamma"]))
        if rank := settings.get("markov_rank", 0):
            parts += count_parameters(MarkovHead(rank, hidden, draft_vocab))
    linears = {name: (num_layers, inputs, outputs) for name, (_, inputs, outputs) in verifier.linears.items()}
    return ModelShape("block drafter", verifier.origin, config, parts, 0, 0, linears), parts


def eagle_shape(verifier: ModelShape, num_layers: int) -> tuple[ModelShape, int]:
    """(its layers and ``fc``, trained parameters) of a fresh ``models.eagle_drafter.EagleDrafter``: verifier layers
    without the first input norm and the last norm, behind a projection of twice the hidden size with a bias."""
    layers, _ = block_drafter_shape(verifier, {"num_layers": num_layers}, 0)
    hidden = verifier.hidden_size
    # block_drafter_shape counts a final norm and a mask embedding; here are neither, nor the first input norm
    parts = layers.num_parameters - 3 * hidden + 2 * hidden * hidden + hidden
    linears = {**layers.linears, "fc": (1, 2 * hidden, hidden)}
    return replace(layers, name="EAGLE head", num_parameters=parts, linears=linears), parts


def find_config(
    source: str, *, revision: str | None = None, gguf_file: str | None = None, family: str | None = None
) -> tuple[PreTrainedConfig, str, Family | None]:
    """(configuration, where it comes from in words, masked-diffusion family). Raises as ``find_shape``."""
    path = Path(source).expanduser()
    if source.startswith(WHEEL_PREFIX):
        return *_gguf_config(find_wheel_gguf(source.removeprefix(WHEEL_PREFIX))), None
    if source.endswith(".gguf") or gguf_file:
        return *_gguf_config(path / gguf_file if gguf_file else path), None
    if path.is_dir():
        config, found = _folder_config(path, family)
        return config, f"config.json of {path}", found
    cached = cached_folder(source, revision)
    if cached is not None:
        config, found = _folder_config(cached, family)
        return config, f"hub cache: {cached / 'config.json'}", found
    published = published_shape(source)
    if published is not None:
        return _published_config(published), f"published sizes: {published.source}", None
    pin = f" --revision {revision}" if revision else ""
    raise ConfigError(
        f"{source}: no such folder, not in the local hub cache, and not in the table of published sizes; "
        f"fetch its configuration on a machine with network: hf download {source} config.json{pin}"
    )


def _published_config(shape: PublishedShape) -> PreTrainedConfig:
    values = {f.name: getattr(shape, f.name) for f in fields(shape) if f.name not in ("published", "source")}
    return AutoConfig.for_model(**values)


def _gguf_config(path: Path) -> tuple[PreTrainedConfig, str]:
    if not path.is_file():
        raise ConfigError(f"{path}: no such GGUF file; check the path")
    try:
        config = AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name, local_files_only=True)
    except (ValueError, IndexError, KeyError, EOFError, OSError, struct.error) as error:
        raise CorruptFileError(f"{path}: its header cannot be read ({error}); fetch the file again") from error
    return config, f"header of {path}"


def _folder_config(folder: Path, family: str | None) -> tuple[PreTrainedConfig, Family | None]:
    """``config.json`` of a folder; a masked-diffusion family is read as the class it loads as."""
    file = folder / "config.json"
    raw = read_config(file)
    try:
        found = get_family(family) if family is not None else detect_family(raw, folder)
    except ConfigError:
        if family is not None:
            raise
        try:  # an ordinary causal language model
            return AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False), None
        except (ValueError, KeyError, OSError) as error:
            raise ConfigError(
                f"{file}: transformers cannot read it: {error}; use a causal language model that the installed "
                "transformers knows"
            ) from error
    return to_target_config(raw, found, file), found
