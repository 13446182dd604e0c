"""The session of a drafter with another tokenizer: what it shows, what it proposes, what it refuses."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from helpers import Tab, byte_tokenizer
from other_tokenizers import ScriptedDrafter, ScriptedInner, byte_bpe, spm_bpe

from specdiff2.decoding.acceptance import LeviathanRule
from specdiff2.decoding.samplers import make_decoder
from specdiff2.decoding.speculative import SpeculativeDecoder
from specdiff2.decoding.tree_growth import draft_law
from specdiff2.models.retokenized_session import RetokenizedSession
from specdiff2.models.tokenizer_bridge import TokenizerBridge
from specdiff2.rng import TorchRandomSource
from specdiff2.types import ConfigError, SamplingParams

RNG = TorchRandomSource(0)
PROMPT_TEXT = "the answer is"


@pytest.fixture(scope="module")
def bridge() -> TokenizerBridge:
    return TokenizerBridge(spm_bpe(), byte_tokenizer())


def constant(*rows: list[int]):
    length = max(map(len, rows))
    tokens = torch.tensor([row + [-1] * (length - len(row)) for row in rows])
    return lambda view, gamma, num_drafts, rng: tokens


def session_of(bridge: TokenizerBridge, script) -> RetokenizedSession:
    prompt = bridge.verifier.encode(PROMPT_TEXT, prefix=True)
    return ScriptedDrafter(bridge, 4, script).start(prompt, SamplingParams(), 20)


def test_drafts_come_out_in_verifier_ids_padded_behind_their_ends(bridge: TokenizerBridge) -> None:
    say = [bridge.drafter.encode(text, prefix=False) for text in (" 42.", " 1", " 42. So")]
    session = session_of(bridge, constant(*say, [1], [*say[1], 2]))
    draft = session.propose(3, 5, RNG, needs_probs=False)
    known = bridge.verifier
    wanted = [known.encode(text, prefix=False) for text in (" 42.", " 1", " 42. So", "")] + [
        [*known.encode(" 1", prefix=False), 2]
    ]
    assert draft.draft_probs is None and draft.tokens.dtype == torch.int64
    longest = min(3, max(map(len, wanted)))
    assert draft.tokens.tolist() == [(ids[:3] + [-1] * longest)[:longest] for ids in wanted]
    assert len(wanted[2]) > 3 > len(wanted[1])  # one is cut, one is padded


def test_nothing_that_survives_is_a_draft_of_no_tokens(bridge: TokenizerBridge) -> None:
    for script in (constant([1, 5], [0, 5]), constant([-1], [-1]), lambda *a: torch.empty((2, 0), dtype=torch.long)):
        assert session_of(bridge, script).propose(3, 2, RNG, needs_probs=False).tokens.shape == (2, 0)


def test_the_drafter_sees_the_committed_text_in_its_own_ids(bridge: TokenizerBridge) -> None:
    seen: list[list[int]] = []

    def script(view, gamma, num_drafts, rng):
        seen.append(list(view))
        assert (gamma, num_drafts) == (4, 2)
        return torch.tensor([[5], [6]])

    session, text = session_of(bridge, script), PROMPT_TEXT
    session.propose(4, 2, RNG, needs_probs=False)
    for more in (" forty", "-two", ".", "\n今"):
        session.observe(bridge.verifier.encode(more, prefix=False))
        text += more
        session.propose(4, 2, RNG, needs_probs=False)
    texts = [PROMPT_TEXT, *(text[: text.index(end) + len(end)] for end in ("forty", "two", ".", "今"))]
    assert seen == [spm_bpe()(part)["input_ids"] for part in texts]


def test_rules_that_read_the_law_are_refused(bridge: TokenizerBridge) -> None:
    session = session_of(bridge, constant([5]))
    with pytest.raises(ConfigError, match="greedy or tree_match"):
        session.propose(2, 1, RNG, needs_probs=True)
    verifier = Tab([1 / 296] * 296, tokenizer=byte_tokenizer())
    drafter = ScriptedDrafter(bridge, 4, constant([5]))
    decoder = SpeculativeDecoder(verifier, drafter, rule=LeviathanRule())
    with pytest.raises(ConfigError, match="greedy or tree_match"):
        decoder.generate([5, 6], max_new_tokens=4)


def test_there_is_no_law_to_grow_a_tree_from(bridge: TokenizerBridge) -> None:
    drafter = ScriptedDrafter(bridge, 4, constant([5]))
    session = session_of(bridge, constant([5]))
    with pytest.raises(ConfigError, match="RetokenizedSession has no law"):
        draft_law(drafter, session, 4)
    verifier = Tab([1 / 296] * 296, tokenizer=byte_tokenizer())
    decoder = make_decoder(verifier, drafter, sampler="tree", num_nodes=8)
    with pytest.raises(ConfigError, match="has no law"):
        decoder.generate([5, 6], max_new_tokens=4)


@dataclass
class ConfidentInner(ScriptedInner):
    """Proposes as many tokens as its setting says."""

    tokens: list[int] = field(default_factory=list)
    min_confidence: float = 0.0

    def propose(self, gamma, num_drafts, rng, *, needs_probs=False):
        self._script = constant([5] * (1 if self.min_confidence > 0.5 else gamma))
        return super().propose(gamma, num_drafts, rng, needs_probs=needs_probs)


def test_min_confidence_is_the_drafters_own_and_absent_without_one(bridge: TokenizerBridge) -> None:
    confident = RetokenizedSession(ConfidentInner(), bridge.start([10]))
    assert confident.min_confidence == 0.0
    long = confident.propose(4, 1, RNG).tokens.shape[1]
    confident.min_confidence = 0.9
    assert 0 < confident.propose(4, 1, RNG).tokens.shape[1] < long
    assert not hasattr(session_of(bridge, constant([5])), "min_confidence")
    decoder = SpeculativeDecoder(
        Tab([1 / 296] * 296), ScriptedDrafter(bridge, 4, constant([5])), rule=LeviathanRule(), min_confidence=0.5
    )
    with pytest.raises(ConfigError, match="min_confidence"):
        decoder.generate([5, 6], max_new_tokens=4)


def test_a_prompt_of_a_chat_with_another_tokenizers_special_tokens() -> None:
    chatml = byte_bpe()
    bridge = TokenizerBridge(spm_bpe(), chatml)
    prompt = chatml("<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    session = ScriptedDrafter(bridge, 4, constant([*bridge.drafter.encode("4", prefix=False), 2])).start(
        prompt, SamplingParams(), 9
    )
    assert session.propose(4, 1, RNG).tokens.tolist() == [[*chatml("4")["input_ids"], 2]]
