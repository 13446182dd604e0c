"""The drafter that ``conf/model/diffucoder.yaml`` and its neighbours describe: one call from a source to a drafter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specdiff2.models.family_loading import load_family_model
from specdiff2.models.masked_lm_drafter import MaskedLMDrafter
from specdiff2.models.packed_linear import pack_linears

if TYPE_CHECKING:
    from specdiff2.models.verifier import HFVerifier


def masked_lm_drafter(
    verifier: HFVerifier,
    *,
    source: str,
    revision: str | None = None,
    family: str | None = None,
    gamma: int = 16,
    attention: str | None = None,
    denoising_steps: int = 1,
    unmasking: str = "confidence",
    lora: Mapping[str, Any] | None = None,
    dtype: str = "auto",
    attn_implementation: str = "sdpa",
    gradient_checkpointing: bool = False,
    draft_vocab_ids: Sequence[int] | None = None,
    trainable: bool = True,
) -> MaskedLMDrafter:
    """The published checkpoint ``source`` as a drafter for ``verifier``.

    Args:
        source, revision: hub id (and commit, tag or branch) or local folder.
        family: see ``families.FAMILIES``; None tells it from config.json.
        gamma, attention, denoising_steps, unmasking, draft_vocab_ids: see ``MaskedLMConfig``.
        lora: rank, alpha, dropout and targets of an adapter to train; None trains all weights.
        dtype: of the weights; ``auto`` as for verifiers, but float32 where all weights are trained.
        trainable: False for decoding: no adapter, on the verifier's device, packed on CPUs that can.

    Raises:
        ConfigError: the checkpoint is missing (names the command that fetches it) or a value is out of range.
        CorruptFileError, MismatchError: its files are damaged, or its tensors are not those of the family.
    """
    if trainable and lora is None and dtype == "auto":
        dtype = "float32"  # small steps on bfloat16 weights are rounded away
    base = load_family_model(
        source, revision=revision, family=family, dtype=dtype, attn_implementation=attn_implementation
    )
    drafter = MaskedLMDrafter.from_base(
        base, verifier, gamma=gamma, attention=attention, denoising_steps=denoising_steps, unmasking=unmasking,
        lora=lora, draft_vocab_ids=draft_vocab_ids, trainable=trainable,
        gradient_checkpointing=gradient_checkpointing and trainable,
    )  # fmt: skip
    if not trainable:
        drafter.to(verifier.device).eval()
        pack_linears(drafter)
    return drafter
