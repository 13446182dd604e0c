"""Between the tokens of a verifier and those of a drafter with another tokenizer: same text, other ids.

Committed verifier ids become the drafter's ids of the same text, and what the drafter proposes becomes verifier ids
that continue the committed ones (``models.bridged_text`` does both for one growing text). Nothing here is trusted by
the verifier: rules that never read draft_probs check the ids that come out, so a poor translation costs acceptance,
never the output law (SpecDiff-2, arXiv 2511.00606, future work; matching re-tokenised drafts: Timor et al., arXiv
2502.05202, string-level exact match).

Special tokens: the drafter sees its own one of the same string, else of the same role (EOS, BOS, PAD), else none. Its
EOS, or its token that has the string of the verifier's EOS, is the verifier's EOS. Knows no models and no randomness.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from specdiff2.models.bridged_text import BridgedText
from specdiff2.models.tokenizer_text import ROLES, TokenizerText
from specdiff2.types import ConfigError


class TokenizerBridge:
    """Two tokenizers and what their special tokens mean to each other.

    Attributes:
        drafter, verifier: the text sides of the two.
        drafter_eos: the drafter's EOS; None without one.
        verifier_eos: the verifier's EOS; None without one.
    """

    def __init__(
        self,
        drafter_tokenizer: PreTrainedTokenizerBase,
        verifier_tokenizer: PreTrainedTokenizerBase,
        *,
        drafter_vocab_size: int | None = None,
        verifier_vocab_size: int | None = None,
    ) -> None:
        """
        Args:
            drafter_vocab_size, verifier_vocab_size: ids the models know, where that is fewer than the tokenizers do;
                ids beyond are neither shown nor proposed.

        Raises:
            ConfigError: a tokenizer that is not understood, or a drafter's without BOS, EOS and PAD.
        """
        self.drafter = TokenizerText(drafter_tokenizer, drafter_vocab_size)
        self.verifier = TokenizerText(verifier_tokenizer, verifier_vocab_size)
        self.drafter_eos = self.drafter.roles.get("eos")
        self.verifier_eos = self.verifier.roles.get("eos")
        openings = [self.drafter.roles[role] for role in ("bos", "eos", "pad") if role in self.drafter.roles]
        if not openings:
            raise ConfigError(
                f"drafter tokenizer {type(drafter_tokenizer).__name__}: expected a BOS, EOS or PAD token, which opens "
                "a text; set one"
            )
        self._opening = openings[0]
        self._specials = {token: self._counterpart(token) for token in self.verifier.special_ids}
        eos_string = None if self.verifier_eos is None else self.verifier.special_ids[self.verifier_eos]
        self._ends = {self.drafter_eos, *(i for i, text in self.drafter.special_ids.items() if text == eos_string)}

    def start(self, tokens: Sequence[int] = ()) -> BridgedText:
        """The text of ``tokens`` (the verifier's), to be continued."""
        text = BridgedText(self)
        text.extend(tokens)
        return text

    def drafter_ids(self, tokens: Sequence[int]) -> list[int]:
        """The drafter's ids of the text of ``tokens`` (the verifier's); at least one."""
        return self.start(tokens).drafter_ids

    def special(self, token: int) -> int | None:
        """The drafter's id for a verifier id that stands for no text; None: not shown."""
        return self._specials.get(token)

    def is_end(self, drafted: int) -> bool:
        """Whether the drafter means the verifier's EOS by this id."""
        return self.verifier_eos is not None and drafted in self._ends

    def opened(self, ids: list[int]) -> list[int]:
        """With the drafter's BOS in front where its tokenizer writes one; never empty."""
        if not ids or (self.drafter.adds_bos and ids[0] != self._opening):
            return [self._opening, *ids]
        return ids

    def _counterpart(self, token: int) -> int | None:
        string = self.verifier.special_ids[token]
        same = [i for i, other in self.drafter.special_ids.items() if other == string]
        roles = [role for role in ROLES if self.verifier.roles.get(role) == token and role in self.drafter.roles]
        return next(iter([*same, *(self.drafter.roles[role] for role in roles)]), None)
