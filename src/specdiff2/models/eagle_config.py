"""What an EAGLE head is, as plain data: read by training, decoding and ``models.pretrained`` alike.

Holds no tensor and builds no model. Validation happens at construction, as for block drafters.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from specdiff2.models.block_drafter_config import check_count, check_draft_vocab
from specdiff2.types import ConfigError


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """Everything needed to rebuild a head around its verifier.

    Attributes:
        gamma: positions that a training window unrolls, and that are drafted unless told otherwise. Decoding may
            use more: the head goes on reading its own predictions.
        num_layers, layer_indices: how many transformer layers, and which of the verifier's they started from (empty
            for a head trained elsewhere).
        vocab_size: the verifier's real tokens; no id at or above it is ever drafted.
        base_config: the transformers configuration of the layers.
        fc_bias: whether the input projection has a bias; published heads differ in that.
        feature_loss_weight: of the regression to the verifier's features, beside the objective.
        draft_vocab_ids: verifier ids that can be drafted; None for all of them.
        verifier_name, verifier_fingerprint, tokenizer_fingerprint: what it was trained for; empty where unknown.

    Raises:
        ConfigError: a value is outside its range.
    """

    conditioning: ClassVar[str] = "verifier_features"  # what is read of the verifier; no prefix loss, no masks
    attention: ClassVar[str] = "causal_prefix"
    shifted: ClassVar[bool] = True
    max_gamma: ClassVar[int | None] = None  # no limit

    gamma: int
    num_layers: int
    layer_indices: list[int]
    vocab_size: int
    base_config: dict[str, Any] = field(repr=False)
    fc_bias: bool = True
    feature_loss_weight: float = 1.0
    draft_vocab_ids: list[int] | None = field(default=None, repr=False)
    verifier_name: str = ""
    verifier_fingerprint: str = ""
    tokenizer_fingerprint: str | None = None

    def __post_init__(self) -> None:
        for name in ("gamma", "num_layers", "vocab_size"):
            check_count(name, getattr(self, name))
        if len(self.layer_indices) not in (0, self.num_layers):
            raise ConfigError(f"layer_indices={self.layer_indices!r}: expected {self.num_layers} (num_layers) indices")
        weight = self.feature_loss_weight
        if isinstance(weight, bool) or not (math.isfinite(weight) and weight >= 0.0):
            raise ConfigError(f"feature_loss_weight={weight!r}: expected a finite number >= 0; 0 leaves it out")
        if self.draft_vocab_ids is not None:
            check_draft_vocab(self.draft_vocab_ids, self.vocab_size)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
