"""What a block drafter is, as plain data: read by training, decoding and ``models.pretrained`` alike.

Holds no tensor and builds no model. Validation happens at construction, so a wrong value in a YAML or in a saved
``config.json`` is refused before anything heavy is loaded.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from specdiff2.functional.window_masks import ATTENTION_MODES
from specdiff2.types import ConfigError

CONDITIONINGS = ("none", "verifier_kv")


@dataclass(frozen=True, slots=True)
class BlockDrafterConfig:
    """Everything needed to rebuild a drafter around its verifier.

    Attributes:
        gamma: drafted positions of a training window (decoding may use fewer, not more).
        num_layers, layer_indices: how many transformer layers, and which of the verifier's they start from.
        attention: ``causal_prefix`` (exact KV cache) or ``bidirectional`` (re-reads its prefix every round).
        shifted: True when the output at position t predicts t+1.
        denoising_steps: forward passes per draft; all but the last reveal the most confident positions.
        vocab_size: the verifier's real tokens; no id at or above it is ever drafted.
        draft_vocab_ids: verifier ids that can be drafted; None for all of them.
        mask_token_id: embedding row the mask embedding starts from; None for the mean row. Never drafted.
        verifier_name, verifier_fingerprint, tokenizer_fingerprint: what it was trained for.
        base_config: the transformers configuration of the layers.
        conditioning: ``none``: the drafter reads token embeddings and keeps a prefix of its own; ``verifier_kv``: its
            layers read the verifier's keys and values of the committed tokens (of the layers they start from), its
            input is made from hidden states of the verifier (``models.context_input``).
        feature_layers: the hidden states the input is made from (0: embeddings, L: after the final norm).
        markov_rank: size of the bias from the previous token (``models.markov_head``); 0 leaves it out.

    Raises:
        ConfigError: a value is outside its range.
    """

    gamma: int
    num_layers: int
    layer_indices: list[int]
    vocab_size: int
    base_config: dict[str, Any] = field(repr=False)
    attention: str = "causal_prefix"
    shifted: bool = False
    denoising_steps: int = 1
    draft_vocab_ids: list[int] | None = field(default=None, repr=False)
    mask_token_id: int | None = None
    verifier_name: str = ""
    verifier_fingerprint: str = ""
    tokenizer_fingerprint: str | None = None
    conditioning: str = "none"
    feature_layers: list[int] = field(default_factory=list)
    markov_rank: int = 0

    def __post_init__(self) -> None:
        for name in ("gamma", "num_layers", "denoising_steps", "vocab_size"):
            check_count(name, getattr(self, name))
        if self.attention not in ATTENTION_MODES:
            raise ConfigError(f"attention={self.attention!r}: expected one of {', '.join(ATTENTION_MODES)}")
        if not isinstance(self.shifted, bool):
            raise ConfigError(f"shifted={self.shifted!r}: expected true or false")
        if len(self.layer_indices) != self.num_layers:
            raise ConfigError(f"layer_indices={self.layer_indices!r}: expected {self.num_layers} (num_layers) indices")
        _check_conditioning(self)
        if self.draft_vocab_ids is not None:
            check_draft_vocab(self.draft_vocab_ids, self.vocab_size)
        if self.mask_token_id is not None and self.mask_token_id in (self.draft_vocab_ids or ()):
            raise ConfigError(f"mask_token_id={self.mask_token_id}: expected an id that is not in draft_vocab_ids")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def _check_conditioning(config: BlockDrafterConfig) -> None:
    rank = config.markov_rank
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
        raise ConfigError(f"markov_rank={rank!r}: expected an integer >= 0; 0 leaves the Markov head out")
    check_conditioning(config.conditioning, config.shifted, config.attention)
    if config.conditioning == "none":
        if config.feature_layers:
            raise ConfigError(f"feature_layers={config.feature_layers} with conditioning=none: expected an empty list")
        return
    bad = [i for i in config.feature_layers if isinstance(i, bool) or not isinstance(i, int) or i < 0]
    if bad or not config.feature_layers:
        raise ConfigError(f"feature_layers={config.feature_layers!r}: expected at least one layer index >= 0")


def check_conditioning(conditioning: str, shifted: bool, attention: str) -> None:
    """The three settings go together; needs no model.

    Raises:
        ConfigError: unknown conditioning, or the verifier's keys and values read in another layout than theirs.
    """
    if conditioning not in CONDITIONINGS:
        raise ConfigError(f"conditioning={conditioning!r}: expected one of {', '.join(CONDITIONINGS)}")
    if conditioning != "none" and (not shifted or attention != "causal_prefix"):
        raise ConfigError(
            f"conditioning={conditioning} with shifted={shifted}, attention={attention!r}: expected shifted=true and "
            "attention=causal_prefix, which the verifier's keys and values are; or choose conditioning=none "
            "(model=smollm2_prefix)"
        )


def check_count(name: str, value: Any) -> None:
    """``value`` is an integer >= 1 (a bool is not one).

    Raises:
        ConfigError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}={value!r}: expected an integer >= 1")


def check_mask_token_id(
    mask_token_id: int | None, *, pad_token_id: int | None, eos_ids: Collection[int], num_embeddings: int
) -> None:
    """A mask id must name an embedding row that means nothing else; None (a trained embedding alone) is fine.

    Raises:
        ConfigError: negative, beyond the embedding, or equal to the padding id or an EOS id.
    """
    if mask_token_id is None:
        return
    remedy = "use the id the model was trained with, or null to train a mask embedding from the mean row"
    if isinstance(mask_token_id, bool) or not isinstance(mask_token_id, int):
        raise ConfigError(f"mask_token_id={mask_token_id!r}: expected an integer or null; {remedy}")
    if not 0 <= mask_token_id < num_embeddings:
        raise ConfigError(
            f"mask_token_id={mask_token_id}: expected 0..{num_embeddings - 1}, a row of the embedding; {remedy}"
        )
    for name, ids in (("pad_token_id", [pad_token_id]), ("eos_token_id", eos_ids)):
        if mask_token_id in ids:
            raise ConfigError(
                f"mask_token_id={mask_token_id}: equal to {name}, so masks could not be told apart; {remedy}"
            )


def evenly_spaced(num_layers: int, num_available: int) -> list[int]:
    """``num_layers`` of ``num_available`` layer indices, first and last included (one layer: the last).

    Raises:
        ConfigError: more layers asked for than there are.
    """
    check_count("num_layers", num_layers)
    if num_layers > num_available:
        raise ConfigError(f"num_layers={num_layers}: the verifier has {num_available} layers; use at most that many")
    if num_layers == 1:
        return [num_available - 1]
    return [(2 * i * (num_available - 1) + num_layers - 1) // (2 * (num_layers - 1)) for i in range(num_layers)]


def choose_layers(num_layers: int, num_available: int, given: Sequence[int] | None, *, last: bool) -> list[int]:
    """The verifier layers to start from: ``given``, else the last ``num_layers``, else evenly spaced ones.

    Raises:
        ConfigError: more layers than there are, or given indices that are not ``num_layers`` increasing ones.
    """
    if given is not None:
        indices = [int(i) for i in given]
        inside = all(0 <= i < num_available for i in indices)
        if len(indices) != num_layers or not inside or sorted(set(indices)) != indices:
            raise ConfigError(
                f"layer_indices={indices}: expected {num_layers} (num_layers) increasing indices in "
                f"0..{num_available - 1}, layers of the verifier"
            )
        return indices
    evenly = evenly_spaced(num_layers, num_available)
    return list(range(num_available - num_layers, num_available)) if last else evenly


def check_draft_vocab(ids: Sequence[int], vocab_size: int) -> None:
    """Raises ConfigError: no id, one outside the vocabulary, or one twice."""
    if not ids:
        raise ConfigError("draft_vocab_ids is empty: expected at least one id; use null to draft from every token")
    outside = [i for i in ids if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < vocab_size]
    if outside:
        raise ConfigError(
            f"draft_vocab_ids holds {outside[0]!r}: expected integers in 0..{vocab_size - 1}, the verifier's real "
            "tokens; was it collected with another verifier?"
        )
    if len(set(ids)) != len(ids):
        seen: set[int] = set()
        twice = next(i for i in ids if i in seen or seen.add(i))  # type: ignore[func-returns-value]
        raise ConfigError(f"draft_vocab_ids holds {twice} twice: expected distinct ids")
