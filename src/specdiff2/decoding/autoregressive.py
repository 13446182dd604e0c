"""Decoding with the verifier alone: the baseline of every speed-up, and the reference for every law.

The same loop as speculative decoding, with trees of one node, so that stopping, streaming and timing are the
same code.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from specdiff2.decoding.batch import BatchDecoder
from specdiff2.decoding.engine import decode
from specdiff2.decoding.prompting import Prompt, prompt_ids
from specdiff2.decoding.speculative import own_sampling
from specdiff2.decoding.stopping import OnTokens
from specdiff2.protocols import RandomSource, Verifier
from specdiff2.rng import TorchRandomSource
from specdiff2.types import Generation, SamplingParams


class AutoregressiveDecoder(BatchDecoder):
    """One token a round, each from one forward pass of the verifier."""

    drafting = None

    def __init__(
        self, verifier: Verifier, *, sampling: SamplingParams | None = None, name: str = "autoregressive"
    ) -> None:
        """``sampling`` None means the verifier's own setting.

        Raises:
            ConfigError: neither is there.
        """
        self.verifier = verifier
        self.name = name
        self.sampling = own_sampling(verifier) if sampling is None else sampling

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
        """Decode one prompt; as ``SpeculativeDecoder.generate``."""
        return decode(
            self.verifier,
            prompt_ids(self.verifier, prompt),
            sampling=self.sampling,
            drafting=None,
            max_new_tokens=max_new_tokens,
            rng=TorchRandomSource(0) if rng is None else rng,
            stop_ids=stop_ids,
            stop_strings=stop_strings,
            on_tokens=on_tokens,
        )
