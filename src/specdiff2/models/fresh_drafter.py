"""What a fresh block drafter is before any training: which of the verifier's layers, which of its hidden states, and
where the mask embedding starts. It builds no model.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedConfig

from specdiff2.models.block_drafter_config import BlockDrafterConfig, choose_layers
from specdiff2.models.layer_stack import base_of, stack_config
from specdiff2.models.vocab import tokenizer_fingerprint

if TYPE_CHECKING:
    from specdiff2.models.borrowed import BorrowedEmbeddings
    from specdiff2.models.verifier import HFVerifier


def fresh_config(
    verifier: HFVerifier,
    *,
    num_layers: int,
    conditioning: str,
    layer_indices: Sequence[int] | None,
    feature_layers: Sequence[int] | None,
    draft_vocab_ids: Sequence[int] | None,
    **settings: Any,
) -> tuple[BlockDrafterConfig, PreTrainedConfig]:
    """The drafter's configuration and that of its layers; ``settings`` go to ``BlockDrafterConfig`` as they are.

    Raises:
        ConfigError: a value out of range, or a verifier without the usual parts.
    """
    base = base_of(verifier.model)
    depth, conditioned = len(base.layers), conditioning != "none"
    indices = choose_layers(num_layers, depth, layer_indices, last=conditioned)
    if feature_layers is None:
        feature_layers = sorted({depth // 2, depth * 4 // 5, depth}) if conditioned else []
    base_config = stack_config(base.config, indices)
    config = BlockDrafterConfig(
        num_layers=num_layers,
        layer_indices=indices,
        vocab_size=verifier.vocab_size,
        draft_vocab_ids=None if draft_vocab_ids is None else [int(i) for i in draft_vocab_ids],
        verifier_name=verifier.name,
        verifier_fingerprint=verifier.fingerprint,
        tokenizer_fingerprint=tokenizer_fingerprint(verifier.tokenizer),
        base_config=json.loads(base_config.to_json_string(use_diff=False)),
        conditioning=conditioning,
        feature_layers=[int(i) for i in feature_layers],
        **settings,
    )
    return config, base_config


def start_of_masks(
    borrowed: BorrowedEmbeddings, config: BlockDrafterConfig, device: torch.device, dtype: torch.dtype
) -> Float[Tensor, " hidden"]:
    """What the mask embedding starts from: the row of ``mask_token_id``, or the mean row of all real tokens."""
    if config.mask_token_id is None:
        return borrowed.mean_row(config.vocab_size)
    return borrowed.embed(torch.tensor(config.mask_token_id, device=device), dtype)
