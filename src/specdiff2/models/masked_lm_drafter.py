"""A drafter made of a whole masked-diffusion language model: DiffuCoder, Dream, DiffuLLaMA, LLaDA and their like.

The window after the committed text is shown as ``gamma`` mask tokens, and the model's own head says what stands there.
``attention="bidirectional"`` is the model as published; ``causal_prefix`` keeps an exact cache of the prefix, for
which it was not trained, and training (LoRA or all weights) restores what that costs. Loading a family's files is
``models.family_loading``, adapters on disk are ``models.masked_lm_files``.

Vocabularies are never resized: ids that both tokenizers share can be drafted, a committed id that the drafter does
not know is shown as another one. With another tokenizer the drafter works in its own ids, and its sessions translate
(``models.retokenized_session``). It knows nothing of losses, of acceptance or of files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specdiff2.models.block_drafter_config import check_mask_token_id
from specdiff2.models.block_drafter_session import BlockDrafterSession
from specdiff2.models.drafter_batch import BlockDrafterBatch
from specdiff2.models.families import FamilyModel
from specdiff2.models.layer_stack import base_of
from specdiff2.models.lora import add_lora
from specdiff2.models.masked_lm_config import MaskedLMConfig
from specdiff2.models.own_embeddings import OwnEmbeddings
from specdiff2.models.retokenized_session import RetokenizedSession
from specdiff2.models.tokenizer_bridge import TokenizerBridge
from specdiff2.models.vocab import real_vocab_size, same_tokenizer, shared_ids, tokenizer_fingerprint
from specdiff2.models.window_drafter import WindowDrafter
from specdiff2.types import ConfigError, SamplingParams

if TYPE_CHECKING:
    from specdiff2.models.verifier import HFVerifier


class MaskedLMDrafter(WindowDrafter):
    """See ``protocols.Drafter`` and ``protocols.StatesDrafter``.

    Args:
        config: what it is; see ``from_base`` for a fresh one.
        base: the checkpoint it is made of; its model becomes this module's (and is changed by ``lora``).
        verifier: whose text it continues. Only its tokenizer and vocabulary are read; nothing of it is kept.
        trainable: inject the adapter of ``config.lora`` (or train all weights where that is None); False freezes all.
        gradient_checkpointing: compute the layers' inner values again in the backward pass.

    Raises:
        ConfigError: a mask id that means something else, or no token that both tokenizers share.
        MismatchError: two tokenizers that nearly agree (``vocab.same_tokenizer``).
    """

    whole_window = True  # the authors mask every position that is to be filled

    def __init__(
        self,
        config: MaskedLMConfig,
        base: FamilyModel,
        verifier: HFVerifier,
        *,
        trainable: bool = True,
        gradient_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.base, self.model = config, base, base.model
        self.markov = None
        self.unmasking = config.unmasking
        self._verifier_vocab_size = verifier.vocab_size
        self.bridge: TokenizerBridge | None = None
        if config.other_tokenizer:
            self.bridge = TokenizerBridge(
                base.tokenizer, verifier.tokenizer, drafter_vocab_size=config.vocab_size,
                verifier_vocab_size=verifier.vocab_size,
            )  # fmt: skip
        embedding = self.model.get_input_embeddings()
        check_mask_token_id(
            config.mask_token_id,
            pad_token_id=None,  # some families pad with their mask, which nothing here does
            eos_ids=[] if base.tokenizer.eos_token_id is None else [base.tokenizer.eos_token_id],
            num_embeddings=embedding.weight.shape[0],
        )
        ids, shown = _vocabulary(config, base, verifier)
        if config.draft_vocab_ids is not None:
            wanted = set(config.draft_vocab_ids)
            ids = [i for i in ids if i in wanted]
        if not ids:
            raise ConfigError(
                f"drafter {base.name}: no token can be drafted for verifier {verifier.name}; set draft_vocab_size=null"
            )
        self._register_vocab(torch.tensor(ids))
        self.embeddings = OwnEmbeddings(self.model, self.draft_vocab_ids, shown)
        self._keep_exact_buffers()
        self.model.requires_grad_(trainable and config.lora is None)
        if trainable and config.lora is not None:
            add_lora(self.model, **config.lora)
        if gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.train(trainable)  # loaded models are in eval mode, which would switch the adapter's dropout off

    @classmethod
    def from_base(
        cls,
        base: FamilyModel,
        verifier: HFVerifier,
        *,
        gamma: int = 16,
        attention: str | None = None,
        denoising_steps: int = 1,
        unmasking: str = "confidence",
        lora: Mapping[str, Any] | None = None,
        draft_vocab_ids: Sequence[int] | None = None,
        trainable: bool = True,
        gradient_checkpointing: bool = False,
    ) -> MaskedLMDrafter:
        """The published checkpoint as a drafter; ``attention`` None means the family's own.

        Raises:
            ConfigError, MismatchError: a value out of range; see the class.
        """
        _check_tokenizers(base, verifier)
        other = not same_tokenizer(verifier.tokenizer, base.tokenizer)
        if other and draft_vocab_ids is not None:
            raise ConfigError(
                f"draft_vocab_ids for drafter {base.name}: they are the verifier's ids, but it has a tokenizer of "
                "its own; set data.draft_vocab_size=null"
            )
        config = MaskedLMConfig(
            gamma=gamma,
            family=base.family.name,
            base_name=base.name,
            base_revision=base.revision,
            base_fingerprint=base.fingerprint,
            verifier_name=verifier.name,
            verifier_fingerprint=verifier.fingerprint,
            tokenizer_fingerprint=tokenizer_fingerprint(verifier.tokenizer),
            drafter_tokenizer_fingerprint=tokenizer_fingerprint(base.tokenizer),
            vocab_size=real_vocab_size(base.model, base.tokenizer) if other else verifier.vocab_size,
            shifted=base.family.shifted,
            attention=attention or base.family.attention,
            mask_token_id=base.mask_token_id,
            denoising_steps=denoising_steps,
            unmasking=unmasking,
            other_tokenizer=other,
            draft_vocab_ids=None if draft_vocab_ids is None else [int(i) for i in draft_vocab_ids],
            lora=None if lora is None else dict(lora),
        )
        return cls(config, base, verifier, trainable=trainable, gradient_checkpointing=gradient_checkpointing)

    @property
    def stack(self) -> Any:
        """The decoder layers; a property, as a second registration would list every weight twice."""
        return base_of(self.model)

    @property
    def verifier_vocab_size(self) -> int:
        return self._verifier_vocab_size

    @property
    def mask_embedding(self) -> Tensor:
        return self.model.get_input_embeddings().weight[self.config.mask_token_id]

    def start(
        self, prompt: Sequence[int], sampling: SamplingParams, max_new_tokens: int
    ) -> BlockDrafterSession | RetokenizedSession:
        """Read the prompt (the verifier's ids) and be ready to draft.

        Raises:
            ConfigError: empty prompt, or an id outside the verifier's vocabulary.
        """
        self.check_prompt(prompt)
        if self.bridge is None:
            return BlockDrafterSession(self, prompt, sampling, max_new_tokens)
        text = self.bridge.start(prompt)
        return RetokenizedSession(BlockDrafterSession(self, text.drafter_ids, sampling, max_new_tokens), text)

    def start_batch(
        self, num_rows: int, prompts: Sequence[Sequence[int]], max_new_tokens: int
    ) -> BlockDrafterBatch | None:
        """See ``protocols.DrafterBatch``; None for a bidirectional drafter and for one with another tokenizer."""
        if self.bridge is None and self.config.attention == "causal_prefix":
            return BlockDrafterBatch(self, num_rows, prompts, max_new_tokens)
        return None


def _vocabulary(config: MaskedLMConfig, base: FamilyModel, verifier: HFVerifier) -> tuple[list[int], list[int]]:
    """(ids that can be drafted, by committed id the id that is shown for it)."""
    known, rows = base.tokenizer, int(base.model.get_input_embeddings().weight.shape[0])
    forbidden = base.forbidden_ids | {config.mask_token_id}
    replacement = known.eos_token_id if known.eos_token_id is not None else 0
    if not config.other_tokenizer:
        return shared_ids(
            verifier.tokenizer, verifier.vocab_size, known, rows, forbidden,
            mask_token_id=config.mask_token_id, replacement_id=replacement,
        )  # fmt: skip
    shown = [replacement if i == config.mask_token_id else i for i in range(config.vocab_size)]
    return [i for i in range(config.vocab_size) if i not in forbidden], shown


def _check_tokenizers(base: FamilyModel, verifier: HFVerifier) -> None:
    for name, tokenizer in ((base.name, base.tokenizer), (verifier.name, verifier.tokenizer)):
        if tokenizer is None:
            raise ConfigError(
                f"{name}: no tokenizer; expected one, to compare token ids: put its files into the model's folder"
            )
