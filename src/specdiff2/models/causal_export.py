"""A block drafter as a plain causal language model, and loading of such models as assistants of HF generation.

A shifted drafter with a causal prefix reads position 1 of its window from the anchor's own row, and that row sees the
tokens up to the anchor and nothing of the window. So position 1 is an autoregressive model of ``num_layers`` layers
with the verifier's embedding and head; trained with gamma=1 the drafter is nothing else. Here it is written as a folder
that ``AutoModelForCausalLM`` loads: the fair opponent of a block drafter, since it has the same layers.

A cut draft vocabulary has no place in such a model: its config lists the draftable ids under ``draft_vocab_ids``, which
``load_assistant`` turns into a head bias and transformers alone ignores.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from specdiff2.models.block_drafter_config import BlockDrafterConfig
from specdiff2.models.drafter_files import BLOCK_FORMAT, CONFIG_FILE, WEIGHTS_FILE
from specdiff2.models.layer_stack import PLAIN_TYPES, base_of
from specdiff2.models.loading import check_folder, load_model_and_tokenizer, resolve_source
from specdiff2.models.pretrained import load_drafter, read_drafter_config
from specdiff2.models.verifier import HFVerifier
from specdiff2.types import ConfigError, CorruptFileError

if TYPE_CHECKING:
    from specdiff2.models.block_drafter import BlockDrafter

_DRAFT_VOCAB = "draft_vocab_ids"  # key in the exported config.json


@torch.no_grad()
def export_causal_lm(drafter: BlockDrafter, verifier: HFVerifier, folder: str | Path) -> Path:
    """Write ``folder`` (config, weights in the drafter's dtype, tokenizer files); complete or not at all.

    The model's logits at a token are the drafter's for position 1 of a window after that token, over all rows of the
    verifier's head instead of the draft vocabulary.

    Raises:
        ConfigError: the drafter is not autoregressive at position 1, or ``folder`` is not empty.
    """
    folder = Path(os.path.abspath(folder))
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"export to {folder}: it is not empty; choose another folder")
    refuse_unexportable(drafter.config, drafter.state_dict(), "drafter")
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        _causal_lm(drafter, verifier).save_pretrained(temporary)
        if verifier.tokenizer is not None:
            verifier.tokenizer.save_pretrained(temporary)
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # gone already after the rename
    return folder


def load_assistant(source: str | Path, verifier: HFVerifier, cache_dir: str | Path) -> HFVerifier:
    """``source`` as an assistant of ``verifier``: its dtype, device and attention, packed where its linears are.

    Args:
        source: a drafter folder of ours, exported into ``cache_dir`` once, or whatever names a causal LM
            (``models.loading``).

    Raises:
        ConfigError, CorruptFileError: it cannot be loaded, or is a drafter that cannot be exported.
        MismatchError: a drafter that was trained for another verifier.
    """
    if is_drafter_folder(source):
        source = _exported(Path(source), verifier, Path(cache_dir))
    model, tokenizer = load_model_and_tokenizer(
        source,
        dtype=str(verifier.dtype).removeprefix("torch."),
        attn_implementation=verifier.config._attn_implementation,
        device=str(verifier.device),
        cache_dir=cache_dir,
    )
    _silence_undraftable(model)
    return HFVerifier(model, tokenizer, name=str(source), pack_weights=verifier.num_packed > 0)


def check_assistant_source(source: str, cache_dir: str | Path) -> None:
    """What can be known about an assistant before the verifier loads.

    Raises:
        ConfigError: nothing of that name, or a drafter that is not autoregressive.
        CorruptFileError: a damaged folder.
    """
    if is_drafter_folder(source):
        refuse_unexportable(read_drafter_config(source), _tensor_names(Path(source)), f"assistant={source!r}")
        return
    folder = resolve_source(source, cache_dir=cache_dir)
    if Path(folder).is_dir():
        check_folder(Path(folder))
        return
    try:
        AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = str(error).split("\n")[0]
        raise ConfigError(
            f"assistant={source!r}: no such folder, and no model of that name can be fetched ({reason}); expected a "
            "drafter folder written by train.py with model.gamma=1, a folder of a causal language model, or a hub id"
        ) from error


def is_drafter_folder(source: str | Path) -> bool:
    """Whether ``source`` is a folder written by ``save_drafter``."""
    try:
        record = json.loads((Path(source) / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(record, dict) and record.get("format") == BLOCK_FORMAT


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


def _causal_lm(drafter: BlockDrafter, verifier: HFVerifier) -> PreTrainedModel:
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
    model = _untrained(config, drafter.dtype)
    base = base_of(model)
    base.layers.load_state_dict(drafter.stack.layers.state_dict())
    base.norm.load_state_dict(drafter.stack.norm.state_dict())
    for target, source in ((model.get_input_embeddings(), embedding), (model.get_output_embeddings(), head)):
        target.load_state_dict(source.state_dict())
    return model


def _untrained(config: PreTrainedConfig, dtype: torch.dtype) -> Any:
    with torch.random.fork_rng(devices=[]):  # random weights, all overwritten: leave the caller's generator alone
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


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


def _tensor_names(folder: Path) -> list[str]:
    try:
        with safe_open(folder / WEIGHTS_FILE, "pt") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        raise CorruptFileError(
            f"drafter {folder}: {WEIGHTS_FILE}: not a complete safetensors file ({error}); copy the folder again or "
            "save the drafter again"
        ) from error
