"""``eval.py sampler=drafters`` from the command line's words to the summary and the report."""

from __future__ import annotations

from pathlib import Path

import pytest
from entry_runs import Options, evaluate_here, strict_json

from specdiff2.evaluation.records import RECORDS_FILE, read_records
from specdiff2.types import ConfigError, MismatchError, NotLosslessError

TWO = "sampler.drafters=[{drafter: untrained, K: 1, temperature: 0.0, name: best}, {drafter: untrained, K: 3}]"
BEST = ["sampler.rule=greedy", "sampler.selection=self_selection"]


@pytest.mark.parametrize("rule", [[], BEST], ids=["tree", "best"])
def test_wins_of_each_drafter_are_reported(
    tiny_options: Options, tmp_path: Path, rule: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["sampler=drafters", "sampler.K=null", "model.gamma=3", *rule]  # experiment=tiny has a K of its own
    run = evaluate_here(tiny_options, tmp_path, *options, TWO)
    row = strict_json(run / "summary.json")["rows"][1]
    assert (row["method"], row["num_drafts"], row["gamma"]) == ("drafters", 4, 3)
    assert row["lossless_check"]["identical"] == row["lossless_check"]["checked"] == 3
    records = [one for one in read_records(run / RECORDS_FILE) if one.method == "drafters" and not one.warmup]
    assert {tuple(record.drafters or ()) for record in records} == {("best", "untrained")}
    won = [one for record in records for one in record.rounds if one.winners]
    assert won, "the tiny pair accepts something, else this proves nothing"
    for index, name in enumerate(("best", "untrained")):
        mine = [one.num_accepted for one in won if index in (one.winners or ())]
        assert (row["drafter_rounds_won"][name], row["drafter_accepted_tokens"][name]) == (len(mine), sum(mine))
    assert "rounds won by drafter" in capsys.readouterr().out
    assert "share of rounds won" in (run / "report.html").read_text(encoding="utf-8")
    drafters = strict_json(run / "benchmark.json")["decoders"]["drafters"]["drafters"]
    assert [one["draft_temperature"] for one in drafters.values()] == [0.0, 1.0]
    assert len({one["drafter"] for one in drafters.values()}) == 1  # one model, loaded once
    with pytest.raises(MismatchError, match=r"decoders\.drafters\.drafters\.best\.draft_temperature=0\.0, now .*=0\.5"):
        evaluate_here(tiny_options, tmp_path, *options, TWO.replace("0.0", "0.5"))


def test_the_example_sampler_drafts_with_the_runs_own_drafter(tiny_options: Options, tmp_path: Path) -> None:
    options = ["sampler=drafters", "sampler.K=8", "drafter=untrained", "model.gamma=2", "benchmark.limit=1"]
    run = evaluate_here(tiny_options, tmp_path, *options)
    row = strict_json(run / "summary.json")["rows"][1]
    assert row["num_drafts"] == 8 and set(row["drafter_win_share"]) == {"most probable", "drawn"}


def test_every_drafter_is_checked_before_the_verifier_loads(tiny_options: Options, tmp_path: Path) -> None:
    no_verifier = "verifier.source=/nowhere"
    options = ["sampler=drafters", "sampler.K=null", "model.gamma=3"]
    second = "sampler.drafters=[{drafter: untrained}, {drafter: /nowhere/best}]"
    with pytest.raises(ConfigError, match=r"drafter='/nowhere/best': no such folder"):
        evaluate_here(tiny_options, tmp_path, *options, second, no_verifier)
    with pytest.raises(ConfigError, match="K=2 with several drafters that draft 4 in all"):
        evaluate_here(tiny_options, tmp_path, "sampler=drafters", TWO, no_verifier)
    with pytest.raises(NotLosslessError, match="draws of different laws"):
        evaluate_here(tiny_options, tmp_path, *options, TWO, "sampler.rule=specinfer", no_verifier)
