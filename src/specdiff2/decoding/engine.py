"""Speculative decoding of one prompt: propose, build tree, score, accept, commit.

``decode`` is the one loop behind every decoder: without ``drafting`` each round is a tree of the root alone,
which is autoregressive decoding. It knows no particular verifier, drafter or rule; those come in through
``protocols``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from specdiff2.decoding.greedy_law import draw
from specdiff2.decoding.probs import ProbsBuffer
from specdiff2.decoding.stopping import Completion, OnTokens
from specdiff2.decoding.timing import Stopwatch
from specdiff2.decoding.tree_growth import Grower, TreeGrowth, draft_law, path_session
from specdiff2.protocols import (
    AcceptanceRule,
    ConditionedDrafter,
    Drafter,
    DrafterSession,
    DraftLaw,
    NodeProbs,
    RandomSource,
    Selector,
    Verifier,
    VerifierSession,
)
from specdiff2.tree import TokenTree
from specdiff2.types import (
    Acceptance,
    ConfigError,
    Draft,
    Generation,
    NotLosslessError,
    RoundRecord,
    SamplingParams,
)


@dataclass(frozen=True, slots=True)
class Drafting:
    """Who drafts, how much, and which rule decides about it.

    ``growth`` None: ``num_drafts`` chains are drawn; else a tree is grown from the drafter's untempered law, and
    ``num_drafts`` and ``sampling`` have no part in it.
    """

    drafter: Drafter
    rule: AcceptanceRule
    selector: Selector | None
    gamma: int
    num_drafts: int
    sampling: SamplingParams
    growth: TreeGrowth | None = None
    min_confidence: float = 0.0
    denoising_steps: int | None = None  # passes of a window drafter; None: its own


def decode(
    verifier: Verifier,
    prompt: Sequence[int],
    *,
    sampling: SamplingParams,
    drafting: Drafting | None,
    max_new_tokens: int,
    rng: RandomSource,
    stop_ids: Collection[int] = (),
    stop_strings: Sequence[str] = (),
    on_tokens: OnTokens | None = None,
) -> Generation:
    """Continue ``prompt`` until EOS, a stop id or string, or ``max_new_tokens``; the text follows the verifier's law.

    ``draft_s`` is the time in the drafter's ``propose``, ``law`` or passes over paths, ``verify_s`` in the verifier's
    ``score``, ``other_s`` everything else of the round. A window is shortened only to what ``max_new_tokens`` leaves
    room for and to what a grown tree holds, both known before the verifier looks; with room for one token no draft is
    made.

    Raises:
        ConfigError: a stop id outside the vocabulary; see ``Completion`` and ``Verifier.start``.
    """
    completion = Completion(
        max_new_tokens=max_new_tokens,
        eos_ids=verifier.eos_ids,
        stop_ids=stop_ids,
        stop_strings=stop_strings,
        tokenizer=getattr(verifier, "tokenizer", None),
        on_tokens=on_tokens,
    )
    if any(token >= verifier.vocab_size for token in stop_ids):
        raise ConfigError(
            f"stop_ids={list(stop_ids)!r}: expected ids below {verifier.vocab_size}, the verifier's tokens"
        )
    with torch.no_grad():  # not inference_mode: a drafter in training may keep a tensor it makes in here
        watch = Stopwatch(getattr(verifier, "device", None))
        session = verifier.start(prompt, max_new_tokens)
        drafter = _start(drafting, prompt, max_new_tokens, session) if drafting else None
        grow = drafting.growth.start(prompt) if drafting and drafting.growth else None
        prefill_s = watch.lap()
        rounds = _decode_rounds(
            prompt[-1], session, drafting, drafter, grow, completion, ProbsBuffer(sampling), rng, watch
        )
    decode_s = sum(record.draft_s + record.verify_s + record.other_s for record in rounds)
    return Generation(completion.tokens, rounds, completion.reason(), completion.text(), prefill_s, decode_s)


def start_drafter(
    drafter: Drafter,
    prompt: Sequence[int],
    sampling: SamplingParams,
    max_new_tokens: int,
    session: VerifierSession | None,
) -> DrafterSession:
    """The drafter's session; a conditioned drafter reads the verifier's."""
    if getattr(drafter, "needs_verifier_session", False):
        conditioned = cast(ConditionedDrafter, drafter)
        return conditioned.start(prompt, sampling, max_new_tokens, verifier_session=cast(VerifierSession, session))
    return drafter.start(prompt, sampling, max_new_tokens)


def shorten_windows(started: DrafterSession, drafter: Drafter, min_confidence: float) -> None:
    """Tell a session to end drafts before their confidence falls below ``min_confidence``; 0 asks for nothing.

    Raises:
        ConfigError: this drafter cannot shorten its window.
    """
    if min_confidence <= 0.0:
        return
    if not hasattr(started, "min_confidence"):
        raise ConfigError(
            f"min_confidence={min_confidence} with drafter {type(drafter).__name__}, which cannot shorten "
            "its window; use 0, or a BlockDrafter"
        )
    started.min_confidence = min_confidence


def change_steps(started: DrafterSession, drafter: Drafter, denoising_steps: int | None) -> None:
    """Tell a session to fill each window in ``denoising_steps`` passes; None asks for nothing.

    Raises:
        ConfigError: this drafter fills no masked windows.
    """
    if denoising_steps is None:
        return
    if not hasattr(started, "denoising_steps"):
        raise ConfigError(
            f"denoising_steps={denoising_steps} with drafter {type(drafter).__name__}, which does not fill masked "
            "windows with the verifier's tokens; use null, or a block drafter"
        )
    started.denoising_steps = denoising_steps


def _start(drafting: Drafting, prompt: Sequence[int], max_new_tokens: int, session: VerifierSession) -> DrafterSession:
    """The drafter's session, told when to shorten its window and how to fill it."""
    started = start_drafter(drafting.drafter, prompt, drafting.sampling, max_new_tokens, session)
    shorten_windows(started, drafting.drafter, drafting.min_confidence)
    change_steps(started, drafting.drafter, drafting.denoising_steps)
    return started


def _decode_rounds(
    root: int,
    session: VerifierSession,
    drafting: Drafting | None,
    drafter: DrafterSession | None,
    grow: Grower | None,
    completion: Completion,
    to_probs: ProbsBuffer,
    rng: RandomSource,
    watch: Stopwatch,
) -> list[RoundRecord]:
    """Propose, build tree, score, accept, commit, until the completion ends. ``root``: the last committed token."""
    rounds = []
    while completion.stop_reason is None:
        proposal = _propose(drafting, drafter, root, completion.num_left - 1, rng)
        watch.mark()
        tree = _tree(grow, proposal, root)
        watch.mark()
        logits = session.score(tree)
        watch.mark()
        accepted = _accept(drafting, proposal, tree, to_probs(logits), rng)
        new_tokens = [tree.tokens[node] for node in accepted.path] + [accepted.next_token]
        num_kept = completion.push(new_tokens)
        if completion.stop_reason is None:
            _commit(session, drafter, grow, accepted, new_tokens)
        root = accepted.next_token
        record = _record(proposal, tree, accepted, num_kept)
        record.draft_s, tree_s, record.verify_s, rest_s = watch.laps()
        record.other_s = tree_s + rest_s
        rounds.append(record)
    return rounds


def _propose(
    drafting: Drafting | None, drafter: DrafterSession | None, root: int, num_fitting: int, rng: RandomSource
) -> Draft | DraftLaw | TokenTree | None:
    """Drafts, the law to grow a tree from, or a tree that took the drafter's passes to grow, for at most
    ``num_fitting`` positions (one token of the room is the verifier's own)."""
    if drafting is None or drafter is None or num_fitting < 1:
        return None
    gamma = min(drafting.gamma, num_fitting)
    if drafting.growth is not None and drafting.growth.settings.shape != "best_first":
        return drafting.growth.along_paths(path_session(drafting.drafter, drafter), root, gamma)
    if drafting.growth is not None:
        return draft_law(drafting.drafter, drafter, gamma)
    draft = drafter.propose(gamma, drafting.num_drafts, rng, needs_probs=drafting.rule.reads_draft_probs)
    if drafting.rule.reads_draft_probs and bool((draft.tokens < 0).any()):
        raise NotLosslessError(
            f"rule {drafting.rule.name!r} got drafts that end early (-1 in Draft.tokens): it needs every token of the "
            "window drawn from draft_probs; use rule greedy or tree_match with this drafter"
        )
    return draft


def _tree(grow: Grower | None, proposal: Draft | DraftLaw | TokenTree | None, root: int) -> TokenTree:
    """The tree to score, fixed before the verifier looks."""
    if isinstance(proposal, TokenTree):
        return proposal
    if isinstance(proposal, Draft):
        return TokenTree.from_chains(root, proposal.tokens)
    if proposal is None or grow is None:
        return TokenTree.root_only(root)
    return grow(proposal, root)


def _accept(
    drafting: Drafting | None,
    proposal: Draft | DraftLaw | TokenTree | None,
    tree: TokenTree,
    verifier_probs: NodeProbs,
    rng: RandomSource,
) -> Acceptance:
    """Let the rule walk the tree, cut down to the selected chain where there is a selector."""
    if drafting is None or proposal is None:
        return Acceptance([], draw(verifier_probs, 0, rng))
    if drafting.selector is not None:
        tree = tree.select(drafting.selector(tree, verifier_probs))
    draft_probs = proposal.draft_probs if isinstance(proposal, Draft) else None
    return drafting.rule(tree, verifier_probs, draft_probs, rng)


def _record(
    proposal: Draft | DraftLaw | TokenTree | None, tree: TokenTree, accepted: Acceptance, num_kept: int
) -> RoundRecord:
    num_accepted = min(len(accepted.path), num_kept)
    record = RoundRecord(tree.depth, num_accepted, num_kept, tree.num_nodes)
    if isinstance(proposal, Draft):
        along = tree.chains_along(accepted.path[:num_accepted])
        record.num_drafted = max((len(tree.chain_nodes[chain]) for chain in along), default=0)
        if proposal.sources is not None:
            record.winners = sorted({proposal.sources[chain] for chain in along}) if num_accepted else []
    if num_kept <= len(accepted.path):  # the output ended inside the draft: no later position was reached
        record.num_drafted = num_accepted
    return record


def _commit(
    session: VerifierSession,
    drafter: DrafterSession | None,
    grow: Grower | None,
    accepted: Acceptance,
    new_tokens: list[int],
) -> None:
    features = session.features(accepted.path)  # first: the commit ends the life of the tree
    session.commit(accepted.path, accepted.next_token)
    if drafter is not None:
        drafter.observe(new_tokens, features)
    if grow is not None:
        grow.observe(new_tokens)
