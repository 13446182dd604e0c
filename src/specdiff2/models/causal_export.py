"""A block drafter as a plain causal language model, and loading of such models as assistants of the verifier.

A shifted drafter with a causal prefix reads position 1 of its window from the anchor's own row, and that row sees the
tokens up to the anchor and nothing of the window. So position 1 is an autoregressive model of ``num_layers`` layers
with the verifier's embedding and head; trained with gamma=1 the drafter is nothing else. Here it is written as a folder
that ``AutoModelForCausalLM`` loads: the fair opponent of a block drafter, since it has the same layers.

A cut draft vocabulary has no place in such a folder: its config lists the draftable ids under ``draft_vocab_ids``,
which ``load_assistant`` turns into a head bias and transformers alone ignores. Our own decoding (``models.ar_drafter``)
cuts the head instead.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from specdiff2.models.block_drafter_config import BlockDrafterConfig
from specdiff2.models.drafter_files import BLOCK_FORMAT, CONFIG_FILE, WEIGHTS_FILE
from specdiff2.models.hub import find_on_hub
from specdiff2.models.layer_stack import PLAIN_TYPES, base_of
from specdiff2.models.loading import check_folder, load_model_and_tokenizer, resolve_source
from specdiff2.models.pretrained import load_drafter, read_drafter_config
from specdiff2.models.safe_folder import require_empty
from specdiff2.models.verifier import HFVerifier
from specdiff2.models.wheel_checkpoint import WHEEL_PREFIX, default_cache_dir
from specdiff2.types import ConfigError, CorruptFileError

if TYPE_CHECKING:
    from specdiff2.models.block_drafter import BlockDrafter

_DRAFT_VOCAB = "draft_vocab_ids"  # key in the exported config.json
_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*(/[\w.-]+)?")  # what is a path to nowhere otherwise


@torch.no_grad()
def export_causal_lm(drafter: BlockDrafter, verifier: HFVerifier, folder: str | Path) -> Path:
    """Write ``folder`` (config, weights in the drafter's dtype, tokenizer files); complete or not at all.

    The model's logits at a token are the drafter's for position 1 of a window after that token, over all rows of the
    verifier's head instead of the draft vocabulary.

    Raises:
        ConfigError: the drafter is not autoregressive at position 1, or ``folder`` is not empty.
    """
    folder = Path(os.path.abspath(folder))
    require_empty(folder)
    refuse_unexportable(drafter.config, drafter.state_dict(), "drafter")
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        causal_lm(drafter, verifier).save_pretrained(temporary)
        if verifier.tokenizer is not None:
            verifier.tokenizer.save_pretrained(temporary)
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # gone already after the rename
    return folder


def load_assistant(source: str | Path, verifier: HFVerifier, cache_dir: str | Path | None) -> HFVerifier:
    """``source`` as an assistant of ``verifier``: its dtype, device and attention, packed where its linears are.

    Args:
        source: a drafter folder of ours, exported into ``cache_dir`` once, or whatever names a causal LM
            (``models.loading``).
        cache_dir: None: the cache folder of converted verifiers.

    Raises:
        ConfigError, CorruptFileError: it cannot be loaded, or is a drafter that cannot be exported.
        MismatchError: a drafter that was trained for another verifier.
    """
    if is_drafter_folder(source):
        source = _exported(Path(source), verifier, Path(cache_dir or default_cache_dir()))
    model, tokenizer = load_model_and_tokenizer(
        source,
        dtype=str(verifier.dtype).removeprefix("torch."),
        attn_implementation=verifier.config._attn_implementation,
        device=str(verifier.device),
        cache_dir=cache_dir,
    )
    _silence_undraftable(model)
    return HFVerifier(model, tokenizer, name=str(source), pack_weights=verifier.num_packed > 0)


def check_assistant_source(source: str, cache_dir: str | Path | None, label: str = "assistant") -> None:
    """What can be known about an assistant before the verifier loads; ``label``: the setting that named it.

    Raises:
        ConfigError: nothing of that name, or a drafter that is not autoregressive.
        CorruptFileError: a damaged folder.
    """
    if is_drafter_folder(source):
        refuse_unexportable(read_drafter_config(source), _tensor_names(Path(source)), f"{label}={source!r}")
        return
    folder = resolve_source(source, cache_dir=cache_dir)
    if Path(folder).is_dir():
        check_folder(Path(folder))
        return
    try:
        find_on_hub(folder)
    except ConfigError as error:
        raise ConfigError(
            f"{label}={source!r}: no such folder, and no model of that name can be fetched ({error}); expected a "
            "drafter folder written by train.py, a folder of a causal language model, or a hub id"
        ) from error


def is_causal_source(source: str | Path) -> bool:
    """Whether ``source`` names a model that drafts token by token: a folder or hub id of a causal language model, or a
    folder of one of our drafters that is one. Nothing is loaded, and a hub id is not looked for.

    Raises:
        CorruptFileError: a damaged drafter folder.
    """
    if is_drafter_folder(source):
        return is_autoregressive(read_drafter_config(source))
    text, folder = str(source), Path(source).expanduser()
    if folder.is_dir():
        record = peek_config(folder)
        return "format" not in record and "model_type" in record
    return text.startswith(WHEEL_PREFIX) or text.endswith(".gguf") or _HUB_ID.fullmatch(text) is not None


def is_autoregressive(config: object) -> bool:
    """Whether a drafter of this configuration drafts one token a pass from committed tokens alone, and nothing else."""
    return (
        isinstance(config, BlockDrafterConfig)
        and (config.gamma, config.denoising_steps, config.markov_rank) == (1, 1, 0)
        and (config.shifted, config.attention, config.conditioning) == (True, "causal_prefix", "none")
    )


def is_drafter_folder(source: str | Path) -> bool:
    """Whether ``source`` is a folder of a block drafter written by ``save_drafter``."""
    return peek_config(source).get("format") == BLOCK_FORMAT


def refuse_unexportable(config: BlockDrafterConfig, tensor_names: Iterable[str], label: str) -> None:
    """Position 1 must depend on the committed tokens alone, through layers of a known structure.

    Raises:
        ConfigError: it does not.
    """
    remedy = "train one with `python train.py model.shifted=true model.attention=causal_prefix model.gamma=1`"
    if not config.shifted or config.attention != "causal_prefix":
        raise ConfigError(
            f"{label}: shifted={config.shifted}, attention={config.attention!r} is not autoregressive: expected "
            f"shifted=true, attention='causal_prefix'; {remedy}"
        )
    if config.denoising_steps > 1:
        raise ConfigError(f"{label}: denoising_steps={config.denoising_steps}, expected 1; {remedy}")
    model_type = config.base_config.get("model_type")
    if model_type not in PLAIN_TYPES:
        raise ConfigError(f"{label}: layers of {model_type!r} cannot be exported: expected {sorted(PLAIN_TYPES)}")
    # conditioning, Markov heads and the like have tensors of their own, which a causal LM has no place for
    others = sorted(
        n for n in tensor_names if n != "mask_embedding" and not n.startswith(("stack.layers.", "stack.norm."))
    )
    if others:
        raise ConfigError(
            f"{label}: it has more than plain layers ({others[0]}): expected none of its options; {remedy}"
        )


def causal_lm(drafter: BlockDrafter, verifier: HFVerifier, attn_implementation: str = "sdpa") -> PreTrainedModel:
    """Layers and norm of the drafter between the verifier's embedding and head, all copied."""
    embedding: Any = verifier.model.get_input_embeddings()
    head: Any = verifier.model.get_output_embeddings()
    config = AutoConfig.for_model(**drafter.config.base_config)
    config.vocab_size = drafter.embeddings.num_rows
    config.use_cache = True
    config.tie_word_embeddings = head.weight is embedding.weight
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, name, getattr(verifier.config, name, None))
    if len(drafter.draft_vocab_ids) < drafter.vocab_size:
        setattr(config, _DRAFT_VOCAB, drafter.draft_vocab_ids.tolist())
    with torch.random.fork_rng(devices=[]):  # random weights, all overwritten: leave the caller's generator alone
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=drafter.dtype, attn_implementation=attn_implementation
        )
    base = base_of(model)
    base.layers.load_state_dict(drafter.stack.layers.state_dict())
    base.norm.load_state_dict(drafter.stack.norm.state_dict())
    for target, source in ((model.get_input_embeddings(), embedding), (model.get_output_embeddings(), head)):
        target.load_state_dict(source.state_dict())
    return model


def cut_head(model: PreTrainedModel, ids: Sequence[int]) -> None:
    """Leave only the rows ``ids`` of the head, in this order: the others are never computed again."""
    head: Any = model.get_output_embeddings()
    rows = torch.tensor(list(ids), device=head.weight.device)
    small = nn.Linear(head.in_features, len(rows), head.bias is not None, head.weight.device, head.weight.dtype)
    small.load_state_dict({name: tensor[rows] for name, tensor in head.state_dict().items()})
    model.set_output_embeddings(small)


def _silence_undraftable(model: PreTrainedModel) -> None:
    """Rows outside the draft vocabulary were never trained against, so they must not win: their head bias is -inf."""
    ids = getattr(model.config, _DRAFT_VOCAB, None)
    if ids is None:
        return
    head: Any = model.get_output_embeddings()
    bias = torch.full_like(head.weight[:, 0], -torch.inf)
    bias[torch.tensor(ids, device=bias.device)] = 0.0
    head.bias = nn.Parameter(bias if head.bias is None else bias + head.bias, requires_grad=False)


def _exported(folder: Path, verifier: HFVerifier, cache_dir: Path) -> Path:
    """The export of the drafter in ``folder``, written once per weights, verifier and dtype."""
    drafter = load_drafter(folder, verifier)
    digest = hashlib.sha256((folder / WEIGHTS_FILE).read_bytes())
    digest.update(f"{drafter.config} {verifier.fingerprint} {verifier.dtype}".encode())
    target = cache_dir / "assistants" / digest.hexdigest()[:16]
    if not (target / "config.json").is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        export_causal_lm(drafter, verifier, target)
    return target


def peek_config(folder: str | Path) -> dict[str, Any]:
    """``config.json`` of a folder; empty where there is none to read, which loading will explain."""
    try:
        record = json.loads((Path(folder) / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _tensor_names(folder: Path) -> list[str]:
    try:
        with safe_open(folder / WEIGHTS_FILE, "pt") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        raise CorruptFileError(
            f"drafter {folder}: {WEIGHTS_FILE}: not a complete safetensors file ({error}); copy the folder again or "
            "save the drafter again"
        ) from error
