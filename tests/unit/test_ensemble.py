"""Several drafters: entries, shares, sessions, refusals, who won, and real models at temperature 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    FunctionDrafter,
    PerfectDrafter,
    RandomDrafter,
    Script,
    Tab,
    WrongDrafter,
    char_tokenizer,
    random_tokens,
    reference_greedy,
    tiny_verifier,
)
from torch import Tensor

from specdiff2 import SpeculativeDecoder
from specdiff2.decoding.drafter_entries import DrafterEntry, gather, num_drafts_of, read_entries
from specdiff2.decoding.ensemble import DrafterEnsemble, Member, single_drafters
from specdiff2.decoding.loading import load_speculative_decoder
from specdiff2.decoding.samplers import make_decoder
from specdiff2.evaluation.decoder_info import describe_decoder
from specdiff2.models.block_drafter import BlockDrafter
from specdiff2.models.pretrained import save_drafter
from specdiff2.models.verifier import HFVerifier
from specdiff2.protocols import Drafter
from specdiff2.rng import TorchRandomSource
from specdiff2.runtime.compilation import warm_passes
from specdiff2.runtime.factories import SamplerSettings
from specdiff2.tree import TokenTree
from specdiff2.types import ConfigError, NotLosslessError, SamplingParams

GREEDY, WARM = SamplingParams(0.0), SamplingParams(1.0)
PROMPT, NUM_NEW = [5, 9, 33, 7, 21], 24


def counting(vocab: int = 16, **options: Any) -> Tab:
    """Greedy decoding counts upwards from the last token."""

    def law(context: tuple[int, ...]) -> Tensor:
        probs = torch.full((vocab,), 0.1 / vocab, dtype=torch.float64)
        probs[(context[-1] + 1) % vocab] += 0.9
        return probs

    return Tab(law, sampling=GREEDY, **options)


def ensemble_of(*drafters: Drafter, num_drafts: int = 1) -> DrafterEnsemble:
    return DrafterEnsemble([Member(f"d{i}", drafter, num_drafts, WARM) for i, drafter in enumerate(drafters)])


# ---------------------------------------------------------------- entries
def test_entries_get_names_that_tell_them_apart() -> None:
    entries = read_entries(
        [
            {"drafter": "shipped", "K": 4},
            {"drafter": "shipped", "K": 2, "temperature": 0.5},
            {"drafter": "outputs/drafters/smollm2_prefix/best"},
            {"drafter": Path("a/b/c"), "name": "mine", "temperature": 1.0},
            {"drafter": RandomDrafter(64, 3), "temperature": 0.3},
        ]
    )
    names = ["shipped", "shipped T=0.5", "smollm2_prefix/best", "mine", "FunctionDrafter"]
    assert [entry.name for entry in entries] == names and num_drafts_of(entries) == 9


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ([], "expected a list"),
        ({"drafter": "a"}, "expected a list"),
        ("shipped", "expected a list"),
        (["shipped"], r"drafters\[0\]='shipped': expected a mapping"),
        ([{"K": 2}], r"drafters\[0\]=.*key `drafter`"),
        ([{"drafter": "a"}, {"drafter": "b", "k": 2}], r"drafters\[1\]=.*K, temperature, name"),
        ([{"drafter": "a", "K": 0}], "K=0 of drafter 'a'"),
        ([{"drafter": "a", "K": 1.5}], "K=1.5"),
        ([{"drafter": "a", "K": True}], "K=True"),
        ([{"drafter": "a", "temperature": -1.0}], "temperature=-1.0"),
        ([{"drafter": "a", "name": ""}], "name=''"),
        ([{"drafter": ""}], "drafter=''"),
        ([{"drafter": 3}], "drafter=3"),
        ([{"drafter": None}], "drafter=None"),
        ([{"drafter": "a"}, {"drafter": "a", "K": 2}], "2 entries are called 'a'"),
        ([{"drafter": "x/a", "name": "m"}, {"drafter": "y/a", "name": "m"}], "2 entries are called 'm'"),
    ],
)
def test_bad_entries_are_refused_by_name(entries: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_entries(entries)


def test_temperatures_of_entry_sampler_or_number_of_drafts() -> None:
    def temperature(own: float | None, k: int, sampler: float | None) -> float:
        return DrafterEntry("a", k, own).sampling(sampler, 0, 1.0).temperature

    assert [temperature(None, 1, None), temperature(None, 4, None)] == [0.0, 1.0]
    assert [temperature(None, 1, 0.7), temperature(0.2, 4, 0.7), temperature(0.0, 4, 0.7)] == [0.7, 0.2, 0.0]
    assert DrafterEntry("a").sampling(None, 5, 0.9) == SamplingParams(0.0, 5, 0.9)


def test_a_drafter_named_twice_is_loaded_once() -> None:
    loaded: dict[str, Drafter] = {}
    entries = read_entries([{"drafter": n, "temperature": t} for n, t in (("a", 0.0), ("b", 0.0), ("a", 1.0))])
    ensemble = gather(entries, lambda name: loaded.setdefault(name, RandomDrafter(64, 3)))
    assert list(loaded) == ["a", "b"]
    assert [member.drafter for member in ensemble.members] == [loaded["a"], loaded["b"], loaded["a"]]
    assert single_drafters(ensemble) == [loaded["a"], loaded["b"]] and single_drafters(loaded["a"]) == [loaded["a"]]


# ---------------------------------------------------------------- the ensemble and its session
def test_gamma_is_the_smallest_and_drafts_add_up() -> None:
    ensemble = DrafterEnsemble(
        [Member("a", RandomDrafter(64, 5), 3, WARM), Member("b", RandomDrafter(64, 3), 2, GREEDY)]
    )
    assert (ensemble.gamma, ensemble.num_drafts, ensemble.needs_verifier_session) == (3, 5, False)


def test_an_ensemble_of_nothing_or_of_namesakes_is_refused() -> None:
    member = Member("a", RandomDrafter(64, 5), 1, WARM)
    for members, named in (
        ([], "at least one member"), ([member, member], "two drafters named 'a'"),
        ([Member("a", member.drafter, 0, WARM)], "with 0 drafts"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=named):
            DrafterEnsemble(members)


def test_drafts_are_padded_and_attributed() -> None:
    def ends_after(length: int, token: int) -> FunctionDrafter:
        return FunctionDrafter(4, lambda context, gamma, k, rng: (torch.full((k, min(length, gamma)), token), None))

    parts = (("a", ends_after(2, 7), 2), ("b", ends_after(0, 8), 1), ("c", ends_after(4, 9), 1))
    ensemble = DrafterEnsemble([Member(*part, WARM) for part in parts])
    session = ensemble.start(PROMPT, SamplingParams(), 20)
    draft = session.propose(4, 4, TorchRandomSource(0), needs_probs=False)
    assert draft.tokens.tolist() == [[7, 7, -1, -1], [7, 7, -1, -1], [-1] * 4, [9] * 4]
    assert draft.sources == (0, 0, 1, 2) and draft.draft_probs is None
    assert session.propose(1, 4, TorchRandomSource(0), needs_probs=False).tokens.tolist() == [[7], [7], [-1], [9]]
    silent = ensemble_of(ends_after(0, 7), ends_after(0, 8)).start(PROMPT, SamplingParams(), 20)
    assert silent.propose(4, 2, TorchRandomSource(0), needs_probs=False).tokens.shape == (2, 0)


def test_what_a_session_cannot_do_is_refused() -> None:
    ensemble = ensemble_of(RandomDrafter(64, 3), RandomDrafter(64, 3))
    session = ensemble.start(PROMPT, SamplingParams(), 20)
    with pytest.raises(ConfigError, match="K=3 with several drafters that draft 2 in all"):
        session.propose(3, 3, TorchRandomSource(0), needs_probs=False)
    with pytest.raises(ConfigError, match="each of its drafters has its own"):
        ensemble.start(PROMPT, GREEDY, 20)
    with pytest.raises(ConfigError, match="FunctionDrafter, which cannot shorten"):
        make_decoder(counting(), ensemble, sampler="tree_match", min_confidence=0.5).generate([0], max_new_tokens=4)


def test_every_member_observes_what_was_committed() -> None:
    """The right one is right in every round although the other one drafts, and is accepted, as well."""
    verifier = counting()
    decoder = make_decoder(verifier, ensemble_of(WrongDrafter(verifier, 3), PerfectDrafter(verifier, 3)))
    generation = decoder.generate([0], max_new_tokens=12)
    assert [(r.num_accepted, r.winners) for r in generation.rounds] == [(3, [1])] * 3


# ---------------------------------------------------------------- who won
WINS = [  # chains of the members, streak of the first round, its winners
    ([[1, 9, 9]], [[5, 5, 5]], 1, [0]),
    ([[1, 2, 9]], [[1, 5, 5]], 2, [0]),
    ([[1, 2, 9]], [[1, 2, 5]], 2, [0, 1]),  # a tie counts for both
    ([[1, 2, -1]], [[1, 2, 3]], 3, [1]),
    ([[9, 2, 3]], [[5, 5, 5]], 0, []),
    ([[9, 2, 3], [1, 9, 9]], [[1, 5, 5], [4, 4, 4]], 1, [0, 1]),  # with any of its chains
    ([[-1, -1, -1]], [[1, 2, 3]], 3, [1]),
]


@pytest.mark.parametrize("sampler", ["specdiff2", "tree_match"])
@pytest.mark.parametrize(("first", "second", "streak", "winners"), WINS)
def test_winners_have_a_draft_with_the_whole_accepted_path(
    first: list[list[int]], second: list[list[int]], streak: int, winners: list[int], sampler: str
) -> None:
    def script(chains: list[list[int]]) -> FunctionDrafter:
        return FunctionDrafter(3, lambda context, gamma, k, rng: (torch.tensor(chains)[:, :gamma], None))

    ensemble = ensemble_of(script(first), script(second), num_drafts=len(first))
    record = make_decoder(counting(), ensemble, sampler=sampler).generate([0], max_new_tokens=4).rounds[0]
    assert (record.num_accepted, record.winners) == (streak, winners)


def test_tokens_after_the_end_of_the_output_win_nothing() -> None:
    """Both have the EOS 2; what the second drafted better lies behind it."""
    chains = FunctionDrafter(3, lambda context, gamma, k, rng: (torch.tensor([[1, 2, 9]]), None))
    better = FunctionDrafter(3, lambda context, gamma, k, rng: (torch.tensor([[1, 2, 3]]), None))
    decoder = make_decoder(counting(eos_ids=[2]), ensemble_of(chains, better), sampler="tree_match")
    generation = decoder.generate([0], max_new_tokens=8)
    assert generation.tokens == [1, 2] and generation.rounds[0].winners == [0, 1]


def test_no_winners_without_several_drafters_or_without_a_draft() -> None:
    plain = make_decoder(counting(), Script([1, 2, 3], 16), sampler="specdiff").generate([0], max_new_tokens=4)
    assert plain.rounds[0].num_accepted == 3 and plain.rounds[0].winners is None
    last = make_decoder(counting(), ensemble_of(RandomDrafter(16, 3)), sampler="tree_match")
    assert last.generate([0], max_new_tokens=1).rounds[0].winners is None  # no room for a draft


# ---------------------------------------------------------------- settings
def settings(**values: Any) -> SamplerSettings:
    drafters = [{"drafter": "a", "K": 1}, {"drafter": "b", "K": 3, "temperature": 0.5, "name": "bee"}]
    return SamplerSettings(**{"name": "x", "rule": "tree_match", "drafters": drafters, **values})


def test_settings_name_resolve_and_gather_all_drafters() -> None:
    found = settings(top_k=5)
    assert found.num_drafts == 4 and found.drafter_names() == ["a", "b"]
    resolved = found.with_drafters(lambda name: f"/folder/of/{name}")
    assert resolved.drafter_names() == ["/folder/of/a", "/folder/of/b"]
    drafters = {name: RandomDrafter(64, 3) for name in resolved.drafter_names()}
    ensemble = resolved.gather(drafters.__getitem__)
    assert [(m.name, m.num_drafts, m.sampling) for m in ensemble.members] == [
        ("a", 1, SamplingParams(0.0, 5)), ("bee", 3, SamplingParams(0.5, 5)),
    ]  # fmt: skip
    decoder = resolved.make(tiny_verifier(), ensemble)
    assert decoder.drafting.num_drafts == 4 and decoder.drafting.drafter is ensemble
    described = describe_decoder(decoder)
    assert described["num_drafts"] == 4 and "draft_temperature" not in described
    assert described["drafters"]["bee"] == {
        "num_drafts": 3, "draft_temperature": 0.5, "draft_top_k": 5, "draft_top_p": 1.0, "drafter": None,
    }  # fmt: skip


def test_settings_of_one_drafter_are_as_before() -> None:
    one = SamplerSettings("x", "greedy", "d")
    assert one.drafter_names() == ["d"] and one.num_drafts == 1
    assert one.with_drafters(str.upper).drafter == "D" and one.gather(lambda name: name) == "d"  # type: ignore[comparison-overlap,arg-type,return-value]


@pytest.mark.parametrize(
    ("error", "values", "named"),
    [
        (NotLosslessError, {"rule": "specinfer"}, "'specinfer' that reads draft_probs"),
        (NotLosslessError, {"rule": "traversal"}, "draws of different laws"),
        (NotLosslessError, {"rule": "leviathan"}, "draws of different laws"),
        (ConfigError, {"num_nodes": 16}, "from the law of one drafter"),
        (ConfigError, {"num_nodes": "auto"}, "from the law of one drafter"),
        (ConfigError, {"K": 8}, "K=8 with several drafters that draft 4 in all"),
        (ConfigError, {"rule": "greedy"}, "K=4: it verifies one draft"),
        (ConfigError, {"drafters": []}, "expected a list"),
        (ConfigError, {"drafters": None}, "drafter=None of sampler 'x'"),
        (ConfigError, {"temperature": -1.0}, "temperature=-1.0"),
        (ConfigError, {"top_p": 0.0}, "top_p=0.0"),
    ],
)
def test_settings_refuse_what_cannot_work(error: type[Exception], values: dict[str, Any], named: str) -> None:
    with pytest.raises(error, match=named):
        settings(**values)
    settings(rule="greedy", selection="self_selection", K=4)  # the right number is no contradiction


# ---------------------------------------------------------------- real models
@pytest.fixture(scope="module")
def verifier() -> HFVerifier:
    return tiny_verifier(tokenizer=char_tokenizer(), num_hidden_layers=4, vocab_size=58)


def block_drafter(verifier: HFVerifier, seed: int, **options: Any) -> BlockDrafter:
    """Random enough to be wrong often, near enough to the verifier to be right sometimes."""
    torch.manual_seed(seed)
    drafter = BlockDrafter.from_verifier(verifier, num_layers=2, **options)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return drafter.eval()


@pytest.fixture(scope="module")
def folders(verifier: HFVerifier, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A drafter with a cache of its own, and one that reads the verifier's, with another gamma."""
    folder = tmp_path_factory.mktemp("drafters")
    save_drafter(block_drafter(verifier, 1, gamma=5), folder / "own")
    conditioned = block_drafter(verifier, 2, gamma=3, shifted=True, conditioning="verifier_kv")
    save_drafter(conditioned, folder / "conditioned")
    return {name: str(folder / name) for name in ("own", "conditioned")}


@pytest.mark.parametrize("min_confidence", [0.0, 0.05])
@pytest.mark.parametrize("sampler", ["specdiff2", "tree_match"])
def test_temperature_0_gives_the_verifiers_own_tokens(
    verifier: HFVerifier, folders: dict[str, str], sampler: str, min_confidence: float
) -> None:
    drafters = [
        {"drafter": folders["own"], "K": 3},
        {"drafter": folders["conditioned"]},
        {"drafter": folders["conditioned"], "K": 2, "temperature": 2.0, "name": "hot"},
    ]
    decoder = SpeculativeDecoder.from_pretrained(
        verifier, drafters=drafters, sampler=sampler, min_confidence=min_confidence
    )
    members = decoder.drafting.drafter.members  # type: ignore[attr-defined]
    assert decoder.drafting.gamma == 3 and members[1].drafter is members[2].drafter
    expected = reference_greedy(verifier.model, PROMPT, NUM_NEW, vocab_size=58)
    won = set()
    for seed in range(4):
        generation = decoder.generate(PROMPT, max_new_tokens=NUM_NEW, rng=TorchRandomSource(seed))
        assert generation.tokens == expected
        won |= {winner for record in generation.rounds for winner in record.winners or ()}
    assert won, "nothing was accepted: the test proves little"


def test_members_on_one_verifier_session_draft_as_if_they_were_alone(
    verifier: HFVerifier, folders: dict[str, str]
) -> None:
    """Conditioned members write their windows into the verifier's cache, one after the other."""
    entries = [{"drafter": folders[name], "temperature": 0.0, "name": f"{i}"}
               for i, name in enumerate(("conditioned", "own", "conditioned"))]  # fmt: skip
    drafting = load_speculative_decoder(verifier, drafters=entries, sampler="tree_match").drafting
    ensemble = drafting.drafter
    assert isinstance(ensemble, DrafterEnsemble) and ensemble.needs_verifier_session
    text = random_tokens(12, seed=4, vocab=58)

    def drafts(drafter: Any, num_drafts: int, sampling: SamplingParams) -> list[list[list[int]]]:
        session = verifier.start(text[:4], 20)
        extra = [session] if getattr(drafter, "needs_verifier_session", False) else []
        started = drafter.start(text[:4], sampling, 20, *extra)
        rounds = []
        for token in text[4:]:
            rounds.append(started.propose(3, num_drafts, TorchRandomSource(0), needs_probs=False).tokens.tolist())
            session.score(TokenTree.from_chains(session.last_token, rounds[-1]))
            session.commit([], token)
            started.observe([token])
        return rounds

    together = drafts(ensemble, 3, SamplingParams())
    alone = [drafts(member.drafter, 1, GREEDY) for member in ensemble.members]
    for index, chains in enumerate(together):
        assert chains == [rows[index][0] for rows in alone]
    assert len({tuple(map(tuple, chains)) for chains in together}) > 1


def test_loading_refuses_before_the_verifier_loads(folders: dict[str, str]) -> None:
    both = [{"drafter": folders["own"], "K": 2}, {"drafter": folders["conditioned"]}]
    for options, error, named in (
        ({"drafters": both, "gamma": 4}, ConfigError, "gamma=4: expected an integer from 1 to the drafter's 3"),
        ({"drafters": both, "num_drafts": 8}, ConfigError, "K=8 with several drafters that draft 3"),
        ({"drafters": both, "sampler": "traversal"}, NotLosslessError, "draws of different laws"),
        ({"drafters": both, "sampler": "tree"}, ConfigError, "from the law of one drafter"),
        ({"drafters": both, "sampler": "specdiff"}, ConfigError, "it verifies one draft"),
        ({"drafters": both, "drafter": folders["own"]}, ConfigError, "expected one of the two"),
        ({}, ConfigError, "expected one of the two"),
        ({"drafters": [{"drafter": "/no/such"}]}, Exception, "/no/such"),
    ):
        with pytest.raises(error, match=named):
            load_speculative_decoder("/no/such/verifier", **options)  # type: ignore[arg-type]


def test_a_draft_temperature_is_the_default_of_the_entries(verifier: HFVerifier, folders: dict[str, str]) -> None:
    entries = [{"drafter": folders["own"]}, {"drafter": folders["conditioned"], "temperature": 0.0}]
    decoder = load_speculative_decoder(verifier, drafters=entries, draft_temperature=0.7)
    members = decoder.drafting.drafter.members  # type: ignore[attr-defined]
    assert [member.sampling.temperature for member in members] == [0.7, 0.0]


def test_passes_of_every_member_are_compiled_before_decoding() -> None:
    verifier = tiny_verifier(num_hidden_layers=4)
    expected = reference_greedy(verifier.model, PROMPT, NUM_NEW)
    passes = verifier.compile(backend="eager")
    conditioned = [
        block_drafter(verifier, seed, gamma=gamma, shifted=True, conditioning="verifier_kv")
        for seed, gamma in ((1, 4), (2, 3))
    ]
    chosen = [(conditioned[0], GREEDY), (conditioned[1], WARM), (conditioned[0], SamplingParams(2.0))]
    members = [Member(str(index), drafter, 2, sampling) for index, (drafter, sampling) in enumerate(chosen)]
    decoder = make_decoder(verifier, DrafterEnsemble(members), sampler="tree_match", verifier_sampling=GREEDY)
    warm_passes(verifier, {"several": decoder}, len(PROMPT), NUM_NEW)
    before = passes.num_graphs
    assert decoder.generate(PROMPT, max_new_tokens=NUM_NEW).tokens == expected
    assert passes.num_graphs == before and all(len(passes._draft[drafter]) == 1 for drafter in conditioned)
