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

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedConfig

from specdiff2.functional.previous_tokens import previous_tokens
from specdiff2.functional.window_masks import prefix_rows
from specdiff2.models.block_drafter_config import BlockDrafterConfig, check_mask_token_id
from specdiff2.models.block_drafter_session import BlockDrafterSession
from specdiff2.models.borrowed import BorrowedEmbeddings
from specdiff2.models.context_drafter_session import ContextDrafterSession
from specdiff2.models.context_forward import context_states
from specdiff2.models.context_input import ContextInput
from specdiff2.models.fresh_drafter import fresh_config, start_of_masks
from specdiff2.models.layer_stack import base_of, build_stack, copy_layers
from specdiff2.models.markov_head import MarkovHead
from specdiff2.models.packed_forward import layout_of, packed_states
from specdiff2.models.verifier_context import ContextSource, context_shape
from specdiff2.types import ConfigError, SamplingParams, WindowBatch

if TYPE_CHECKING:
    from specdiff2.models.verifier import HFVerifier
    from specdiff2.models.verifier_session import HFVerifierSession


class BlockDrafter(nn.Module):
    """See ``protocols.Drafter`` and ``protocols.TrainableDrafter``.

    Built by ``from_verifier`` (fresh) or ``models.pretrained.load_drafter`` (trained); the constructor leaves the
    layers untrained.
    """

    draft_vocab_ids: Int[Tensor, " draft_vocab"]
    _draft_index: Int[Tensor, " vocab"]

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
        self.gamma = config.gamma
        self.vocab_size = config.vocab_size
        ids = config.draft_vocab_ids
        if ids is None:
            ids = [i for i in range(config.vocab_size) if i != config.mask_token_id]
        self._register_vocab(torch.tensor(ids))
        self.borrowed = BorrowedEmbeddings(verifier.model, self.draft_vocab_ids)
        check_mask_token_id(
            config.mask_token_id,
            pad_token_id=getattr(verifier.model.config, "pad_token_id", None),
            eos_ids=verifier.eos_ids,
            num_embeddings=self.borrowed.num_rows,
        )
        # "eager" when the verifier runs so; every other implementation cannot take an additive 4D mask
        attn = "eager" if verifier.model.config._attn_implementation == "eager" else "sdpa"
        self.stack = build_stack(base_config, attn)
        if gradient_checkpointing:
            self.stack.gradient_checkpointing_enable({"use_reentrant": False})
        self._build_parts(verifier, base_config.hidden_size)
        self._exact_buffers = {name: buffer.clone() for name, buffer in self.stack.named_buffers()}
        self.to(device=verifier.device, dtype=dtype)

    def _build_parts(self, verifier: HFVerifier, hidden_size: int) -> None:
        """What stands before and behind the layers."""
        config = self.config
        self.mask_embedding: nn.Parameter | None = None
        self.context_input: ContextInput | None = None
        self.context: ContextSource | None = None
        self.markov: MarkovHead | None = None
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
                drafter.mask_embedding.copy_(start_of_masks(drafter.borrowed, config, drafter.device, dtype))
        return drafter

    @property
    def dtype(self) -> torch.dtype:
        return next(self.stack.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.stack.parameters()).device

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype attention runs in; masks must have it too."""
        kind = self.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.dtype

    def forward(self, batch: WindowBatch) -> Float[Tensor, "window gamma draft_vocab"]:
        """Logits of every window of the batch, float32; the window length is that of ``batch.targets``.

        Causal prefix: one packed row per rollout. Bidirectional: one per window, about as many times slower.
        A batch without windows gives ``[0, gamma, draft_vocab]``, connected to every parameter, so that a rank with
        nothing to train on still takes part in the gradient reduction.
        """
        if batch.num_windows == 0:
            tie = torch.stack([parameter.sum() for parameter in self.parameters()]).sum().float() * 0.0
            return tie + torch.zeros((0, batch.targets.shape[1], len(self.draft_vocab_ids)), device=self.device)
        return self.states_logits(self.window_states(batch), previous_tokens(batch))

    def window_states(self, batch: WindowBatch) -> Float[Tensor, "window gamma hidden"]:
        """Normalised outputs at every drafted position of at least one window; ``states_logits`` is the head."""
        if self.context is not None:
            return context_states(self, batch)
        layout = layout_of(self, batch)
        return packed_states(self, batch, layout, layout.read_index)

    def states_logits(
        self, states: Float[Tensor, "window gamma hidden"], previous: Int[Tensor, "window gamma"]
    ) -> Float[Tensor, "window gamma draft_vocab"]:
        """float32 logits; ``previous``: the verifier id before each position (read by the Markov head only)."""
        logits = self.borrowed.logits(states)
        if self.markov is not None:
            logits = logits + self.markov(self.markov.gate(states), self.to_draft_vocab(previous))
        return logits

    def token_logits(self, states: Float[Tensor, "token hidden"]) -> Float[Tensor, "token draft_vocab"]:
        """float32 next-token logits of prefix states, without the Markov head."""
        return self.borrowed.logits(states)

    def window_and_prefix_states(
        self, batch: WindowBatch
    ) -> tuple[Float[Tensor, "window gamma hidden"], Float[Tensor, "token hidden"], Int[Tensor, " token"]]:
        """``window_states``, and the states of every sampled token before an anchor with the ids that follow them.

        These rows are computed anyway, as the prefix; each one is what position 1 of a window would be there.

        Raises:
            ConfigError: the drafter computes no prefix that predicts next tokens, or the batch does not say where
                completions start.
        """
        config = self.config
        if not config.shifted or config.attention != "causal_prefix" or batch.completion_start is None or self.context:
            raise ConfigError(
                f"prefix loss with shifted={config.shifted}, attention={config.attention!r}, conditioning="
                f"{config.conditioning!r}, completion_start={batch.completion_start}: expected shifted=true, "
                "attention='causal_prefix', conditioning='none' and known completion starts; set prefix_loss_weight=0"
            )
        layout = layout_of(self, batch)
        index, row, column = prefix_rows(layout, batch.lengths, batch.completion_start)
        states = packed_states(self, batch, layout, torch.cat([layout.read_index.flatten(), index]))
        num_window_rows = layout.read_index.numel()
        window_states = states[:num_window_rows].unflatten(0, layout.read_index.shape)
        return window_states, states[num_window_rows:], batch.input_ids[row, column + 1]

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
        if not prompt:
            raise ConfigError("prompt is empty: expected at least one token id; start with the BOS token")
        outside = [token for token in prompt if not 0 <= token < self.vocab_size]
        if outside:
            raise ConfigError(
                f"prompt holds id {outside[0]}: expected 0..{self.vocab_size - 1}; use the verifier's tokenizer"
            )
        if self.context is not None:
            return ContextDrafterSession(self, prompt, sampling, verifier_session)
        return BlockDrafterSession(self, prompt, sampling, max_new_tokens)

    def to_draft_vocab(self, tokens: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        """Verifier ids -> draft-vocabulary indices, -1 where not draftable (ids outside the vocabulary included)."""
        inside = (tokens >= 0) & (tokens < self.vocab_size)
        return torch.where(inside, self._draft_index[tokens.clamp(0, self.vocab_size - 1)], -1)

    def _register_vocab(self, ids: Tensor) -> None:
        draft_index = torch.full((self.vocab_size,), -1)
        draft_index[ids] = torch.arange(len(ids))
        # not persistent: the ids are saved in the config, and the state_dict holds trained tensors only
        self.register_buffer("draft_vocab_ids", ids, persistent=False)
        self.register_buffer("_draft_index", draft_index, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> BlockDrafter:
        """Move or cast, except for the rotary frequencies: rounded to bfloat16 they misplace distant tokens."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, exact in self._exact_buffers.items():
            parent, _, leaf = name.rpartition(".")
            setattr(self.stack.get_submodule(parent), leaf, exact.to(self.device))
        return self
