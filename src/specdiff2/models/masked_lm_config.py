"""What a drafter made of a whole masked-diffusion language model is, as plain data: read by training, decoding and
the files of adapters alike. Holds no tensor and builds no model.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from specdiff2.functional.unmasking import check_unmasking
from specdiff2.functional.window_masks import ATTENTION_MODES
from specdiff2.models.block_drafter_config import check_count
from specdiff2.types import ConfigError

LORA_KEYS = ("rank", "alpha", "dropout", "targets")


@dataclass(frozen=True, slots=True)
class MaskedLMConfig:
    """Everything needed to rebuild the drafter from its base checkpoint.

    Attributes:
        gamma: drafted positions of a training window (decoding may use fewer, not more).
        family: a name of ``families.FAMILIES``.
        base_name, base_revision, base_fingerprint: the checkpoint it is made of, and a digest of its weights.
        verifier_name, verifier_fingerprint: what it was made or trained for; another verifier with the same tokenizer
            may use it, as drafts never change what a verifier says.
        tokenizer_fingerprint, drafter_tokenizer_fingerprint: the verifier's and the drafter's token -> id maps.
        vocab_size: ids of committed text: the verifier's real tokens, or the drafter's with ``other_tokenizer``.
        shifted: True when the output at position t predicts t+1.
        attention: ``bidirectional`` as published, or ``causal_prefix`` (exact cache; training restores the cost).
        mask_token_id: the id a masked position is shown as.
        denoising_steps, unmasking: passes per draft, and which positions the earlier ones fix first.
        other_tokenizer: drafts are re-tokenised for the verifier (``models.retokenized_session``).
        draft_vocab_ids: the ids that can be drafted; None for all that both tokenizers share and none forbids.
        lora: rank, alpha, dropout and targets of the trained adapter; None: all weights are trained.

    Raises:
        ConfigError: a value is outside its range.
    """

    gamma: int
    family: str
    base_name: str
    base_fingerprint: str
    vocab_size: int
    mask_token_id: int
    shifted: bool
    attention: str = "bidirectional"
    base_revision: str | None = None
    verifier_name: str = ""
    verifier_fingerprint: str = ""
    tokenizer_fingerprint: str = ""
    drafter_tokenizer_fingerprint: str = ""
    denoising_steps: int = 1
    unmasking: str = "confidence"
    other_tokenizer: bool = False
    draft_vocab_ids: list[int] | None = field(default=None, repr=False)
    lora: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in ("gamma", "denoising_steps", "vocab_size"):
            check_count(name, getattr(self, name))
        if self.attention not in ATTENTION_MODES:
            raise ConfigError(f"attention={self.attention!r}: expected one of {', '.join(ATTENTION_MODES)}")
        check_unmasking(self.unmasking)
        if self.lora is not None and set(self.lora) != set(LORA_KEYS):
            raise ConfigError(f"lora={self.lora!r}: expected null or the keys {', '.join(LORA_KEYS)}")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)
