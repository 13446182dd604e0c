"""Records shared by every layer of SpecDiff-2.

Plain data only: no model, no file access, no randomness. Axis names used in jaxtyping annotations
throughout the package:

    batch    rollouts in a training batch          length   tokens of a padded sequence
    window   draft windows (flattened over batch)  gamma    drafted positions of one window
    vocab    the verifier's real vocabulary        draft_vocab  ids the drafter can propose
    node     nodes of a token tree, node 0 = root  K        drafts (chains) of one round
    hidden   hidden size of a model                head, head_dim  attention heads and their size
    parent   nodes whose children are asked for at once
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

StopReason = Literal["eos", "stop", "length"]


class SpecDiffError(Exception):
    """An error a user can act on: names the thing, the value, what was expected and what to do."""


class ConfigError(SpecDiffError, ValueError):
    """A setting is unknown, has the wrong type or lies outside its range."""


class NotLosslessError(SpecDiffError, ValueError):
    """A combination of selection and acceptance rule would change the verifier's output law."""


class MismatchError(SpecDiffError, ValueError):
    """Two things that must belong together (verifier, tokenizer, drafter, rollouts) do not."""


class CorruptFileError(SpecDiffError, ValueError):
    """A file that exists cannot be read as what it claims to be."""


class StorageError(SpecDiffError, OSError):
    """Writing failed (full disk, quota, permissions); what was written before is intact."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How logits become the law tokens are drawn from (``functional.sampling.logits_to_probs``).

    Attributes:
        temperature: divides the logits; 0 means one-hot on the argmax. Finite, >= 0.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the smallest set of most probable tokens with mass >= top_p; 1.0 keeps all.

    Raises:
        ConfigError: a value is outside its range (NaN included).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0.0):
            raise ConfigError(
                f"temperature={self.temperature!r}: expected a finite number >= 0; use 0 for greedy decoding"
            )
        if isinstance(self.top_k, bool) or int(self.top_k) != self.top_k or self.top_k < 0:
            raise ConfigError(f"top_k={self.top_k!r}: expected an integer >= 0; use 0 to keep every token")
        if not (0.0 < self.top_p <= 1.0):
            raise ConfigError(f"top_p={self.top_p!r}: expected 0 < top_p <= 1; use 1.0 to keep every token")


@dataclass(frozen=True, slots=True)
class Draft:
    """K drafts, drawn from one position-factorised law where the acceptance rule reads it.

    Attributes:
        tokens: drafted ids, in the verifier's vocabulary. A shorter chain is filled up with -1, which only rules
            that do not read ``draft_probs`` take; ``[K, 0]`` is a round without drafts.
        draft_probs: the law they were drawn from, after drafter temperature, top-k and top-p;
            None when the acceptance rule said that it never reads it.
        sources: which of several drafters each chain came from; None where there is only one.
    """

    tokens: Int[Tensor, "K gamma"]
    draft_probs: Float[Tensor, "gamma vocab"] | None = None
    sources: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What a rule decided about one tree.

    Attributes:
        path: accepted nodes from the root's child downwards, root excluded; its length is the streak.
        next_token: the token the verifier adds after the path (bonus or replacement).
    """

    path: list[int]
    next_token: int


@dataclass(slots=True)
class RoundRecord:
    """One propose-score-accept round. Seconds are wall-clock.

    ``num_drafted`` is the window that the round really used: the length of the longest draft that begins with the
    accepted tokens, or the depth of a grown tree. ``num_accepted`` is the streak, without the bonus token, cut at the
    end of the output (EOS, stop, length); a cut round also has ``num_drafted == num_accepted``, since no later
    position was reached. ``winners``, where several drafters drafted: those with a draft that begins with all of the
    accepted tokens, ascending; empty at streak 0.
    """

    num_drafted: int
    num_accepted: int
    num_committed: int
    num_nodes: int
    draft_s: float = 0.0
    verify_s: float = 0.0
    other_s: float = 0.0
    winners: list[int] | None = None


@dataclass(slots=True)
class Generation:
    """One completion. ``tokens`` ends with the EOS id where the verifier produced one."""

    tokens: list[int]
    rounds: list[RoundRecord]
    stop_reason: StopReason
    text: str = ""
    prefill_s: float = 0.0
    decode_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


@dataclass(slots=True)
class Rollout:
    """A completion sampled from the verifier, stored as token ids, EOS included when reached."""

    rollout_id: str
    prompt_ids: list[int]
    completion_ids: list[int]
    temperature: float
    meta: dict[str, str | int | float] = field(default_factory=dict)


@dataclass(slots=True)
class WindowBatch:
    """Rollouts of one training batch with the draft windows chosen in them.

    Attributes:
        input_ids: prompt + completion, right-padded (padding id is irrelevant, see ``lengths``).
        lengths: real tokens per row.
        window_row: row of ``input_ids`` each window lies in.
        anchor: index, in its row, of the last known token before the window.
        targets: the teacher's tokens at anchor+1 .. anchor+gamma; arbitrary where not valid.
        valid: True where a target exists (not beyond the end of the rollout).
        revealed: True where the window shows the teacher's token instead of the mask (``mdm`` only).
        completion_start: index, in each row, of the first token that the verifier sampled; None when unknown.
    """

    input_ids: Int[Tensor, "batch length"]
    lengths: Int[Tensor, " batch"]
    window_row: Int[Tensor, " window"]
    anchor: Int[Tensor, " window"]
    targets: Int[Tensor, "window gamma"]
    valid: Bool[Tensor, "window gamma"]
    revealed: Bool[Tensor, "window gamma"]
    completion_start: Int[Tensor, " batch"] | None = None

    @property
    def num_windows(self) -> int:
        return int(self.targets.shape[0])

    def to(self, device: torch.device) -> WindowBatch:
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return replace(self, **{name: value.to(device) for name, value in values.items() if value is not None})


@dataclass(slots=True)
class ObjectiveOutput:
    """Result of an objective over a batch of windows.

    Attributes:
        loss_sum: sum of the window losses, differentiable, so that accumulation and ranks can be
            normalised by the total number of windows.
        num_windows: windows with at least one trainable position (the normaliser).
        streak: expected streak of each window under the drafter (float32, detached).
        parts: unweighted loss sums of the parts that ``loss_sum`` is made of, by name, detached; empty for one
            objective alone.
    """

    loss_sum: Float[Tensor, ""]
    num_windows: Int[Tensor, ""]
    streak: Float[Tensor, " window"]
    parts: dict[str, Tensor] = field(default_factory=dict)
