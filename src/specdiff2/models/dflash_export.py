"""A trained block drafter in the layout of DFlash drafters, which vLLM, SGLang and vLLM's speculators library read.

What a DFlash drafter computes (arXiv 2602.06036; read in z-lab/dflash dflash/model.py, vllm-project/speculators
src/speculators/models/dflash/, and vllm/model_executor/models/qwen3_dflash.py):

* context: hidden states of some verifier layers at every token before the anchor, concatenated, ``hidden_norm(fc(.))``;
  every layer makes keys and values of it with its own ``k_proj``, ``k_norm``, ``v_proj`` ("KV injection");
* block: the embeddings of the anchor and of ``block_size - 1`` mask tokens at the positions from the anchor on; all of
  them see the context and each other; layers are Qwen3's, with norms on queries and keys;
* row j of the block predicts its own position anchor + j (row 0 is unused); embedding and head are the verifier's.

Ours computes the prefix from token embeddings instead. In ONE layer that is the same function: a prefix token's key and
value depend on its embedding alone, so with the verifier's hidden state 0 (its embeddings, layer id -1) as the only
feature, ``fc`` the identity and ``hidden_norm`` the layer's input norm, both agree for a window that is not shifted:

    ours                                   DFlash
    stack.layers.0.*                       layers.0.*
    stack.layers.0.input_layernorm.weight  also hidden_norm.weight
    stack.norm.weight                      norm.weight
    (none)                                 fc.weight, the identity
    mask_embedding                         mask_embedding.pt (vLLM) for mask_token_id
    gamma                                  block_size - 1
    draft_vocab_ids                        d2t, t2d and the cut lm_head.weight; layout speculators only

Only vLLM reads mask_embedding.pt: z-lab's code and SGLang look masks up in the
verifier's embedding, where ours is not, and would draft worse, never wrongly. No engine has run these files here.

``dflash_differences`` names what has no place there. Knows no decoding; ``tests/unit/test_dflash_export.py`` reads the
exported tensors the public way and gets equal logits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from specdiff2.models.block_drafter_config import BlockDrafterConfig
from specdiff2.models.safe_folder import replace_folder, require_empty
from specdiff2.types import ConfigError

if TYPE_CHECKING:
    from specdiff2.models.block_drafter import BlockDrafter
    from specdiff2.models.verifier import HFVerifier

DFLASH_LAYOUTS = ("dflash", "speculators")
EMBEDDINGS = -1  # layer id whose output is hidden state 0; speculators and vLLM's eagle keys count one more
REMEDY = (
    "a drafter that agrees: `python train.py verifier=qwen3_4b model=smollm2_prefix model.num_layers=1 "
    "model.shifted=false`; engines also serve --layout eagle (EAGLE heads) and --layout causal (model.gamma=1)"
)


def dflash_differences(config: BlockDrafterConfig, layout: str) -> list[str]:
    """What this drafter computes and a DFlash drafter cannot; empty where they agree."""
    found = []
    model_type = config.base_config.get("model_type")
    if config.conditioning != "none":
        found.append(
            f"conditioning={config.conditioning} (its layers read the verifier's own keys and values, its inputs are "
            "made from hidden states; DFlash projects keys and values from hidden states and feeds embeddings)"
        )
    elif config.num_layers > 1:
        found.append(
            f"num_layers={config.num_layers} (from the second layer on, its prefix is what its own layers computed; "
            "DFlash computes no prefix, so one layer alone agrees)"
        )
    if config.shifted:
        found.append("shifted=true (a position is read from the row before it; a DFlash row predicts its own position)")
    if config.denoising_steps > 1:
        found.append(f"denoising_steps={config.denoising_steps} (DFlash drafts in one pass)")
    if config.markov_rank:
        found.append(f"markov_rank={config.markov_rank} (DFlash draws positions independently)")
    if model_type != "qwen3":
        found.append(f"layers of {model_type!r} (DFlash layers are Qwen3's, with norms on queries and keys)")
    if layout == "dflash" and config.draft_vocab_ids is not None:
        found.append("a draft vocabulary (only --layout speculators has a place for it)")
    return found


def refuse_unlike_dflash(config: Any, layout: str, label: str) -> None:
    """Raises ConfigError naming every difference, for a drafter that cannot be written in this layout."""
    is_block = isinstance(config, BlockDrafterConfig)
    found = dflash_differences(config, layout) if is_block else [f"{type(config).__name__} instead of a block drafter"]
    if found:
        raise ConfigError(f"{label} is no DFlash drafter (--layout {layout}): {'; '.join(found)}; {REMEDY}")


@torch.no_grad()
def export_dflash(drafter: BlockDrafter, verifier: HFVerifier, folder: str | Path, layout: str) -> Path:
    """Write ``folder`` (config.json, model.safetensors, mask_embedding.pt) in the drafter's dtype; its absolute path.

    Raises:
        ConfigError: ``folder`` is not empty, the drafter computes something else (``dflash_differences``), or the
            verifier's embedding has no row to call masks by.
        SpecDiffError: writing failed; nothing is left behind.
    """
    folder = Path(folder).absolute()
    require_empty(folder)
    refuse_unlike_dflash(drafter.config, layout, "the drafter")
    mask_id = _mask_token_id(drafter)
    ids = drafter.draft_vocab_ids.sort().values.cpu()
    tensors = _tensors(drafter)
    if layout == "speculators":
        tensors |= _vocabulary(drafter, ids)
        record = _speculators_record(drafter, verifier, mask_id, len(ids))
    else:
        record = _dflash_record(drafter, verifier, mask_id)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    assert drafter.mask_embedding is not None  # conditioning=none
    mask = {"embedding": drafter.mask_embedding.detach().cpu().clone(), "mask_token_id": mask_id}

    def write(new: Path) -> None:
        save_file(tensors, new / "model.safetensors", metadata={"format": "pt"})
        torch.save(mask, new / "mask_embedding.pt")
        (new / "config.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")

    return replace_folder(folder, write, "DFlash drafter")


def _tensors(drafter: BlockDrafter) -> dict[str, Tensor]:
    state = {n.removeprefix("stack."): t for n, t in drafter.state_dict().items() if n.startswith("stack.")}
    norm = state["layers.0.input_layernorm.weight"]
    return {**state, "hidden_norm.weight": norm.clone(), "fc.weight": torch.eye(len(norm), dtype=norm.dtype)}


def _vocabulary(drafter: BlockDrafter, ids: Tensor) -> dict[str, Tensor]:
    """The head's rows of the draft vocabulary, ascending; offsets to verifier ids and membership where it is a part."""
    order = drafter.draft_vocab_ids.argsort()
    found = {"lm_head.weight": drafter.embeddings.rows(drafter.dtype, drafter.device)[0][order]}
    if len(ids) < drafter.embeddings.num_rows:
        member = torch.zeros(drafter.embeddings.num_rows, dtype=torch.bool)
        member[ids] = True
        found |= {"d2t": ids - torch.arange(len(ids)), "t2d": member}
    return found


def _mask_token_id(drafter: BlockDrafter) -> int:
    """The row that engines look masks up by: the drafter's own, or the first padded row, which is no token."""
    config, rows = drafter.config, drafter.embeddings.num_rows
    if config.mask_token_id is not None:
        return config.mask_token_id
    if config.vocab_size == rows:
        raise ConfigError(
            f"mask_token_id=null and all {rows} rows of the verifier's embedding are tokens: no id is left for masks; "
            "train with model.mask_token_id set to a token that is never drafted"
        )
    return config.vocab_size


def _layers_record(drafter: BlockDrafter) -> dict[str, Any]:
    """The layers' configuration with the verifier's vocabulary, in the words of transformers 4 and 5."""
    base = {k: v for k, v in drafter.config.base_config.items() if not k.startswith("_") and k != "architectures"}
    theta = (base.get("rope_parameters") or {}).get("rope_theta", base.get("rope_theta"))
    dtype = str(drafter.dtype).removeprefix("torch.")
    return {**base, "rope_theta": theta, "vocab_size": drafter.embeddings.num_rows, "dtype": dtype}


def _dflash_record(drafter: BlockDrafter, verifier: HFVerifier, mask_id: int) -> dict[str, Any]:
    return {
        **_layers_record(drafter),
        "architectures": ["DFlashDraftModel"],
        "block_size": drafter.gamma + 1,
        "dflash_config": {"mask_token_id": mask_id, "target_layer_ids": [EMBEDDINGS]},
        "num_target_layers": verifier.config.num_hidden_layers,
    }


def _speculators_record(drafter: BlockDrafter, verifier: HFVerifier, mask_id: int, draft_vocab: int) -> dict[str, Any]:
    """``aux_hidden_state_layer_ids`` counts hidden states, so 0 is the embedding. ``sliding_window_non_causal``: vLLM
    (transformers_utils/configs/speculators/algos.py) makes every layer causal where it is false."""
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": drafter.gamma}],
            "verifier": {
                "name_or_path": verifier.name,
                "architectures": getattr(verifier.config, "architectures", None) or [type(verifier.model).__name__],
            },
        },
        "transformer_layer_config": _layers_record(drafter),
        "draft_vocab_size": draft_vocab,
        "block_size": drafter.gamma + 1,
        "aux_hidden_state_layer_ids": [EMBEDDINGS + 1],
        "mask_token_id": mask_id,
        "sample_from_anchor": False,
        "sliding_window_non_causal": True,
    }
