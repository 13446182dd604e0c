"""The steps of one decoding round of one prompt: propose, build tree, accept, commit.

Scoring the tree lies between building and accepting; ``decoding.engine`` does it for one prompt, ``decoding.batch`` for
several in one pass. Everything else of a round is here, once for both.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specdiff2.decoding.greedy_law import draw
from specdiff2.decoding.stopping import Completion
from specdiff2.decoding.tree_growth import Grower, draft_law, path_session
from specdiff2.protocols import DrafterSession, DraftLaw, NodeProbs, RandomSource, VerifierSession
from specdiff2.tree import TokenTree
from specdiff2.types import Acceptance, Draft, Generation, NotLosslessError, RoundRecord

if TYPE_CHECKING:
    from specdiff2.decoding.engine import Drafting


@dataclass(slots=True)
class Row:
    """One completion while it is being decoded.

    Attributes:
        root: the last committed token.
        tree: the tree of this round, from ``grow_tree`` until ``finish``.
    """

    session: VerifierSession
    drafting: Drafting | None
    drafter: DrafterSession | None
    grow: Grower | None
    completion: Completion
    rng: RandomSource
    root: int
    prefill_s: float = 0.0
    rounds: list[RoundRecord] = field(default_factory=list)
    tree: TokenTree = field(default_factory=lambda: TokenTree.root_only(0))
    _proposal: Draft | DraftLaw | TokenTree | None = None

    @property
    def is_open(self) -> bool:
        return self.completion.stop_reason is None

    @property
    def gamma(self) -> int:
        """Positions to draft in this round: one token of the room is the verifier's own. 0: no draft is made."""
        if self.drafting is None or self.drafter is None:
            return 0
        return min(self.drafting.gamma, self.completion.num_left - 1)

    def propose(self) -> None:
        """Ask for drafts, the law to grow a tree from, or a tree that took the drafter's passes to grow."""
        self._proposal = self._proposed(self.gamma)

    def grow_tree(self) -> None:
        """The tree to score, fixed before the verifier looks."""
        proposal = self._proposal
        if isinstance(proposal, TokenTree):
            self.tree = proposal
        elif isinstance(proposal, Draft):
            self.tree = TokenTree.from_chains(self.root, proposal.tokens)
        elif proposal is None or self.grow is None:
            self.tree = TokenTree.root_only(self.root)
        else:
            self.tree = self.grow(proposal, self.root)

    def finish(self, verifier_probs: NodeProbs) -> RoundRecord:
        """Accept and commit, given the verifier's law after each node of the tree."""
        accepted = self._accept(verifier_probs)
        new_tokens = [self.tree.tokens[node] for node in accepted.path] + [accepted.next_token]
        num_kept = self.completion.push(new_tokens)
        if self.is_open:
            self._commit(accepted, new_tokens)
        self.root = accepted.next_token
        self.rounds.append(_record(self._proposal, self.tree, accepted, num_kept))
        return self.rounds[-1]

    def generation(self) -> Generation:
        """The finished completion."""
        completion = self.completion
        decode_s = sum(record.draft_s + record.verify_s + record.other_s for record in self.rounds)
        return Generation(
            completion.tokens, self.rounds, completion.reason(), completion.text(), self.prefill_s, decode_s
        )

    def _proposed(self, gamma: int) -> Draft | DraftLaw | TokenTree | None:
        drafting, drafter = self.drafting, self.drafter
        if drafting is None or drafter is None or gamma < 1:
            return None
        if drafting.growth is not None and drafting.growth.settings.shape != "best_first":
            return drafting.growth.along_paths(path_session(drafting.drafter, drafter), self.root, gamma)
        if drafting.growth is not None:
            return draft_law(drafting.drafter, drafter, gamma)
        draft = drafter.propose(gamma, drafting.num_drafts, self.rng, needs_probs=drafting.rule.reads_draft_probs)
        if drafting.rule.reads_draft_probs and bool((draft.tokens < 0).any()):
            raise NotLosslessError(
                f"rule {drafting.rule.name!r} got drafts that end early (-1 in Draft.tokens): it needs every token of "
                "the window drawn from draft_probs; use rule greedy or tree_match with this drafter"
            )
        return draft

    def _accept(self, verifier_probs: NodeProbs) -> Acceptance:
        """Let the rule walk the tree, cut down to the selected chain where there is a selector."""
        drafting, proposal, tree = self.drafting, self._proposal, self.tree
        if drafting is None or proposal is None:
            return Acceptance([], draw(verifier_probs, 0, self.rng))
        if drafting.selector is not None:
            tree = tree.select(drafting.selector(tree, verifier_probs))
        draft_probs = proposal.draft_probs if isinstance(proposal, Draft) else None
        return drafting.rule(tree, verifier_probs, draft_probs, self.rng)

    def _commit(self, accepted: Acceptance, new_tokens: list[int]) -> None:
        features = self.session.features(accepted.path)  # first: the commit ends the life of the tree
        self.session.commit(accepted.path, accepted.next_token)
        if self.drafter is not None:
            self.drafter.observe(new_tokens, features)
        if self.grow is not None:
            self.grow.observe(new_tokens)


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
