"""Is a rule lossless? Exact answer by enumerating every random branch on a tiny vocabulary.

``EnumeratingRandomSource`` stands in for the seeded one; ``enumerate_outcomes`` replays a program until
each of its random branches was taken and adds up the probabilities in float64. Nothing is estimated, so a
gap of 1e-6 is a bug and not noise. To test a rule of your own:

    from specdiff2.evaluation.lossless_cases import worst_case_gap
    worst_case_gap(MyRule(), num_drafts=2)      # the case and its total variation: below 1e-12 when lossless

or, with your own tables, compare ``exact_output_law`` with ``verifier_law`` by ``total_variation``. Any
``Decoder`` can be enumerated as well: ``enumerate_outcomes(lambda rng: tuple(decoder.generate(...,
rng=rng).tokens))``. Knows no model and no file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdiff2.protocols import AcceptanceRule, RandomSource, Selector
from specdiff2.tree import TokenTree
from specdiff2.types import Acceptance, ConfigError, Draft, SpecDiffError

Outcome = TypeVar("Outcome", bound=Hashable)
Prefix = tuple[int, ...]
Table = Callable[[Prefix], Tensor]  # prefix -> law of the next token [vocab]
Propose = Callable[[Prefix, RandomSource], Draft]


class EnumeratingRandomSource:
    """A ``RandomSource`` that follows a script of branch numbers and takes branch 0 beyond its end.

    Attributes:
        probability: product of the probabilities of the branches taken so far.
        trail: (branch taken, number of branches) at each choice that had more than one.
    """

    def __init__(self, script: list[tuple[int, int]]) -> None:
        self._script = script
        self.trail: list[tuple[int, int]] = []
        self.probability = 1.0

    def bernoulli(self, prob: float) -> bool:
        if math.isnan(prob):
            raise SpecDiffError("bernoulli(nan): expected a number; guard the division 0/0 in the rule")
        clipped = min(1.0, max(0.0, prob))  # the seeded source also treats more than 1 as certain
        return bool(self._branch([1.0 - clipped, clipped]))

    def categorical(self, probs: Float[Tensor, " vocab"]) -> int:
        return self._branch(probs.detach().double().tolist())

    def chains(self, probs: Float[Tensor, "gamma draft_vocab"], num_chains: int) -> Int[Tensor, "K gamma"]:
        rows = probs.detach().double().tolist()
        return torch.tensor([[self._branch(row) for row in rows] for _ in range(num_chains)], dtype=torch.long)

    def _branch(self, weights: list[float]) -> int:
        """Index of the branch taken; impossible ones do not count, a certain one is not recorded."""
        total = math.fsum(weights)
        if not (math.isfinite(total) and total > 0.0) or min(weights) < 0.0:
            raise SpecDiffError(f"random branch with weights {weights}: expected finite numbers >= 0 with a sum > 0")
        options = [index for index, weight in enumerate(weights) if weight > 0.0]
        if len(options) == 1:
            return options[0]
        position, taken = len(self.trail), 0
        if position < len(self._script):
            taken, num_options = self._script[position]
            if num_options != len(options):
                raise SpecDiffError(
                    f"random choice {position} had {num_options} branches and now has {len(options)}: the enumerated "
                    "program must depend on its RandomSource only; remove other randomness and state kept between runs"
                )
        self.trail.append((taken, len(options)))
        self.probability *= weights[options[taken]] / total
        return options[taken]


def enumerate_outcomes(run: Callable[[RandomSource], Outcome], *, max_runs: int = 1_000_000) -> dict[Outcome, float]:
    """Exact law of ``run(rng)``: depth-first over every random branch, one replay per leaf.

    Args:
        run: must be deterministic given its RandomSource, and finite.

    Raises:
        ConfigError: more than ``max_runs`` leaves.
        SpecDiffError: ``run`` uses other randomness, or draws from weights that are no law.
    """
    masses: dict[Outcome, list[float]] = {}
    script: list[tuple[int, int]] = []
    for _ in range(max_runs):
        source = EnumeratingRandomSource(script)
        masses.setdefault(run(source), []).append(source.probability)
        script = source.trail
        while script and script[-1][0] + 1 == script[-1][1]:
            script.pop()
        if not script:
            return {outcome: math.fsum(mass) for outcome, mass in masses.items()}
        script[-1] = (script[-1][0] + 1, script[-1][1])
    raise ConfigError(
        f"enumeration exceeds max_runs={max_runs} random branches; use a smaller vocabulary, gamma, K or num_tokens"
    )


def total_variation(first: Mapping[Outcome, float], second: Mapping[Outcome, float]) -> float:
    """``0.5 * sum |a - b|``: the largest difference in probability of any event, 0..1."""
    return 0.5 * math.fsum(abs(first.get(key, 0.0) - second.get(key, 0.0)) for key in {*first, *second})


def verifier_law(verifier_table: Table, num_tokens: int, prefix: Prefix = ()) -> dict[Prefix, float]:
    """The verifier's own law of the ``num_tokens`` tokens after ``prefix``."""
    law: dict[Prefix, float] = {(): 1.0}
    for _ in range(num_tokens):
        law = {
            (*tokens, token): mass * prob
            for tokens, mass in law.items()
            for token, prob in enumerate(verifier_table(prefix + tokens).double().tolist())
            if prob > 0.0
        }
    return law


def independent_drafts(draft_probs: Tensor | Table, gamma: int, num_drafts: int) -> Propose:
    """Drafts as a position-factorised drafter draws them: K chains from ``draft_probs`` [gamma, vocab].

    ``draft_probs`` may also be a function of the prefix, since a drafter sees the committed tokens.
    """

    def propose(prefix: Prefix, rng: RandomSource) -> Draft:
        probs = (draft_probs if isinstance(draft_probs, Tensor) else draft_probs(prefix))[:gamma]
        return Draft(rng.chains(probs, num_drafts), probs)

    return propose


def speculative_round(
    rule: AcceptanceRule,
    selector: Selector | None,
    verifier_table: Table,
    propose: Propose,
    prefix: Prefix,
    rng: RandomSource,
) -> tuple[TokenTree, Acceptance]:
    """One round on tables: propose, build tree, score, accept. Does not check the combination: that it can
    show a biased one is its purpose."""
    draft = propose(prefix, rng)
    tree = TokenTree.from_chains(prefix[-1] if prefix else -1, draft.tokens)
    paths = [prefix]
    for parent, token in zip(tree.parents[1:], tree.tokens[1:], strict=True):
        paths.append((*paths[parent], token))
    verifier_probs = torch.stack([verifier_table(path) for path in paths])
    verified = tree if selector is None else tree.select(selector(tree, verifier_probs))
    return tree, rule(verified, verifier_probs, draft.draft_probs, rng)


def exact_output_law(
    rule: AcceptanceRule,
    selector: Selector | None,
    verifier_table: Table,
    draft_probs: Tensor | Table,
    gamma: int,
    num_drafts: int,
    num_tokens: int,
    *,
    propose: Propose | None = None,
    max_rounds: int | None = None,
) -> dict[Prefix, float]:
    """Law of the first ``num_tokens`` tokens of the full speculative loop.

    Each round is enumerated once per prefix it can start from. Use a table whose law depends on the prefix
    and ``num_tokens >= gamma + 1``, so that wrong conditioning and bonus tokens show.

    Args:
        propose: replaces independent draws from ``draft_probs`` (scripted or deterministic drafts).
        max_rounds: speculate for so many rounds and let the verifier draw the rest: by induction 1 is
            enough to prove a rule that keeps no state, and far cheaper. None: every round speculates.
    """
    draw = propose or independent_drafts(draft_probs, gamma, num_drafts)

    def continue_law(prefix: Prefix, rounds_left: int | None) -> dict[Prefix, float]:
        missing = num_tokens - len(prefix)
        if missing <= 0:
            return {(): 1.0}
        if rounds_left == 0:
            return verifier_law(verifier_table, missing, prefix)

        def one_round(rng: RandomSource) -> Prefix:
            tree, accepted = speculative_round(rule, selector, verifier_table, draw, prefix, rng)
            return (*(tree.tokens[node] for node in accepted.path), accepted.next_token)[:missing]

        law: dict[Prefix, float] = {}
        for tokens, mass in enumerate_outcomes(one_round).items():
            rest = continue_law(prefix + tokens, None if rounds_left is None else rounds_left - 1)
            for more, prob in rest.items():
                law[tokens + more] = law.get(tokens + more, 0.0) + mass * prob
        return law

    return continue_law((), max_rounds)
