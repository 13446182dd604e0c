"""Decoding with an EAGLE head: T=0 equals the verifier alone, the law at T>0 is the verifier's, case 21 end to end."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from helpers import random_tokens, reference_greedy, tiny_verifier

from specdiff2.data.windows import WindowCollator
from specdiff2.decoding.samplers import make_decoder
from specdiff2.evaluation.losslessness import enumerate_outcomes, total_variation, verifier_law
from specdiff2.functional.sampling import logits_to_probs
from specdiff2.models.eagle_drafter import EagleDrafter
from specdiff2.models.eagle_session import EagleSession
from specdiff2.models.eagle_start import fit_fc
from specdiff2.objectives import CrossEntropy
from specdiff2.rng import TorchRandomSource
from specdiff2.types import Draft, Rollout, SamplingParams

SAMPLERS = [("eagle", {}), ("eagle2", {}), ("eagle2", {"branching": 2, "num_nodes": 5}), ("specdiff", {}),
            ("eagle", {"rank_paths": [[0, 0, 0], [1, 0], [2]]}), ("specdiff2", {"num_drafts": 3}),
            ("tree_match", {"num_drafts": 3}), ("leviathan", {}), ("block", {})]  # fmt: skip


def make_head(vocab: int = 64, dtype: torch.dtype = torch.float32, **changes: Any) -> tuple[Any, EagleDrafter]:
    verifier = tiny_verifier(vocab, dtype, seed=3, **changes)
    drafter = EagleDrafter.from_verifier(verifier, gamma=3, dtype=dtype)
    fit_fc(drafter, [(random_tokens(30, seed, vocab), 2) for seed in range(6)])
    return verifier, drafter.eval()


# ---------------------------------------------------------------- T = 0
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("eos_ids", [None, [17, 40]])
def test_greedy_output_is_the_verifiers(dtype: torch.dtype, eos_ids: list[int] | None) -> None:
    verifier, drafter = make_head(dtype=dtype, eos_ids=eos_ids)
    streaks = 0
    for prompt in ([5], random_tokens(9, seed=4)):
        expected = reference_greedy(verifier.model, prompt, 16, eos_ids=eos_ids or ())
        for sampler, options in SAMPLERS:
            decoder = make_decoder(verifier, drafter, sampler=sampler, **options)
            generation = decoder.generate(prompt, max_new_tokens=16, rng=TorchRandomSource(1))
            assert generation.tokens == expected, (sampler, options)
            streaks += sum(record.num_accepted for record in generation.rounds)
            assert max(record.num_drafted for record in generation.rounds) <= 5
    assert streaks > 0  # drafts are accepted, or nothing would be tested


def test_a_shifted_drafter_cannot_change_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losslessness does not rest on the head: with features of the wrong tokens the text stays the same."""
    verifier, drafter = make_head()
    observe = EagleSession.observe
    monkeypatch.setattr(EagleSession, "observe", lambda self, t, f=None: observe(self, t, f.roll(1, 0)))
    for sampler, options in SAMPLERS:
        decoder = make_decoder(verifier, drafter, sampler=sampler, **options)
        assert decoder.generate([5, 9, 33], max_new_tokens=16).tokens == reference_greedy(
            verifier.model, [5, 9, 33], 16
        )


# ---------------------------------------------------------------- T > 0, every random branch
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(0.6, top_k=2, top_p=0.9)], ids=["plain", "cut"])
@pytest.mark.parametrize(
    ("sampler", "options"),
    [("eagle", {"num_nodes": 4}), ("eagle2", {"branching": 2, "num_nodes": 4}), ("leviathan", {}), ("specdiff", {})],
)
def test_the_law_is_the_verifiers(sampler: str, options: dict, sampling: SamplingParams) -> None:
    """Two rounds at least: the second one's law depends on what the first one left in the head's cache."""
    vocab, num_tokens, prompt = 3, 3, (1, 2)
    verifier, drafter = make_head(vocab, torch.float64)

    def law(tokens: tuple[int, ...]) -> torch.Tensor:
        with torch.no_grad():
            return logits_to_probs(verifier.model(torch.tensor([tokens])).logits[0, -1], sampling)

    draft = {"draft_sampling": SamplingParams(0.8, top_k=2)} if sampler == "leviathan" else {}
    decoder = make_decoder(verifier, drafter, sampler=sampler, gamma=2, verifier_sampling=sampling, **draft, **options)
    output = enumerate_outcomes(
        lambda rng: tuple(decoder.generate(list(prompt), max_new_tokens=num_tokens, rng=rng).tokens)
    )
    assert total_variation(output, verifier_law(law, num_tokens, prompt)) < 1e-7  # norms round to float32 inside
    if sampler == "leviathan" and sampling.top_k:
        broken = make_decoder(
            verifier, WrongProbs(drafter), sampler=sampler, gamma=2, verifier_sampling=sampling, **draft
        )
        output = enumerate_outcomes(
            lambda rng: tuple(broken.generate(list(prompt), max_new_tokens=num_tokens, rng=rng).tokens)
        )
        assert total_variation(output, verifier_law(law, num_tokens, prompt)) > 1e-3


class WrongProbs:
    """The planted fault: the law of the first position is told for every position."""

    needs_verifier_session, max_gamma = True, None

    def __init__(self, drafter: EagleDrafter) -> None:
        self.drafter, self.gamma = drafter, drafter.gamma

    def start(self, *args: Any, **kwargs: Any) -> Any:
        session = self.drafter.start(*args, **kwargs)
        propose = session.propose

        def wrong(*args: Any, **kwargs: Any) -> Any:
            draft = propose(*args, **kwargs)
            return Draft(draft.tokens, draft.draft_probs[:1].expand_as(draft.draft_probs))

        session.propose = wrong
        return session


# ---------------------------------------------------------------- case 21
def test_case_21_a_trained_head_fills_the_window_and_a_shift_breaks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trained on the verifier's own greedy text through the shipped collator: full windows there and when decoding."""
    verifier, drafter = make_head()
    prompts = [random_tokens(4, seed) for seed in range(3)]
    rollouts = [
        Rollout(f"r{i}", prompt, reference_greedy(verifier.model, prompt, 24), 0.0) for i, prompt in enumerate(prompts)
    ]
    batch = WindowCollator(3, 64, fixed=True)(rollouts)
    objective, targets = CrossEntropy(1.0), drafter.to_draft_vocab(batch.targets)
    memory: dict[tuple[int, ...], torch.Tensor] = {}

    def remember(ids: list[int], compute: Any) -> torch.Tensor:
        return memory.setdefault(tuple(ids), compute(ids)) if tuple(ids) not in memory else memory[tuple(ids)]

    drafter.context.memory = remember
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3, weight_decay=0.0)
    losses = []
    for _ in range(250):
        states = drafter.window_states(batch)
        output = objective(drafter.states_logits(states, batch.targets), targets, batch.valid)
        loss = output.loss_sum / batch.num_windows + 0.1 * drafter.auxiliary_loss(batch, states) / batch.num_windows
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    whole = batch.valid.all(-1)
    assert losses[-1] < 0.1 * losses[0] and float(output.streak[whole].min()) > 2.7
    shifted = objective(drafter(batch), targets.roll(1, -1), batch.valid)
    assert float(shifted.loss_sum) > 20 * float(output.loss_sum)

    decode = partial(make_decoder(verifier, drafter, sampler="specdiff").generate, prompts[0], max_new_tokens=21)
    rounds = decode().rounds
    assert [r.num_accepted for r in rounds][:4] == [3, 3, 3, 3] and len(rounds) == 6
    observe = EagleSession.observe  # tokens one place late: each is read with the feature of another
    monkeypatch.setattr(EagleSession, "observe", lambda self, t, f=None: observe(self, [t[-1], *t[:-1]], f))
    assert sum(r.num_accepted for r in decode().rounds) < sum(r.num_accepted for r in rounds)
