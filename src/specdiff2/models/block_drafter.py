"""A masked-diffusion drafter made of some of the verifier's own layers.

It fills a window of ``gamma`` masked positions in one pass. Trained are N transformer layers (started from evenly
spaced layers of the verifier), their final norm and one mask embedding; the embedding and the head are the
verifier's, frozen and borrowed (``models.borrowed``). With ``conditioning="verifier_kv"`` the layers read the
verifier's own keys and values of the prefix instead of computing some (``models.verifier_context``), and a Markov
head may let a position depend on the token before it (``models.markov_head``). ``forward`` scores every window of a
training batch in one packed pass; ``start`` opens a decoding session that computes the very same function with a KV
cache (``models.block_drafter_session``).

It knows nothing of losses, of acceptance or of files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedConfig

from specdiff2.models.block_drafter_config import BlockDrafterConfig, check_mask_token_id
from specdiff2.models.block_drafter_session import BlockDrafterSession
from specdiff2.models.borrowed import BorrowedEmbeddings
from specdiff2.models.context_drafter_session import ContextDrafterSession
from specdiff2.models.context_forward import context_states
from specdiff2.models.context_input import ContextInput
from specdiff2.models.drafter_batch import BlockDrafterBatch, ContextDrafterBatch
from specdiff2.models.fresh_drafter import fresh_config, start_of_masks
from specdiff2.models.layer_stack import base_of, build_stack, copy_layers
from specdiff2.models.markov_head import MarkovHead
from specdiff2.models.verifier_context import ContextSource, context_shape
from specdiff2.models.window_drafter import WindowDrafter
from specdiff2.types import ConfigError, SamplingParams, WindowBatch

if TYPE_CHECKING:
    from specdiff2.models.verifier import HFVerifier
    from specdiff2.models.verifier_session import HFVerifierSession


class BlockDrafter(WindowDrafter):
    """See ``protocols.Drafter`` and ``protocols.TrainableDrafter``.

    Built by ``from_verifier`` (fresh) or ``models.pretrained.load_drafter`` (trained); the constructor leaves the
    layers untrained.
    """

    def __init__(
        self,
        config: BlockDrafterConfig,
        verifier: HFVerifier,
        base_config: PreTrainedConfig,
        *,
        dtype: torch.dtype = torch.float32,
        gradient_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        ids = config.draft_vocab_ids
        if ids is None:
            ids = [i for i in range(config.vocab_size) if i != config.mask_token_id]
        self._register_vocab(torch.tensor(ids))
        self.embeddings = BorrowedEmbeddings(verifier.model, self.draft_vocab_ids)
        check_mask_token_id(
            config.mask_token_id,
            pad_token_id=getattr(verifier.model.config, "pad_token_id", None),
            eos_ids=verifier.eos_ids,
            num_embeddings=self.embeddings.num_rows,
        )
        # "eager" when the verifier runs so; every other implementation cannot take an additive 4D mask
        attn = "eager" if verifier.model.config._attn_implementation == "eager" else "sdpa"
        self.stack = build_stack(base_config, attn)
        if gradient_checkpointing:
            self.stack.gradient_checkpointing_enable({"use_reentrant": False})
        self._build_parts(verifier, base_config.hidden_size)
        self._keep_exact_buffers()
        self.to(device=verifier.device, dtype=dtype)

    def _build_parts(self, verifier: HFVerifier, hidden_size: int) -> None:
        """What stands before and behind the layers."""
        config = self.config
        self.mask_embedding = None
        self.context_input: ContextInput | None = None
        self.context: ContextSource | None = None
        self.markov = None
        if config.conditioning == "none":
            self.mask_embedding = nn.Parameter(torch.zeros(hidden_size))
        else:
            depth = verifier.config.num_hidden_layers
            if max(config.feature_layers) > depth:
                raise ConfigError(
                    f"feature_layers={config.feature_layers}: the verifier has hidden states 0..{depth}; use those"
                )
            self.context = ContextSource(verifier, context_shape(verifier, config.layer_indices, config.feature_layers))
            self.context_input = ContextInput(hidden_size, len(config.feature_layers), config.gamma)
            verifier.output_features = True
        if config.markov_rank:
            self.markov = MarkovHead(config.markov_rank, hidden_size, len(self.draft_vocab_ids))

    @classmethod
    def from_verifier(
        cls,
        verifier: HFVerifier,
        *,
        num_layers: int = 4,
        gamma: int = 8,
        attention: str = "causal_prefix",
        shifted: bool = False,
        denoising_steps: int = 1,
        draft_vocab_ids: Sequence[int] | None = None,
        mask_token_id: int | None = None,
        conditioning: str = "none",
        layer_indices: Sequence[int] | None = None,
        feature_layers: Sequence[int] | None = None,
        markov_rank: int = 0,
        dtype: torch.dtype = torch.float32,
        gradient_checkpointing: bool = False,
    ) -> BlockDrafter:
        """A fresh drafter whose layers are copies of the verifier's.

        ``layer_indices`` None: evenly spaced, or the last ones where they read the verifier's keys and values (their
        input is then regressed by ``models.projection_fit``). ``feature_layers`` None: the hidden states at half and
        four fifths of the depth, and the last.

        Raises:
            ConfigError: a value out of range, or a verifier without the usual parts.
        """
        config, base = fresh_config(
            verifier, num_layers=num_layers, gamma=gamma, attention=attention, shifted=shifted,
            denoising_steps=denoising_steps, draft_vocab_ids=draft_vocab_ids, mask_token_id=mask_token_id,
            conditioning=conditioning, layer_indices=layer_indices, feature_layers=feature_layers,
            markov_rank=markov_rank,
        )  # fmt: skip
        drafter = cls(config, verifier, base, dtype=dtype, gradient_checkpointing=gradient_checkpointing)
        copy_layers(base_of(verifier.model), drafter.stack, config.layer_indices)
        if drafter.mask_embedding is not None:
            with torch.no_grad():
                drafter.mask_embedding.copy_(start_of_masks(drafter.embeddings, config, drafter.device, dtype))
        return drafter

    def window_states(self, batch: WindowBatch) -> Float[Tensor, "window gamma hidden"]:
        return super().window_states(batch) if self.context is None else context_states(self, batch)

    @property
    def needs_verifier_session(self) -> bool:
        """True when ``start`` must be given the verifier's session of the same prompt."""
        return self.context is not None

    def start(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        max_new_tokens: int,
        verifier_session: HFVerifierSession | None = None,
    ) -> BlockDrafterSession | ContextDrafterSession:
        """Read the prompt and be ready to draft.

        Raises:
            ConfigError: empty prompt, an id outside the verifier's vocabulary, or no verifier session for a
                conditioned drafter.
            MismatchError: the session is another verifier's.
        """
        self.check_prompt(prompt)
        if self.context is not None:
            return ContextDrafterSession(self, prompt, sampling, verifier_session)
        return BlockDrafterSession(self, prompt, sampling, max_new_tokens)

    def start_batch(
        self, num_rows: int, prompts: Sequence[Sequence[int]], max_new_tokens: int
    ) -> BlockDrafterBatch | ContextDrafterBatch | None:
        """See ``protocols.DrafterBatch``; None for a bidirectional drafter, which reads each prefix anew."""
        if self.context is not None:
            return ContextDrafterBatch(self)
        if self.config.attention == "causal_prefix":
            return BlockDrafterBatch(self, num_rows, prompts, max_new_tokens)
        return None
