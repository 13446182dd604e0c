"""The decoding loop on tables: rounds, windows, streaming, errors, timing."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from helpers import (
    FunctionDrafter,
    PerfectDrafter,
    RandomDrafter,
    Script,
    Tab,
    TableDrafter,
    byte_tokenizer,
    tiny_verifier,
)
from torch import Tensor

import specdiff2
from specdiff2.decoding.acceptance import BlockRule, GreedyRule, LeviathanRule, TreeMatchRule
from specdiff2.decoding.autoregressive import AutoregressiveDecoder
from specdiff2.decoding.cost_measure import cost_key
from specdiff2.decoding.cost_table import CostTable
from specdiff2.decoding.loading import load_speculative_decoder
from specdiff2.decoding.samplers import SAMPLERS, make_decoder
from specdiff2.decoding.selection import SelfSelection
from specdiff2.decoding.speculative import SpeculativeDecoder
from specdiff2.decoding.timing import Stopwatch
from specdiff2.models.block_drafter import BlockDrafter
from specdiff2.protocols import RandomSource
from specdiff2.rng import TorchRandomSource
from specdiff2.tree import TokenTree
from specdiff2.types import ConfigError, CorruptFileError, MismatchError, NotLosslessError, SamplingParams

GREEDY = SamplingParams(temperature=0.0)


def counting_law(vocab: int = 16):
    """Greedy decoding counts upwards from the last token."""

    def law(context: tuple[int, ...]) -> Tensor:
        probs = torch.full((vocab,), 0.1 / vocab, dtype=torch.float64)
        probs[(context[-1] + 1) % vocab] += 0.9
        return probs

    return law


def counting(**options: Any) -> Tab:
    return Tab(counting_law(), sampling=GREEDY, **options)


class WordTokenizer:
    all_special_ids: ClassVar[list[int]] = []

    def decode(self, token_ids: list[int], **kwargs: object) -> str:
        return "".join(f"<{token}>" for token in token_ids)


# ---------------------------------------------------------------- rounds and windows
def test_windows_are_shortened_only_by_what_is_known_beforehand() -> None:
    asked: list[tuple[int, int]] = []
    verifier = counting()

    def propose(context: list[int], gamma: int, num_drafts: int, rng: RandomSource) -> tuple[Tensor, None]:
        asked.append((gamma, num_drafts))
        return torch.tensor([[context[-1] + 1] + [15] * (gamma - 1)] * num_drafts), None

    decoder = make_decoder(verifier, FunctionDrafter(4, propose), sampler="specdiff2", num_drafts=3)
    generation = decoder.generate([0], max_new_tokens=9)
    assert generation.tokens == list(range(1, 10))
    assert asked == [(4, 3), (4, 3), (4, 3), (2, 3)]  # room for 9, 7, 5, 3 and 1: no draft for the last token
    assert [r.num_drafted for r in generation.rounds] == [4, 4, 4, 2, 0]
    assert [r.num_committed for r in generation.rounds] == [2, 2, 2, 2, 1]
    assert verifier.num_forwards == len(generation.rounds)


def test_gamma_below_the_drafters_own() -> None:
    verifier = counting()
    decoder = make_decoder(verifier, PerfectDrafter(verifier, 8), sampler="specdiff", gamma=2)
    assert [r.num_drafted for r in decoder.generate([0], max_new_tokens=6).rounds] == [2, 2]


def test_identical_drafts_are_scored_once() -> None:
    verifier = counting()
    decoder = make_decoder(verifier, PerfectDrafter(verifier, 3), sampler="tree_match", num_drafts=8)
    assert decoder.generate([0], max_new_tokens=4).rounds[0].num_nodes == 4


def test_self_selection_verifies_the_best_chain() -> None:
    chains = [[9, 9], [1, 9], [1, 2], [9, 9]]
    decoder = make_decoder(counting(), Script(chains, 16), sampler="specdiff2", num_drafts=4)
    assert decoder.generate([0], max_new_tokens=3).rounds[0].num_accepted == 2


RAGGED = [[1, 9, 9, 9], [1, 2, -1, -1], [-1, -1, -1, -1], [1, 2, 3, -1]]


@pytest.mark.parametrize(("sampler", "num_drafts"), [("specdiff2", 4), ("tree_match", 4)])
def test_a_chain_that_ends_early_is_recorded_with_its_own_length(sampler: str, num_drafts: int) -> None:
    """No fourth position was proposed after 1, 2, 3; so none was rejected."""
    decoder = make_decoder(counting(), Script(RAGGED, 16), sampler=sampler, num_drafts=num_drafts)
    first = decoder.generate([0], max_new_tokens=5).rounds[0]
    assert (first.num_drafted, first.num_accepted, first.num_committed, first.num_nodes) == (3, 3, 4, 7)


def test_a_rejection_inside_the_longest_chain_counts_the_whole_window() -> None:
    decoder = make_decoder(counting(), Script([[1, 9, 9, 9], [5, -1, -1, -1]], 16), sampler="tree_match", num_drafts=2)
    first = decoder.generate([0], max_new_tokens=5).rounds[0]
    assert (first.num_drafted, first.num_accepted) == (4, 1)


@pytest.mark.parametrize("sampler", ["specdiff", "specdiff2", "tree_match"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rounds_without_drafts_are_autoregressive(sampler: str, temperature: float) -> None:
    empty = FunctionDrafter(4, lambda context, gamma, num_drafts, rng: (torch.zeros((num_drafts, 0)).long(), None))
    num_drafts = 1 if sampler == "specdiff" else 3
    law = Tab(counting_law(), sampling=SamplingParams(temperature))
    generation = make_decoder(law, empty, sampler=sampler, num_drafts=num_drafts).generate([0], max_new_tokens=6)
    assert generation.tokens == AutoregressiveDecoder(law).generate([0], max_new_tokens=6).tokens
    assert {(r.num_drafted, r.num_accepted, r.num_committed, r.num_nodes) for r in generation.rounds} == {(0, 0, 1, 1)}


def test_draft_probs_are_drawn_up_only_for_rules_that_read_them() -> None:
    asked = []

    class Session:
        def propose(self, gamma: int, num_drafts: int, rng: RandomSource, *, needs_probs: bool) -> Any:
            asked.append(needs_probs)
            return TableDrafter([[1 / 16] * 16]).start([0], GREEDY, 1).propose(gamma, 1, rng, needs_probs=needs_probs)

        def observe(self, tokens: Any, features: Any = None) -> None: ...

    class Recorder:
        gamma = 1

        def start(self, *args: Any) -> Session:
            return Session()

    for rule in (GreedyRule(), LeviathanRule()):
        SpeculativeDecoder(counting(), Recorder(), rule=rule).generate([0], max_new_tokens=2)
    assert asked == [False, True]


def test_the_drafter_observes_every_committed_token() -> None:
    seen: list[list[int]] = []

    def propose(context: list[int], gamma: int, num_drafts: int, rng: RandomSource) -> tuple[Tensor, None]:
        seen.append(list(context))
        return torch.tensor([[context[-1] + 1, 15]])[:, :gamma], None

    make_decoder(counting(), FunctionDrafter(2, propose), sampler="specdiff").generate([0], max_new_tokens=6)
    assert seen == [[0], [0, 1, 2], [0, 1, 2, 3, 4]]


def test_case_33_tau_is_tokens_per_verifier_pass_bonus_included() -> None:
    verifier = counting()
    generation = make_decoder(verifier, PerfectDrafter(verifier, 3), sampler="specdiff").generate([0], max_new_tokens=8)
    num_rounds = len(generation.rounds)
    assert num_rounds == verifier.num_forwards - 3 * 2  # the perfect drafter asks the verifier for its 3 tokens
    tau = generation.num_tokens / num_rounds
    mean_streak = sum(record.num_accepted for record in generation.rounds) / num_rounds
    assert tau == mean_streak + 1 == 4


# ---------------------------------------------------------------- grown trees
def sharp_drafter(gamma: int = 3) -> FunctionDrafter:
    """States the law that counts upwards from the last token, with some doubt at every position."""

    def propose(context: list[int], gamma: int, num_drafts: int, rng: RandomSource) -> tuple[Tensor, Tensor]:
        probs = torch.full((gamma, 16), 0.2 / 15, dtype=torch.float64)
        probs[range(gamma), [(context[-1] + 1 + depth) % 16 for depth in range(gamma)]] = 0.8
        return rng.chains(probs, num_drafts), probs

    return FunctionDrafter(gamma, propose)


def test_a_grown_tree_has_the_nodes_asked_for_and_the_window_is_its_depth() -> None:
    decoder = make_decoder(counting(), sharp_drafter(), sampler="tree", num_nodes=9)
    rounds = decoder.generate([0], max_new_tokens=11).rounds
    assert [(r.num_drafted, r.num_accepted, r.num_nodes) for r in rounds] == [(3, 3, 10), (3, 3, 10), (2, 2, 10)]


def test_gamma_shortens_a_grown_tree() -> None:
    decoder = make_decoder(counting(), sharp_drafter(), sampler="tree", num_nodes=5, gamma=2)
    assert [r.num_drafted for r in decoder.generate([0], max_new_tokens=6).rounds] == [2, 2]


def test_no_draft_is_made_for_the_last_token() -> None:
    decoder = make_decoder(counting(), sharp_drafter(), sampler="tree")
    (record,) = decoder.generate([0], max_new_tokens=1).rounds
    assert (record.num_drafted, record.num_nodes) == (0, 1)


def test_auto_uses_the_costs_that_the_folder_holds(tmp_path: Path) -> None:
    """Free nodes: as many as allowed. Nodes that cost more than they bring: none, and the window that counts is 0."""
    verifier, drafter = counting(), sharp_drafter()
    key = cost_key(verifier, drafter, 3)
    expected = {0.0: (3, 21), 0.2: (3, 4), 9.0: (0, 1)}
    for slope, (num_drafted, num_nodes) in expected.items():
        table = CostTable.from_medians(key, draft_s=0.0, other_s=0.0, verify_s={1: 1.0, 2: 1.0 + slope})
        table.save(tmp_path / key.file_name)
        decoder = make_decoder(verifier, drafter, sampler="tree", num_nodes="auto", max_nodes=20, cost_folder=tmp_path)
        record = decoder.generate([0], max_new_tokens=12).rounds[0]
        assert (record.num_drafted, record.num_nodes) == (num_drafted, num_nodes), slope
        described = {"num_nodes": "auto", "max_nodes": 20, "tree_temperature": 1.0}
        assert decoder.describe() == described | {"lookup_tokens": 0, "lookup_ngram": 3}


def test_the_estimate_of_auto_ignores_the_tree_temperature(tmp_path: Path) -> None:
    """Only the order of the nodes follows it: a hot tree of this law is wider, and as worthless beyond its chain."""
    verifier, drafter = counting(), sharp_drafter()
    key = cost_key(verifier, drafter, 3)
    CostTable.from_medians(key, draft_s=0.0, other_s=0.0, verify_s={1: 1.0, 2: 1.2}).save(tmp_path / key.file_name)
    for temperature in (0.5, 1.0):
        decoder = make_decoder(
            verifier, drafter, sampler="tree", num_nodes="auto", tree_temperature=temperature, cost_folder=tmp_path
        )
        assert decoder.generate([0], max_new_tokens=12).rounds[0].num_nodes == 4


def test_loaded_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDIFF2_CACHE", str(tmp_path))
    verifier = tiny_verifier()
    options = {"sampler": "tree", "tree_temperature": 0.7}
    auto = SpeculativeDecoder.from_pretrained(verifier, RandomDrafter(64, 3), num_nodes="auto", **options)
    assert [path.parent.name for path in tmp_path.rglob("*.json")] == ["costs"]
    fixed = SpeculativeDecoder.from_pretrained(verifier, RandomDrafter(64, 3), num_nodes=7, **options)
    expected = AutoregressiveDecoder(verifier, sampling=GREEDY).generate([1, 2], max_new_tokens=6).tokens
    for decoder in (auto, fixed):
        assert decoder.generate([1, 2], max_new_tokens=6).tokens == expected


# ---------------------------------------------------------------- ends
def test_a_round_cut_by_eos_reached_no_later_position() -> None:
    """Case 9: agreed draft [a, EOS, b, c]; case 33: nothing after EOS counts."""
    verifier = counting(eos_ids=[2])
    generation = make_decoder(verifier, PerfectDrafter(verifier, 4), sampler="specdiff").generate([0], max_new_tokens=9)
    (record,) = generation.rounds
    assert generation.tokens == [1, 2] and generation.stop_reason == "eos"
    assert (record.num_drafted, record.num_accepted, record.num_committed) == (2, 2, 2)


def test_eos_as_the_last_accepted_token_of_a_draft_that_goes_on_wrongly() -> None:
    """The verifier's own token after EOS is dropped, and so is the position where the draft went wrong."""
    decoder = make_decoder(counting(eos_ids=[2]), Script([1, 2, 9, 9], 16), sampler="specdiff")
    generation = decoder.generate([0], max_new_tokens=9)
    (record,) = generation.rounds
    assert generation.tokens == [1, 2]
    assert (record.num_drafted, record.num_accepted, record.num_committed) == (2, 2, 2)


def test_a_wrong_draft_before_eos_still_counts_as_drafted() -> None:
    """EOS as the verifier's own token: the draft was looked at and refused."""
    generation = make_decoder(counting(eos_ids=[1]), Script([9, 9], 16), sampler="specdiff").generate(
        [0], max_new_tokens=9
    )
    (record,) = generation.rounds
    assert (record.num_drafted, record.num_accepted, record.num_committed) == (2, 0, 1)


@pytest.mark.parametrize("gamma", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("sampler", ["specdiff", "tree_match"])
def test_stop_string_in_and_across_windows(gamma: int, sampler: str) -> None:
    verifier = counting(tokenizer=WordTokenizer())
    calls: list[tuple[list[int], str]] = []
    generation = make_decoder(verifier, PerfectDrafter(verifier, gamma), sampler=sampler).generate(
        [0], max_new_tokens=14, stop_strings=["<5><6>"], on_tokens=lambda tokens, text: calls.append((tokens, text))
    )
    assert generation.tokens == [1, 2, 3, 4, 5, 6] and generation.stop_reason == "stop"
    assert generation.text == "".join(text for _, text in calls) == "<1><2><3><4>"
    assert [token for tokens, _ in calls for token in tokens] == generation.tokens
    assert sum(r.num_committed for r in generation.rounds) == 6
    assert len(calls) == len(generation.rounds)


def test_autoregressive_stops_alike() -> None:
    verifier = counting(tokenizer=WordTokenizer(), eos_ids=[9])
    decoder = AutoregressiveDecoder(verifier)
    assert decoder.generate([0], max_new_tokens=14, stop_strings=["<5><6>"]).tokens == [1, 2, 3, 4, 5, 6]
    assert decoder.generate([0], max_new_tokens=14).tokens == list(range(1, 10))
    assert decoder.generate([0], max_new_tokens=3).stop_reason == "length"


def test_text_of_a_generation_without_stop_strings() -> None:
    assert AutoregressiveDecoder(counting(tokenizer=WordTokenizer())).generate([0], max_new_tokens=2).text == "<1><2>"
    assert AutoregressiveDecoder(counting()).generate([0], max_new_tokens=2).text == ""


# ---------------------------------------------------------------- seeds
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_same_seed_gives_the_same_output(sampler: str) -> None:
    verifier = Tab([1 / 16] * 16, sampling=SamplingParams())
    decoder = make_decoder(verifier, RandomDrafter(16, 3), sampler=sampler)
    first, again, other = (
        decoder.generate([0], max_new_tokens=12, rng=TorchRandomSource(seed)).tokens for seed in (1, 1, 2)
    )
    assert first == again != other


# ---------------------------------------------------------------- errors
@pytest.mark.parametrize("gamma", [0, -1, 5, True, 2.0, "two"])
def test_bad_gamma_is_refused(gamma: Any) -> None:
    with pytest.raises(ConfigError, match="gamma"):
        SpeculativeDecoder(counting(), Script([1, 2, 3, 4], 16), rule=GreedyRule(), gamma=gamma)


@pytest.mark.parametrize("num_drafts", [0, -1, True, 2.0, "two"])
def test_bad_num_drafts_is_refused(num_drafts: Any) -> None:
    with pytest.raises(ConfigError, match="num_drafts"):
        SpeculativeDecoder(counting(), Script([1], 16), rule=TreeMatchRule(), num_drafts=num_drafts)


def test_lossy_combinations_are_refused_at_construction() -> None:
    with pytest.raises(NotLosslessError):
        SpeculativeDecoder(counting(), Script([1], 16), rule=BlockRule(), selector=SelfSelection(), num_drafts=2)
    with pytest.raises(ConfigError):
        SpeculativeDecoder(counting(), Script([1], 16), rule=GreedyRule(), num_drafts=2)


def test_unknown_sampler_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"specdif3.*specdiff2"):
        make_decoder(counting(), Script([1], 16), sampler="specdif3")


@pytest.mark.parametrize("prompt", [[], ""])
def test_empty_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(ConfigError, match="prompt"):
        AutoregressiveDecoder(counting()).generate(prompt, max_new_tokens=3)


def test_text_needs_a_tokenizer() -> None:
    with pytest.raises(ConfigError, match="tokenizer"):
        AutoregressiveDecoder(counting()).generate("hello", max_new_tokens=3)


def test_max_new_tokens_zero_is_refused_before_the_prefill() -> None:
    verifier = counting()
    verifier.start = None  # type: ignore[assignment,method-assign]
    with pytest.raises(ConfigError, match="max_new_tokens=0"):
        AutoregressiveDecoder(verifier).generate([0], max_new_tokens=0)


def test_context_overflow_is_refused_at_the_start() -> None:
    verifier = tiny_verifier(max_position_embeddings=32)
    decoder = make_decoder(verifier, RandomDrafter(64, 4), sampler="specdiff2")
    assert len(decoder.generate([1] * 12, max_new_tokens=20).tokens) == 20  # fills the context to its last place
    with pytest.raises(ConfigError, match="32"):
        decoder.generate([1] * 13, max_new_tokens=20)


# ---------------------------------------------------------------- text prompts
def test_text_and_messages_go_through_the_chat_template() -> None:
    tokenizer = byte_tokenizer()
    verifier = tiny_verifier(vocab=300, tokenizer=tokenizer, max_position_embeddings=128)
    decoder = make_decoder(verifier, RandomDrafter(300, 3), sampler="tree_match")
    messages = [{"role": "user", "content": "hello"}]
    ids = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    by_text, by_messages, by_ids = (decoder.generate(p, max_new_tokens=8) for p in ("hello", messages, ids))
    assert by_text.tokens == by_messages.tokens == by_ids.tokens


def test_exports_are_lazy_and_complete() -> None:
    assert specdiff2.SpeculativeDecoder is SpeculativeDecoder
    for name in specdiff2.__all__:
        assert getattr(specdiff2, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        _ = specdiff2.nothing


# ---------------------------------------------------------------- timing
def test_stages_add_up_to_the_decoding_time() -> None:
    verifier = counting()
    decoder = make_decoder(verifier, RandomDrafter(16, 3), sampler="specdiff2")
    start = time.perf_counter()
    generation = decoder.generate([0], max_new_tokens=12)
    wall_s = time.perf_counter() - start
    stages = sum(r.draft_s + r.verify_s + r.other_s for r in generation.rounds)
    assert generation.decode_s == pytest.approx(stages) and generation.prefill_s >= 0
    assert generation.decode_s + generation.prefill_s <= wall_s
    assert all(min(r.draft_s, r.verify_s, r.other_s) >= 0 for r in generation.rounds)


def test_time_is_charged_to_the_stage_that_spends_it() -> None:
    def slow_law(context: tuple[int, ...]) -> Tensor:
        time.sleep(0.004)
        return counting_law()(context)

    def slow_draft(context: list[int], gamma: int, num_drafts: int, rng: RandomSource) -> tuple[Tensor, None]:
        time.sleep(0.02)
        return torch.tensor([[9] * gamma]), None

    verifier = Tab(slow_law, sampling=GREEDY)
    record = (
        make_decoder(verifier, FunctionDrafter(2, slow_draft), sampler="specdiff")
        .generate([0], max_new_tokens=4)
        .rounds[0]
    )
    assert record.draft_s >= 0.02 and record.verify_s >= 0.012  # three nodes


def test_building_the_tree_is_other_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(root: int, chains: Tensor) -> TokenTree:
        time.sleep(0.02)
        return TokenTree([root, *chains[0].tolist()], [-1, 0, 1], [[1, 2]])

    monkeypatch.setattr(TokenTree, "from_chains", slow)
    record = make_decoder(counting(), Script([1, 2], 16), sampler="specdiff").generate([0], max_new_tokens=4).rounds[0]
    assert record.other_s >= 0.02 > record.draft_s + record.verify_s


def test_stopwatch_laps_are_consecutive() -> None:
    watch = Stopwatch()
    time.sleep(0.01)
    assert watch.lap() >= 0.01 and watch.lap() < 0.01


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_overhead_of_a_round_with_a_real_vocabulary(temperature: float) -> None:
    """33 nodes x 49152 tokens: everything outside the forwards takes a few ms; the bound is generous on purpose."""
    vocab = 49152
    logits = torch.randn(40, vocab)
    chains = torch.arange(32).view(8, 4) + 1  # nothing shared: 33 nodes

    class Session:
        num_committed = 1

        def score(self, tree: Any) -> Tensor:
            return logits[: tree.num_nodes]

        def commit(self, path: Any, next_token: int) -> None: ...

        def features(self, path: Any) -> None: ...

    class Verifier:
        vocab_size, eos_ids, max_length = vocab, frozenset[int](), 4096

        def start(self, prompt: Any, max_new_tokens: int) -> Session:
            return Session()

    decoder = make_decoder(
        Verifier(),
        FunctionDrafter(4, lambda context, gamma, num_drafts, rng: (chains[:, :gamma], None)),
        sampler="specdiff2",
        verifier_sampling=SamplingParams(temperature),
    )
    rounds = decoder.generate([0], max_new_tokens=20).rounds[:-5]
    assert {record.num_nodes for record in rounds} == {33}
    assert statistics.median(record.other_s for record in rounds) < 0.05


# ---------------------------------------------------------------- stop ids, and refusals before a model loads
@pytest.mark.parametrize("sampler", ["specdiff", "tree_match"])
def test_stop_ids_inside_a_window_end_the_output(sampler: str) -> None:
    verifier = counting()
    decoder = make_decoder(verifier, Script([1, 2, 3, 4], 16), sampler=sampler, num_drafts=1)
    for generation in (
        decoder.generate([0], max_new_tokens=12, stop_ids=[3]),
        AutoregressiveDecoder(verifier).generate([0], max_new_tokens=12, stop_ids=[3]),
    ):
        assert (generation.tokens, generation.stop_reason) == ([1, 2, 3], "stop")
    with pytest.raises(ConfigError, match=r"stop_ids=\[999\]"):
        decoder.generate([0], max_new_tokens=12, stop_ids=[999])


@pytest.mark.parametrize(
    ("drafter", "options", "error", "named"),
    [
        (Script([1, 2], 16), {"sampler": "nothing"}, ConfigError, "sampler='nothing'"),
        (Script([1, 2], 16), {"sampler": "leviathan", "num_drafts": 4}, ConfigError, "K=4"),
        (Script([1, 2], 16), {"gamma": 3}, ConfigError, "gamma=3"),
        ("/nowhere/drafter", {}, CorruptFileError, "/nowhere/drafter"),
        (
            Script([1, 2], 16),
            {"sampler": "tree", "num_nodes": 1},
            ConfigError,
            "num_nodes=1: expected at least gamma=2",
        ),
        (Script([1, 2], 16), {"sampler": "tree", "num_nodes": "all"}, ConfigError, "num_nodes='all'"),
        (Script([1, 2], 16), {"sampler": "tree", "num_nodes": True}, ConfigError, "num_nodes=True"),
        (Script([1, 2], 16), {"sampler": "tree", "tree_temperature": 0.0}, ConfigError, "tree_temperature=0.0"),
        (Script([1, 2], 16), {"sampler": "tree", "num_nodes": "auto", "max_nodes": 1}, ConfigError, "max_nodes=1"),
        (Script([1, 2], 16), {"sampler": "tree", "num_drafts": 4}, ConfigError, "K=4 with num_nodes"),
        (Script([1, 2], 16), {"sampler": "tree", "draft_temperature": 0.5}, ConfigError, "tree_temperature"),
        (Script([1, 2], 16), {"sampler": "specdiff2", "num_nodes": 16}, ConfigError, r"num_nodes=16.*specdiff2.*tree"),
        (Script([1, 2], 16), {"sampler": "tree_match", "num_nodes": "auto"}, ConfigError, "num_nodes='auto'"),
        (Script([1, 2], 16), {"tree_temperature": 0.5}, ConfigError, "tree_temperature=0.5"),
        (Script([1, 2], 16), {"max_nodes": 9}, ConfigError, "max_nodes=9"),
    ],
)
def test_what_needs_no_model_is_refused_before_the_verifier_loads(
    drafter: Any, options: dict[str, Any], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        load_speculative_decoder("/no/such/verifier", drafter, **options)


def test_a_drafter_object_for_another_vocabulary_is_refused() -> None:
    drafter = BlockDrafter.from_verifier(tiny_verifier(32), num_layers=1)
    with pytest.raises(MismatchError, match=r"32 tokens.*64"):
        load_speculative_decoder(tiny_verifier(), drafter)
