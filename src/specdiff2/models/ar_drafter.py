"""An autoregressive drafter: any smaller causal language model with the verifier's tokenizer.

The baseline of speculative sampling. It comes from a folder or hub id of a causal language model, or is one of our own
block drafters trained with ``model.gamma=1``, which is nothing else (``models.causal_export``). Either way it drafts
token by token, with an exact cache.

Vocabularies are compared token by token: only ids that mean the same token for both models are drafted, never a padded
row, and a committed id that the drafter does not know is shown as another one. Nothing here is trained.

Source: speculative sampling, arXiv 2211.17192 and 2302.01318.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from specdiff2.models.ar_drafter_session import ARDrafterSession
from specdiff2.models.block_drafter import BlockDrafter
from specdiff2.models.causal_export import causal_lm, cut_head, is_drafter_folder, load_assistant, refuse_unexportable
from specdiff2.models.pretrained import load_drafter
from specdiff2.models.verifier import HFVerifier
from specdiff2.models.vocab import shared_ids
from specdiff2.types import ConfigError, MismatchError, SamplingParams

DEFAULT_GAMMA = 5  # as in transformers' assisted generation; no window was trained


class ARDrafter:
    """See ``protocols.Drafter``. ``max_gamma`` None: it can draft any number of tokens.

    Args:
        model: the smaller model. Where its head was cut down to some ids, ``row_ids`` says which.
        verifier: whose text it continues.
        row_ids: the verifier's id of each row of the head; None: row and id are the same number.

    Raises:
        MismatchError: the tokenizers differ, only one model has one, or they share no token.
    """

    max_gamma: int | None = None
    offers_law = False  # of a window at once, which a grown tree needs

    def __init__(self, model: HFVerifier, verifier: HFVerifier, row_ids: Sequence[int] | None = None) -> None:
        self.model, self.verifier = model, verifier
        self.verifier_vocab_size = verifier.vocab_size
        shared, self._shown = _vocabulary(model, verifier)
        known = set(shared)
        ids = range(model.vocab_size) if row_ids is None else row_ids
        rows = [row for row, token in enumerate(ids) if token in known]
        if not rows:
            raise MismatchError(
                f"drafter {model.name} and verifier {verifier.name} share no token: use another drafter"
            )
        self._ids = [ids[row] for row in rows]
        self._rows = None if len(rows) == len(ids) else torch.tensor(rows, device=model.device)
        self._places = None  # of the drafted tokens among the verifier's ids, where they differ
        if self._ids != list(range(verifier.vocab_size)):
            self._places = torch.tensor(self._ids, device=model.device)

    @classmethod
    def from_pretrained(
        cls, source: str | Path, verifier: HFVerifier, cache_dir: str | Path | None = None
    ) -> ARDrafter:
        """``source`` (see ``causal_export.is_causal_source``) beside ``verifier``: its dtype, device and attention.

        Raises:
            ConfigError, CorruptFileError: it cannot be loaded, or is a drafter that is not autoregressive.
            MismatchError: another tokenizer, or a drafter that was trained for another verifier.
        """
        if is_drafter_folder(source):
            drafter = load_drafter(source, verifier)
            assert isinstance(drafter, BlockDrafter)  # by its format
            return cls.from_block(drafter, verifier, name=str(source))
        return cls(load_assistant(source, verifier, cache_dir), verifier)

    @classmethod
    def from_block(cls, drafter: BlockDrafter, verifier: HFVerifier, name: str = "block drafter") -> ARDrafter:
        """Position 1 of a block drafter as a model of its own; the weights are copied, a cut draft vocabulary stays.

        Raises:
            ConfigError: the drafter is not autoregressive at position 1.
        """
        refuse_unexportable(drafter.config, drafter.state_dict(), name)
        model = causal_lm(drafter, verifier, attn_implementation=verifier.config._attn_implementation)
        ids = drafter.draft_vocab_ids.tolist()
        row_ids = None if len(ids) == drafter.vocab_size else ids
        if row_ids is not None:
            cut_head(model, row_ids)
        packed = verifier.num_packed > 0
        vocab_size = drafter.vocab_size if row_ids is None else len(ids)
        small = HFVerifier(
            model.to(verifier.device), verifier.tokenizer, name=name, vocab_size=vocab_size, pack_weights=packed
        )
        return cls(small, verifier, row_ids)

    @property
    def gamma(self) -> int:
        """Tokens of a draft unless told otherwise."""
        return DEFAULT_GAMMA

    @property
    def fingerprint(self) -> str:
        """That of its model; records are filed under it."""
        return self.model.fingerprint

    def compile(self, *, backend: str = "inductor") -> None:
        """From now on it reads in compiled passes, which a compiled verifier makes it do by itself.

        Raises:
            ConfigError: see ``HFVerifier.compile``.
        """
        self.model.compile(backend=backend)

    def warm(self, length: int) -> None:
        """Compile the passes of one and of two tokens, for texts of up to ``length`` tokens; nothing when eager."""
        if self.verifier.passes is not None and self.model.passes is None:
            self.compile()
        if self.model.passes is not None:
            self.model.passes.warm({1, 2}, length)

    def start(self, prompt: Sequence[int], sampling: SamplingParams, max_new_tokens: int) -> ARDrafterSession:
        """Read the prompt (the verifier's ids) and be ready to draft.

        Raises:
            ConfigError: an empty prompt, an id outside the verifier's vocabulary, or a text beyond either context.
        """
        self.verifier.check_prompt(prompt, max_new_tokens)
        if len(prompt) + max_new_tokens > self.model.max_length:
            raise ConfigError(
                f"prompt of {len(prompt)} tokens + max_new_tokens={max_new_tokens} is beyond the context of "
                f"{self.model.max_length} tokens of drafter {self.model.name}; shorten one of them"
            )
        if self.verifier.passes is not None and self.model.passes is None:
            self.compile()
        return ARDrafterSession(self, prompt, sampling, max_new_tokens)

    def shown(self, tokens: Sequence[int]) -> list[int]:
        """What the model reads for the verifier's ids."""
        return list(tokens) if self._shown is None else [self._shown[token] for token in tokens]

    def drafted_logits(self, logits: Float[Tensor, " row"]) -> Float[Tensor, " draft_vocab"]:
        """The rows that can be drafted."""
        return logits if self._rows is None else logits[self._rows]

    def token_of(self, index: int) -> int:
        """The verifier's id of a row of ``drafted_logits``."""
        return self._ids[index]

    def verifier_law(self, probs: Float[Tensor, "gamma draft_vocab"]) -> Float[Tensor, "gamma vocab"]:
        """The same law over the verifier's ids."""
        if self._places is None:
            return probs
        return probs.new_zeros((len(probs), self.verifier_vocab_size)).index_copy_(1, self._places, probs)


def _vocabulary(model: HFVerifier, verifier: HFVerifier) -> tuple[list[int], list[int] | None]:
    """(ids both models mean the same token by, by verifier id the id shown for it or None where they are the same)."""
    rows = model.model.get_input_embeddings().num_embeddings
    if verifier.tokenizer is None and model.tokenizer is None:  # numbers without texts
        shared, shown = (
            list(range(min(rows, verifier.vocab_size))),
            [min(i, rows - 1) for i in range(verifier.vocab_size)],
        )
    elif verifier.tokenizer is None or model.tokenizer is None:
        raise MismatchError(
            f"only one of drafter {model.name} and verifier {verifier.name} has a tokenizer: expected two, to compare "
            "token ids; put its files into the model's folder"
        )
    else:
        end = model.tokenizer.eos_token_id
        shared, shown = shared_ids(
            verifier.tokenizer, verifier.vocab_size, model.tokenizer, rows, (), mask_token_id=-1,
            replacement_id=0 if end is None else end,
        )  # fmt: skip
    return shared, None if shown == list(range(verifier.vocab_size)) else shown
