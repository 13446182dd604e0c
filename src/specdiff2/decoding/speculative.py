"""The speculative decoder: a verifier, a drafter, a rule and what goes with them, checked once and used per prompt.

The loop itself is ``decoding.engine``; named combinations are ``decoding.samplers``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdiff2.decoding.acceptance import check_combination
from specdiff2.decoding.batch import BatchDecoder
from specdiff2.decoding.engine import Drafting, decode
from specdiff2.decoding.prompting import Prompt, prompt_ids
from specdiff2.decoding.stopping import OnTokens
from specdiff2.decoding.tree_growth import TreeGrowth, check_growth, check_laws
from specdiff2.protocols import AcceptanceRule, Drafter, RandomSource, Selector, Verifier
from specdiff2.rng import TorchRandomSource
from specdiff2.types import ConfigError, Generation, SamplingParams

if TYPE_CHECKING:
    from specdiff2.models.verifier import HFVerifier


class SpeculativeDecoder(BatchDecoder):
    """Decoding with a drafter; the output follows the verifier's own law."""

    drafting: Drafting

    def __init__(
        self,
        verifier: Verifier,
        drafter: Drafter,
        *,
        rule: AcceptanceRule,
        selector: Selector | None = None,
        gamma: int | None = None,
        num_drafts: int = 1,
        verifier_sampling: SamplingParams | None = None,
        draft_sampling: SamplingParams | None = None,
        growth: TreeGrowth | None = None,
        min_confidence: float = 0.0,
        denoising_steps: int | None = None,
        name: str = "specdiff2",
    ) -> None:
        """
        Args:
            gamma: positions drafted in a round; None means the drafter's own.
            num_drafts: K, drafts of a round.
            verifier_sampling: the law to follow; None means the verifier's own setting.
            draft_sampling: the law drafts are drawn from; None means the drafter's untempered law.
            growth: grow a tree from the drafter's law instead of drawing K drafts.
            min_confidence: end drafts before the probability of the drafter's argmax chain falls below this; 0 never.
            denoising_steps: passes that a window drafter fills its window in; None means its own.

        Raises:
            ConfigError: ``gamma`` outside 1 .. ``drafter.gamma`` (or below 1, for a drafter without limit), a K that
                the rule cannot use, or a grown tree that the rule cannot use, that the drafter states no law for or
                that has no room for ``gamma`` nodes.
            NotLosslessError: the combination of rule and selector would change the verifier's law.
        """
        gamma = window_length(gamma, drafter.gamma, unlimited=is_unlimited(drafter))
        if isinstance(num_drafts, bool) or not isinstance(num_drafts, int) or num_drafts < 1:
            raise ConfigError(f"num_drafts={num_drafts!r}: expected an integer >= 1")
        check_combination(rule, selector, num_drafts)
        if growth is not None:
            check_growth(rule, selector, num_drafts)
            growth.settings.check_gamma(gamma)
            check_laws(growth.settings, drafter)
        self.verifier = verifier
        self.name = name
        self.sampling = own_sampling(verifier) if verifier_sampling is None else verifier_sampling
        check_confidence(min_confidence, growth)
        check_steps(denoising_steps)
        draft_sampling = draft_sampling or SamplingParams()
        self.drafting = Drafting(
            drafter, rule, selector, gamma, num_drafts, draft_sampling, growth, float(min_confidence), denoising_steps
        )

    @classmethod
    def from_pretrained(
        cls, verifier: str | HFVerifier, drafter: str | Path | Drafter | None = None, **options: Any
    ) -> SpeculativeDecoder:
        """A decoder from saved models; ``options``: see ``decoding.loading.load_speculative_decoder``."""
        from specdiff2.decoding.loading import load_speculative_decoder

        return load_speculative_decoder(verifier, drafter, **options)

    def describe(self) -> dict[str, Any]:
        """Settings beyond the common ones, for the fingerprint of records."""
        settings = {} if self.drafting.growth is None else self.drafting.growth.settings.describe()
        own = {"min_confidence": self.drafting.min_confidence, "denoising_steps": self.drafting.denoising_steps}
        return settings | {name: value for name, value in own.items() if value}

    def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 256,
        rng: RandomSource | None = None,
        stop_ids: Collection[int] = (),
        stop_strings: Sequence[str] = (),
        on_tokens: OnTokens | None = None,
    ) -> Generation:
        """Decode one prompt: token ids, or a text or chat messages for the verifier's tokenizer.

        ``rng`` None means seed 0. See ``decode`` for the rest.
        """
        return decode(
            self.verifier,
            prompt_ids(self.verifier, prompt),
            sampling=self.sampling,
            drafting=self.drafting,
            max_new_tokens=max_new_tokens,
            rng=TorchRandomSource(0) if rng is None else rng,
            stop_ids=stop_ids,
            stop_strings=stop_strings,
            on_tokens=on_tokens,
        )


def own_sampling(verifier: Verifier) -> SamplingParams:
    """The verifier's own sampling setting.

    Raises:
        ConfigError: it has none.
    """
    sampling = getattr(verifier, "sampling", None)
    if not isinstance(sampling, SamplingParams):
        raise ConfigError(f"verifier sampling={sampling!r}: expected SamplingParams; pass them to the decoder")
    return sampling


def window_length(gamma: int | None, drafter_gamma: int, *, unlimited: bool = False) -> int:
    """``gamma``, or the drafter's own where it is None.

    ``unlimited``: the drafter goes on as long as it is asked to; its own gamma is only the default.

    Raises:
        ConfigError: not an integer from 1 to ``drafter_gamma``.
    """
    if gamma is None:
        return drafter_gamma
    is_count = isinstance(gamma, int) and not isinstance(gamma, bool) and gamma >= 1
    if not is_count or (gamma > drafter_gamma and not unlimited):
        expected = ">= 1" if unlimited else f"from 1 to the drafter's {drafter_gamma}"
        raise ConfigError(f"gamma={gamma!r}: expected an integer {expected}")
    return gamma


def is_unlimited(drafter: object) -> bool:
    """Whether a drafter, or the one that a config describes, can draft more positions than its own gamma: its
    ``max_gamma`` is None."""
    return getattr(drafter, "max_gamma", 0) is None


def check_confidence(min_confidence: float, growth: TreeGrowth | None = None) -> None:
    """Raises ConfigError: not in 0 <= x < 1, or given for a grown tree, which has ``num_nodes=auto`` for that."""
    if isinstance(min_confidence, bool) or not 0.0 <= min_confidence < 1.0:
        raise ConfigError(f"min_confidence={min_confidence!r}: expected 0 <= min_confidence < 1; 0 never shortens")
    if growth is not None and min_confidence > 0.0:
        raise ConfigError(f"min_confidence={min_confidence} with a grown tree: expected 0; use num_nodes=auto")


def check_steps(denoising_steps: int | None) -> None:
    """Raises ConfigError: neither None nor an integer >= 1."""
    if denoising_steps is not None and (
        isinstance(denoising_steps, bool) or not isinstance(denoising_steps, int) or denoising_steps < 1
    ):
        raise ConfigError(f"denoising_steps={denoising_steps!r}: expected an integer >= 1, or null for the drafter's")
