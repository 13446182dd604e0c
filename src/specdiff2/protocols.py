"""The seams of SpecDiff-2: what a verifier, a drafter, a rule and a decoder must offer.

Only signatures; every implementation can be replaced by a small table in the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Size, Tensor
from torch import device as Device

from specdiff2.tree import TokenTree
from specdiff2.types import (
    Acceptance,
    Draft,
    Generation,
    ObjectiveOutput,
    SamplingParams,
    WindowBatch,
)


class RandomSource(Protocol):
    """All randomness of decoding. Replaced by an enumerator in the exact tests."""

    def bernoulli(self, prob: float) -> bool:
        """True with probability ``prob``: strict ``u < prob``, so probability 0 is never accepted."""
        ...

    def categorical(self, probs: Float[Tensor, " vocab"]) -> int:
        """One index drawn from ``probs`` (float32 or wider; need not be normalised; sum > 0)."""
        ...

    def chains(self, probs: Float[Tensor, "gamma draft_vocab"], num_chains: int) -> Int[Tensor, "K gamma"]:
        """``num_chains`` independent draws from each row."""
        ...


class NodeProbs(Protocol):
    """The verifier's law after each node of a tree, ``[node, vocab]``: a tensor, or what gives its rows on demand."""

    @property
    def shape(self) -> Size: ...

    @property
    def device(self) -> Device: ...

    def __getitem__(self, index: Any, /) -> Tensor: ...


class VerifierSession(Protocol):
    """One prompt being decoded. Every token but the last committed one is in the KV cache."""

    @property
    def num_committed(self) -> int:
        """Tokens committed so far, prompt included."""
        ...

    def score(self, tree: TokenTree) -> Float[Tensor, "node vocab"]:
        """Logits after each node of the tree, in ONE forward pass. Node 0 is the last committed token."""
        ...

    def commit(self, path: Sequence[int], next_token: int) -> None:
        """Keep the keys and values of the root and of ``path``; ``next_token`` becomes the next root."""
        ...

    def features(self, path: Sequence[int]) -> Float[Tensor, "token hidden"] | None:
        """Hidden states of the root and of ``path`` from the latest ``score``; None when not asked for."""
        ...


class VerifierBatch(Protocol):
    """Several prompts being decoded at once, each in a place of its own: 0, 1, ...

    A verifier whose ``start_batch(num_rows, prompts, max_new_tokens)`` gives one scores all rows in one pass;
    ``prompts`` are all that will ever be started, checked at once, at most ``num_rows`` of them at a time.
    """

    def start(self, place: int, prompt: Sequence[int], max_new_tokens: int) -> VerifierSession:
        """Prefill ``prompt`` into ``place``: the next free one, or one whose earlier session has ended. ``score`` of
        the session itself serves that row alone."""
        ...

    def score(self, trees: Sequence[TokenTree]) -> Float[Tensor, "node vocab"]:
        """Logits after each node of each place's tree, one place after the other, in ONE forward pass; as if every
        session had scored its own."""
        ...

    def keep(self, places: Sequence[int]) -> None:
        """Keep only these places, in this order: ``places[i]`` becomes place i."""
        ...


@runtime_checkable
class Verifier(Protocol):
    """The frozen autoregressive target model P."""

    vocab_size: int  # real tokens; padded rows of the head are sliced off
    eos_ids: frozenset[int]
    max_length: int

    def start(self, prompt: Sequence[int], max_new_tokens: int) -> VerifierSession:
        """Prefill ``prompt`` (at least one id).

        Raises:
            ConfigError: empty prompt, an id outside the vocabulary, or prompt + max_new_tokens
                beyond the context.
        """
        ...


class DrafterSession(Protocol):
    """The drafter's view of one prompt being decoded."""

    def propose(self, gamma: int, num_drafts: int, rng: RandomSource, *, needs_probs: bool) -> Draft:
        """Draw drafts for the ``gamma`` positions after the committed tokens."""
        ...

    def observe(self, tokens: Sequence[int], features: Float[Tensor, "token hidden"] | None = None) -> None:
        """Newly committed tokens (accepted ones and the verifier's own)."""
        ...


class DraftLaw(Protocol):
    """The drafter's untempered law of one window, from one denoising pass: what token trees are grown from."""

    @property
    def ids(self) -> Int[Tensor, " draft_vocab"]:
        """Verifier ids of the draft vocabulary."""
        ...

    @property
    def gamma(self) -> int:
        """Drafted positions."""
        ...

    @property
    def factorised(self) -> bool:
        """True when ``log_probs`` does not depend on ``previous``."""
        ...

    def log_probs(self, depth: int, previous: Int[Tensor, " parent"]) -> Float[Tensor, "parent draft_vocab"]:
        """float32 log-probabilities of drafted position ``depth`` (from 0), one row for each verifier id in
        ``previous``, the token right before that position (the last committed token for depth 0)."""
        ...

    def candidates(
        self, depth: int, previous: Int[Tensor, " parent"]
    ) -> tuple[Float[Tensor, "parent candidate"], Int[Tensor, " candidate"]]:
        """``log_probs`` and ``ids`` of the tokens worth considering at ``depth``: all of them, or a short list whose
        probabilities may be normalised over the list."""
        ...

    def position_log_probs(self) -> Float[Tensor, "gamma draft_vocab"]:
        """Every position at once; factorised laws only."""
        ...


@runtime_checkable
class LawSession(DrafterSession, Protocol):
    """A drafter session that can also state its law, which a grown tree needs."""

    def law(self, gamma: int) -> DraftLaw:
        """The law of the ``gamma`` positions after the committed tokens, in one denoising pass."""
        ...


@runtime_checkable
class PathLawSession(DrafterSession, Protocol):
    """A drafter session whose law depends on the whole path: draft trees grow by passes over given nodes."""

    @property
    def ids(self) -> Int[Tensor, " draft_vocab"]: ...

    def start_tree(self) -> Float[Tensor, " draft_vocab"]:
        """Log-probabilities of the token after the committed ones; node 0 of a new draft tree is the last of them."""
        ...

    def expand(self, tokens: Sequence[int], parents: Sequence[int]) -> Float[Tensor, "node draft_vocab"]:
        """Add nodes, in one pass, below nodes added before; log-probabilities of the token after each of them.

        ``tokens`` are verifier ids; nodes are numbered 1, 2, ... in the order in which they are added.
        """
        ...


@runtime_checkable
class Drafter(Protocol):
    """The draft model Q. ``forward`` serves training, ``start`` decoding."""

    @property
    def gamma(self) -> int: ...

    def start(self, prompt: Sequence[int], sampling: SamplingParams, max_new_tokens: int) -> DrafterSession: ...


class ConditionedDrafter(Protocol):
    """A drafter that reads what the verifier knows about the committed tokens."""

    @property
    def gamma(self) -> int: ...

    @property
    def needs_verifier_session(self) -> bool: ...

    def start(
        self, prompt: Sequence[int], sampling: SamplingParams, max_new_tokens: int, verifier_session: VerifierSession
    ) -> DrafterSession:
        """``verifier_session`` is that of the same prompt; it must belong to the verifier the drafter was made for."""
        ...


class DrafterBatch(Protocol):
    """The drafter's sessions of a ``VerifierBatch``, by the same places.

    A drafter whose ``start_batch(num_rows, prompts, max_new_tokens)`` gives one (it may give None) drafts for all rows
    in shared passes.
    """

    def start(
        self,
        place: int,
        prompt: Sequence[int],
        sampling: SamplingParams,
        max_new_tokens: int,
        verifier_session: VerifierSession,
    ) -> DrafterSession: ...

    def prepare(self, gammas: Sequence[int]) -> None:
        """Run the passes that each place's next ``propose(gamma)`` or ``law(gamma)`` needs, together. 0: none."""
        ...

    def keep(self, places: Sequence[int]) -> None: ...


class AcceptanceRule(Protocol):
    """Decides which path of a tree the verifier keeps, and the token after it."""

    name: str
    is_lossless: bool
    reads_draft_probs: bool  # True: needs tokens really drawn from draft_probs, so selection would bias it
    walks_tree: bool  # True: uses every chain of the tree; False: needs exactly one chain (K=1 or selection)

    def __call__(
        self,
        tree: TokenTree,
        verifier_probs: NodeProbs,
        draft_probs: Float[Tensor, "gamma vocab"] | None,
        rng: RandomSource,
    ) -> Acceptance: ...


class Selector(Protocol):
    """Chooses one chain by verifier probabilities, never seeing the verifier's random bits."""

    name: str

    def __call__(self, tree: TokenTree, verifier_probs: NodeProbs) -> int:
        """Index of the chosen chain, 0 .. K-1."""
        ...


class Decoder(Protocol):
    """Speculative and autoregressive decoding alike; several prompts at once: ``decoding.batch.BatchDecoder``."""

    name: str

    def generate(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        rng: RandomSource,
        stop_ids: Collection[int] = (),
        stop_strings: Sequence[str] = (),
        on_tokens: Callable[[list[int], str], None] | None = None,
    ) -> Generation:
        """Decode one prompt; ``on_tokens`` streams (new ids, new text) after each round."""
        ...


class Objective(Protocol):
    """A pure training loss over windows: no model, no logging."""

    name: str
    needs_verifier_probs: bool
    masking: str  # "full": all gamma positions masked; "random": a random part is revealed (mdm)

    def __call__(
        self,
        logits: Float[Tensor, "window gamma draft_vocab"],
        targets: Int[Tensor, "window gamma"],
        valid: Tensor,
        verifier_probs: Float[Tensor, "window gamma draft_vocab"] | None = None,
    ) -> ObjectiveOutput:
        """``targets`` are draft-vocabulary indices, -1 where the teacher's token is not draftable
        (q = 0 there); ``valid`` bool [window, gamma]: a target exists and is masked."""
        ...


class TrainableDrafter(Protocol):
    """What the training module needs of a drafter besides being an ``nn.Module``.

    Drafters that also offer their states (``StatesDrafter``) are trained and monitored in chunks of windows.
    """

    @property
    def gamma(self) -> int: ...

    draft_vocab_ids: Int[Tensor, " draft_vocab"]

    def forward(self, batch: WindowBatch) -> Float[Tensor, "window gamma draft_vocab"]: ...

    def to_draft_vocab(self, tokens: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
        """Verifier ids -> draft-vocabulary indices, -1 where not draftable."""
        ...


@runtime_checkable
class StatesDrafter(TrainableDrafter, Protocol):
    """A drafter whose body and head can be run apart; ``forward`` is the one after the other."""

    def window_states(self, batch: WindowBatch) -> Float[Tensor, "window gamma hidden"]: ...

    def states_logits(
        self, states: Float[Tensor, "window gamma hidden"], previous: Int[Tensor, "window gamma"]
    ) -> Float[Tensor, "window gamma draft_vocab"]:
        """float32 logits; ``previous[:, j]``: the verifier id before drafted position j on the teacher's path."""
        ...

    def window_and_prefix_states(
        self, batch: WindowBatch
    ) -> tuple[Float[Tensor, "window gamma hidden"], Float[Tensor, "token hidden"], Int[Tensor, " token"]]:
        """Window states, states of sampled prefix tokens, and the ids that follow those."""
        ...

    def token_logits(self, states: Float[Tensor, "token hidden"]) -> Float[Tensor, "token draft_vocab"]:
        """float32 logits of the token after each prefix state."""
        ...

    def parameters(self) -> Iterator[Any]: ...
