"""What every drafter that fills masked windows has in common: packed training passes, its vocabulary, its dtype.

A subclass brings the transformer layers (``stack``), what stands before and behind them (``embeddings``,
``mask_embedding``), and a ``config`` that says how windows lie behind their prefix. The packed passes are
``models.packed_forward``, decoding is ``models.block_drafter_session``. It knows no losses, no acceptance, no files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from specdiff2.functional.previous_tokens import previous_tokens
from specdiff2.functional.window_masks import prefix_rows
from specdiff2.models.markov_head import MarkovHead
from specdiff2.models.packed_forward import layout_of, packed_states
from specdiff2.types import ConfigError, WindowBatch


class WindowDrafter(nn.Module):
    """See ``protocols.StatesDrafter``.

    Attributes:
        config: says ``gamma``, ``vocab_size``, ``shifted``, ``attention`` and ``denoising_steps``.
        stack: a transformers decoder with layers, norm and rotary_emb.
        embeddings: embedding and head (``models.borrowed``).
        mask_embedding: input of a masked position; None for a drafter whose windows need none.
        markov: bias from the previous token, or None.
        whole_window: a shifted drafter's input has a mask for the last position as well, whose own output is unused.
        unmasking: which positions earlier denoising passes fix first (``functional.unmasking``).
    """

    config: Any
    stack: Any
    embeddings: Any
    mask_embedding: Tensor | None
    markov: MarkovHead | None  # no default here: a class attribute would hide the registered module
    whole_window = False
    unmasking = "confidence"
    draft_vocab_ids: Int[Tensor, " draft_vocab"]
    _draft_index: Int[Tensor, " vocab"]

    @property
    def gamma(self) -> int:
        """Drafted positions of a window."""
        return int(self.config.gamma)

    @property
    def vocab_size(self) -> int:
        """Tokens that a committed text may hold."""
        return int(self.config.vocab_size)

    @property
    def verifier_vocab_size(self) -> int:
        """Tokens of the verifier it drafts for; another number only where tokenizers differ."""
        return self.vocab_size

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
        layout = layout_of(self, batch)
        return packed_states(self, batch, layout, layout.read_index)

    def states_logits(
        self, states: Float[Tensor, "window gamma hidden"], previous: Int[Tensor, "window gamma"]
    ) -> Float[Tensor, "window gamma draft_vocab"]:
        """float32 logits; ``previous``: the verifier id before each position (read by the Markov head only)."""
        logits = self.embeddings.logits(states)
        if self.markov is not None:
            # not called as a module: ZeRO-3 counts those calls, and ranks may need other numbers of chunks
            logits = logits + self.markov.forward(self.markov.gate(states), self.to_draft_vocab(previous))
        return logits

    def token_logits(self, states: Float[Tensor, "token hidden"]) -> Float[Tensor, "token draft_vocab"]:
        """float32 next-token logits of prefix states, without the Markov head."""
        return self.embeddings.logits(states)

    def window_and_prefix_states(
        self, batch: WindowBatch
    ) -> tuple[Float[Tensor, "window gamma hidden"], Float[Tensor, "token hidden"], Int[Tensor, " token"]]:
        """``window_states``, and the states of every sampled token up to its row's last anchor, with the ids behind.

        These rows are computed anyway, as the prefix; each one is what position 1 of a window would be there.

        Raises:
            ConfigError: the drafter computes no prefix that predicts next tokens, or the batch does not say where
                completions start.
        """
        config, conditioning = self.config, getattr(self.config, "conditioning", "none")
        computes_prefix = config.shifted and config.attention == "causal_prefix" and conditioning == "none"
        if not computes_prefix or batch.completion_start is None:
            raise ConfigError(
                f"prefix loss with shifted={config.shifted}, attention={config.attention!r}, conditioning="
                f"{conditioning!r}, completion_start={batch.completion_start}: expected shifted=true, "
                "attention='causal_prefix', conditioning='none' and known completion starts; set prefix_loss_weight=0"
            )
        layout = layout_of(self, batch)
        last_anchor = torch.full_like(batch.lengths, -1).scatter_reduce(0, batch.window_row, batch.anchor, "amax")
        index, row, column = prefix_rows(layout, batch.lengths, batch.completion_start, last_anchor)
        states = packed_states(self, batch, layout, torch.cat([layout.read_index.flatten(), index]))
        num_window_rows = layout.read_index.numel()
        window_states = states[:num_window_rows].unflatten(0, layout.read_index.shape)
        return window_states, states[num_window_rows:], batch.input_ids[row, column + 1]

    def to_draft_vocab(self, tokens: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        """Verifier ids -> draft-vocabulary indices, -1 where not draftable (ids outside the vocabulary included)."""
        inside = (tokens >= 0) & (tokens < self.vocab_size)
        return torch.where(inside, self._draft_index[tokens.clamp(0, self.vocab_size - 1)], -1)

    def check_prompt(self, prompt: Sequence[int]) -> None:
        """Raises ConfigError: empty prompt, or an id outside the verifier's vocabulary."""
        if not prompt:
            raise ConfigError("prompt is empty: expected at least one token id; start with the BOS token")
        last = self.verifier_vocab_size - 1
        outside = [token for token in prompt if not 0 <= token <= last]
        if outside:
            raise ConfigError(f"prompt holds id {outside[0]}: expected 0..{last}; use the verifier's tokenizer")

    def _register_vocab(self, ids: Tensor) -> None:
        draft_index = torch.full((self.vocab_size,), -1)
        draft_index[ids] = torch.arange(len(ids))
        # not persistent: the ids are saved in the config, and the state_dict holds trained tensors only
        self.register_buffer("draft_vocab_ids", ids, persistent=False)
        self.register_buffer("_draft_index", draft_index, persistent=False)

    def _keep_exact_buffers(self) -> None:
        """Remember the rotary frequencies: rounded to bfloat16 they misplace distant tokens (see ``_apply``)."""
        self._exact_buffers = {name: buffer.clone() for name, buffer in self.stack.named_buffers()}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> WindowDrafter:
        """Move or cast, except for the buffers of ``_keep_exact_buffers``, which are only moved."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, exact in self._exact_buffers.items():
            parent, _, leaf = name.rpartition(".")
            setattr(self.stack.get_submodule(parent), leaf, exact.to(self.device))
        return self
