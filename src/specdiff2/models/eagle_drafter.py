"""EAGLE: an autoregressive head that predicts the verifier's next hidden state and borrows its head (arXiv 2401.15077).

The step of token i reads that token's embedding and the verifier's hidden state (after the final norm) of the token
before it; its output predicts the hidden state of token i, and the verifier's frozen head on it predicts token i + 1.
While drafting, the head goes on with its own predictions. Trained are the input projection ``fc`` and N layers of the
verifier's family, laid out as in published heads (SafeAILab/EAGLE, eagle/model/cnets1.py): no norm in front of the
first layer's attention and none behind the last layer.

``forward`` unrolls gamma positions on the head's own predictions (``models.eagle_forward``; training-time test of
HASS, arXiv 2408.15766, and EAGLE-3, arXiv 2503.01840), so training and decoding compute the same function. It knows
nothing of objectives, acceptance or files.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig

from specdiff2.models.block_drafter_config import choose_layers
from specdiff2.models.borrowed import BorrowedEmbeddings
from specdiff2.models.eagle_config import EagleConfig
from specdiff2.models.eagle_forward import unrolled_states
from specdiff2.models.eagle_session import EagleSession
from specdiff2.models.eagle_start import start_layers
from specdiff2.models.layer_stack import PLAIN_TYPES, base_of, build_stack, stack_config
from specdiff2.models.verifier_context import ContextSource, context_shape
from specdiff2.models.vocab import tokenizer_fingerprint
from specdiff2.models.window_drafter import WindowDrafter
from specdiff2.types import ConfigError, SamplingParams, WindowBatch

if TYPE_CHECKING:
    from specdiff2.models.verifier import HFVerifier
    from specdiff2.models.verifier_session import HFVerifierSession


class EagleDrafter(WindowDrafter):
    """See ``protocols.StatesDrafter`` and ``protocols.PathLawSession``.

    Built by ``from_verifier`` (fresh) or ``models.pretrained.load_drafter`` (trained); the constructor leaves the
    weights untrained.

    Attributes:
        fc: projection of (embedding of a token, hidden state of the token before it) to the layers' input.
        context: reads the verifier's hidden states of rollouts.
    """

    needs_verifier_session = True
    offers_path_law, offers_law = True, False  # its sessions are ``PathLawSession``, and no ``LawSession``
    auxiliary_name = "feature"

    def __init__(
        self,
        config: EagleConfig,
        verifier: HFVerifier,
        base_config: PreTrainedConfig,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        check_family(base_config)
        self.config = config
        ids = range(config.vocab_size) if config.draft_vocab_ids is None else config.draft_vocab_ids
        self._register_vocab(torch.tensor(list(ids)))
        self.embeddings = BorrowedEmbeddings(verifier.model, self.draft_vocab_ids)
        self.mask_embedding = self.markov = None
        attn = "eager" if verifier.model.config._attn_implementation == "eager" else "sdpa"
        self.stack = build_stack(base_config, attn)
        self.stack.layers[0].input_layernorm = nn.Identity()
        self.stack.norm = nn.Identity()
        hidden_size = base_config.hidden_size
        self.fc = nn.Linear(2 * hidden_size, hidden_size, bias=config.fc_bias)
        self.context = ContextSource(verifier, context_shape(verifier, (), (verifier.config.num_hidden_layers,)))
        verifier.output_features = True
        self._keep_exact_buffers()
        self.to(device=verifier.device, dtype=dtype)

    @classmethod
    def from_verifier(
        cls,
        verifier: HFVerifier,
        *,
        num_layers: int = 1,
        gamma: int = 3,
        feature_loss_weight: float = 1.0,
        layer_indices: Sequence[int] | None = None,
        draft_vocab_ids: Sequence[int] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> EagleDrafter:
        """A fresh head whose layers start from the verifier's (None: its last ones); see ``models.eagle_start``.

        Raises:
            ConfigError: a value out of range, or a verifier of another family.
        """
        base = base_of(verifier.model)
        indices = choose_layers(num_layers, len(base.layers), layer_indices, last=True)
        base_config = stack_config(base.config, indices)
        config = EagleConfig(
            gamma=gamma,
            num_layers=num_layers,
            layer_indices=indices,
            vocab_size=verifier.vocab_size,
            base_config=json.loads(base_config.to_json_string(use_diff=False)),
            feature_loss_weight=feature_loss_weight,
            draft_vocab_ids=None if draft_vocab_ids is None else [int(i) for i in draft_vocab_ids],
            verifier_name=verifier.name,
            verifier_fingerprint=verifier.fingerprint,
            tokenizer_fingerprint=tokenizer_fingerprint(verifier.tokenizer),
        )
        drafter = cls(config, verifier, base_config, dtype=dtype)
        start_layers(drafter, verifier)
        return drafter

    @property
    def max_gamma(self) -> int | None:
        """None: it can draft any number of positions."""
        return self.config.max_gamma  # type: ignore[no-any-return]

    @property
    def auxiliary_weight(self) -> float:
        """Of ``auxiliary_loss`` beside the objective."""
        return float(self.config.feature_loss_weight)

    def head_input(
        self, tokens: Int[Tensor, "*shape"], features: Float[Tensor, "*shape hidden"]
    ) -> Float[Tensor, "*shape hidden"]:
        """Input of the layers at ``tokens``; ``features``: hidden states of the tokens before them."""
        projected: Tensor = self.fc(torch.cat([self.embeddings.embed(tokens, self.dtype), features.to(self.dtype)], -1))
        return projected

    def true_features(self, batch: WindowBatch) -> Float[Tensor, "batch length hidden"]:
        """The verifier's hidden states after every token of the rollouts, in this head's dtype."""
        return self.context.read(batch).features().to(self.dtype)

    def window_states(self, batch: WindowBatch) -> Float[Tensor, "window gamma hidden"]:
        """Predicted hidden states of the token before each drafted position; ``states_logits`` is the head."""
        return unrolled_states(self, batch)

    def auxiliary_loss(self, batch: WindowBatch, states: Float[Tensor, "window gamma hidden"]) -> Float[Tensor, ""]:
        """EAGLE's regression: smooth L1 to the verifier's features, mean over channels, summed over the positions
        that the rollouts have, divided by gamma, so that a window counts as in the objectives' means."""
        features, num_steps = self.true_features(batch), states.shape[1]
        index = batch.anchor[:, None] + torch.arange(num_steps, device=states.device)
        exists = index < batch.lengths[batch.window_row][:, None]
        truth = features[batch.window_row[:, None], index.clamp(max=features.shape[1] - 1)]
        loss = functional.smooth_l1_loss(states.float(), truth.float(), reduction="none").mean(-1)
        return loss.masked_fill(~exists, 0.0).sum() / num_steps

    def start(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        max_new_tokens: int,
        verifier_session: HFVerifierSession | None = None,
    ) -> EagleSession:
        """Read the prompt with the verifier's hidden states of it and be ready to draft.

        Raises:
            ConfigError: empty prompt, an id outside the verifier's vocabulary, or no verifier session.
            MismatchError: the session is another verifier's, or one of another prompt.
        """
        self.check_prompt(prompt)
        return EagleSession(self, prompt, sampling, max_new_tokens, verifier_session)


def check_family(config: Any) -> None:
    """Raises ConfigError: layers that are not x += attention(norm(x)); x += mlp(norm(x)) with RMS norms."""
    if config.model_type not in PLAIN_TYPES:
        raise ConfigError(
            f"an EAGLE head of {config.model_type!r} layers: expected one of {', '.join(sorted(PLAIN_TYPES))}; use "
            "such a verifier or a block drafter"
        )
