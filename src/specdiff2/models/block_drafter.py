"""A masked-diffusion drafter made of some of the verifier's own layers.

It fills a window of ``gamma`` masked positions in one pass. Trained are N transformer layers (started from evenly
spaced layers of the verifier), their final norm and one mask embedding; the embedding and the head are the
verifier's, frozen and borrowed (``models.borrowed``). ``forward`` scores every window of a training batch in one
packed pass; ``start`` opens a decoding session that computes the very same function with a KV cache
(``models.block_drafter_session``).

It knows nothing of losses, of acceptance or of files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedConfig

from specdiff2.functional.attention_masks import additive_mask
from specdiff2.functional.window_masks import WindowLayout, prefix_rows, window_layout
from specdiff2.models.block_drafter_config import BlockDrafterConfig, check_mask_token_id, evenly_spaced
from specdiff2.models.block_drafter_session import BlockDrafterSession
from specdiff2.models.borrowed import BorrowedEmbeddings
from specdiff2.models.layer_stack import base_of, build_stack, copy_layers, run_stack, stack_config
from specdiff2.models.vocab import tokenizer_fingerprint
from specdiff2.types import ConfigError, SamplingParams, WindowBatch

if TYPE_CHECKING:
    from specdiff2.models.verifier import HFVerifier


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
        self.mask_embedding = nn.Parameter(torch.zeros(base_config.hidden_size))
        self._exact_buffers = {name: buffer.clone() for name, buffer in self.stack.named_buffers()}
        self.to(device=verifier.device, dtype=dtype)

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
        dtype: torch.dtype = torch.float32,
        gradient_checkpointing: bool = False,
    ) -> BlockDrafter:
        """A fresh drafter whose layers are copies of the verifier's.

        Raises:
            ConfigError: a value out of range, or a verifier without the usual parts.
        """
        base = base_of(verifier.model)
        indices = evenly_spaced(num_layers, len(base.layers))
        base_config = stack_config(base.config, indices)
        config = BlockDrafterConfig(
            gamma=gamma,
            num_layers=num_layers,
            layer_indices=indices,
            attention=attention,
            shifted=shifted,
            denoising_steps=denoising_steps,
            vocab_size=verifier.vocab_size,
            mask_token_id=mask_token_id,
            draft_vocab_ids=None if draft_vocab_ids is None else [int(i) for i in draft_vocab_ids],
            verifier_name=verifier.name,
            verifier_fingerprint=verifier.fingerprint,
            tokenizer_fingerprint=tokenizer_fingerprint(verifier.tokenizer),
            base_config=json.loads(base_config.to_json_string(use_diff=False)),
        )
        drafter = cls(config, verifier, base_config, dtype=dtype, gradient_checkpointing=gradient_checkpointing)
        copy_layers(base, drafter.stack, indices)
        with torch.no_grad():
            if mask_token_id is None:
                start = drafter.borrowed.mean_row(verifier.vocab_size)
            else:
                start = drafter.borrowed.embed(torch.tensor(mask_token_id, device=drafter.device), dtype)
            drafter.mask_embedding.copy_(start)
        return drafter

    @property
    def dtype(self) -> torch.dtype:
        return self.mask_embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.mask_embedding.device

    def forward(self, batch: WindowBatch) -> Float[Tensor, "window gamma draft_vocab"]:
        """Logits of every window of the batch, float32; the window length is that of ``batch.targets``.

        Causal prefix: one packed row per rollout. Bidirectional: one per window, about as many times slower.
        A batch without windows gives ``[0, gamma, draft_vocab]``, connected to every parameter, so that a rank with
        nothing to train on still takes part in the gradient reduction.
        """
        gamma = batch.targets.shape[1]
        if batch.num_windows == 0:
            tie = torch.stack([parameter.sum() for parameter in self.parameters()]).sum().float() * 0.0
            return tie + torch.zeros((0, gamma, len(self.draft_vocab_ids)), device=self.device)
        layout = self._layout(batch)
        return self._logits_at(batch, layout, layout.read_index)

    def forward_with_prefix(
        self, batch: WindowBatch
    ) -> tuple[Float[Tensor, "window gamma draft_vocab"], Float[Tensor, "token draft_vocab"], Int[Tensor, " token"]]:
        """``forward``, and the next-token logits with their targets (ids) at every sampled token before an anchor.

        These rows are computed anyway, as the prefix; each one is what position 1 of a window would be there.

        Raises:
            ConfigError: the drafter is not shifted with a causal prefix, or the batch does not say where
                completions start.
        """
        if not self.config.shifted or self.config.attention != "causal_prefix" or batch.completion_start is None:
            raise ConfigError(
                f"prefix loss with shifted={self.config.shifted}, attention={self.config.attention!r}, "
                f"completion_start={batch.completion_start}: expected shifted=true, attention='causal_prefix' and "
                "known completion starts; set prefix_loss_weight=0 otherwise"
            )
        if batch.num_windows == 0:
            logits = self.forward(batch)
            return logits, logits.flatten(0, 1), batch.targets.flatten()
        layout = self._layout(batch)
        index, row, column = prefix_rows(layout, batch.lengths, batch.completion_start)
        logits = self._logits_at(batch, layout, torch.cat([layout.read_index.flatten(), index]))
        num_window_rows = layout.read_index.numel()
        window_logits = logits[:num_window_rows].unflatten(0, layout.read_index.shape)
        return window_logits, logits[num_window_rows:], batch.input_ids[row, column + 1]

    def _layout(self, batch: WindowBatch) -> WindowLayout:
        """Where everything goes in the packed batch."""
        return window_layout(
            batch.lengths,
            batch.window_row,
            batch.anchor,
            batch.targets.shape[1],
            attention=self.config.attention,
            shifted=self.config.shifted,
        )

    def _logits_at(self, batch: WindowBatch, layout: WindowLayout, read_index: Tensor) -> Tensor:
        """One packed pass; logits of the columns ``read_index``, in its shape, over the draft vocabulary."""
        mask = additive_mask(layout.allowed, self._compute_dtype()).expand(-1, -1, layout.position_ids.shape[1], -1)
        embeddings = self._packed_embeddings(batch, layout)
        return self.borrowed.logits(run_stack(self.stack, embeddings, mask, layout.position_ids, read_index))

    def start(self, prompt: Sequence[int], sampling: SamplingParams, max_new_tokens: int) -> BlockDrafterSession:
        """Read the prompt and be ready to draft.

        Raises:
            ConfigError: empty prompt or an id outside the verifier's vocabulary.
        """
        if not prompt:
            raise ConfigError("prompt is empty: expected at least one token id; start with the BOS token")
        outside = [token for token in prompt if not 0 <= token < self.vocab_size]
        if outside:
            raise ConfigError(
                f"prompt holds id {outside[0]}: expected 0..{self.vocab_size - 1}; use the verifier's tokenizer"
            )
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

    def _packed_embeddings(self, batch: WindowBatch, layout: WindowLayout) -> Float[Tensor, "row column hidden"]:
        """Token embeddings, then per slot the mask embedding or, where revealed, the teacher's token."""
        num_rows, num_columns = layout.position_ids.shape
        num_slots = layout.slot_index.shape[1]
        inside = torch.arange(layout.num_tokens, device=self.device) < batch.lengths[:, None]
        ids = batch.input_ids.new_zeros((num_rows, num_columns))
        # padding ids may be anything (-100 too), so they are not looked up
        ids[:, : layout.num_tokens] = torch.where(inside, batch.input_ids[:, : layout.num_tokens], 0)[layout.source_row]
        masked = torch.zeros((num_rows, num_columns), dtype=torch.bool, device=self.device)
        masked[:, layout.num_tokens :] = True
        revealed = (batch.revealed & batch.valid)[:, :num_slots]
        slots = layout.slot_index[revealed]
        ids.view(-1)[slots] = batch.targets[:, :num_slots][revealed]
        masked.view(-1)[slots] = False
        return torch.where(masked[..., None], self.mask_embedding, self.borrowed.embed(ids, self.dtype))

    def _compute_dtype(self) -> torch.dtype:
        """The dtype attention runs in; the mask must have it too."""
        kind = self.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.dtype

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> BlockDrafter:
        """Move or cast, except for the rotary frequencies: rounded to bfloat16 they misplace distant tokens."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, exact in self._exact_buffers.items():
            parent, _, leaf = name.rpartition(".")
            setattr(self.stack.get_submodule(parent), leaf, exact.to(self.device))
        return self
