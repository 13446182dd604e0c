"""Ranks of one torchrun that share a verifier: rank 0 writes, the others keep step and are silent."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from specdiff2.runtime.ranks import run_folder_of_rank
from specdiff2.types import ConfigError


@pytest.fixture
def config(tmp_path, monkeypatch) -> dict[str, Any]:
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # put back afterwards
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "records.jsonl").write_text("{}\n", encoding="utf-8")
    yield {
        "paths": {"run": str(tmp_path / "run")},
        "verifier": {"tp_plan": "auto"},
        "sampler": {"name": "tree", "num_nodes": 8},
        "methods": None,
        "grid": None,
    }
    logging.disable(logging.NOTSET)


def test_rank_0_and_plain_runs_write_where_they_are_told(config, monkeypatch):
    folder, out = Path(config["paths"]["run"]), sys.stdout
    monkeypatch.setenv("RANK", "0")
    assert run_folder_of_rank(config) == folder and sys.stdout is out
    monkeypatch.setenv("RANK", "3")
    config["verifier"]["tp_plan"] = None  # DDP of training: ranks share the folder
    assert run_folder_of_rank(config) == folder and sys.stdout is out


def test_another_rank_continues_on_a_copy_and_is_silent(config, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    original = Path(config["paths"]["run"])
    folder = run_folder_of_rank(config)
    assert folder != original and config["paths"]["run"] == str(folder)
    assert (folder / "records.jsonl").read_text(encoding="utf-8") == "{}\n"
    print("table")
    logging.getLogger("specdiff2").warning("line")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trainer": {}}, r"verifier.tp_plan is for eval.py: .*device_map=auto"),
        ({"sampler": {"name": "tree", "num_nodes": "auto"}}, r"sampler.num_nodes=auto follows measured times"),
        ({"methods": {"tree": {"num_nodes": "auto"}}}, r"tree.num_nodes=auto .*set a number"),
    ],
)
@pytest.mark.parametrize("rank", ["0", "1"])
def test_what_ranks_cannot_do_in_step_is_refused_by_all(config, monkeypatch, change, message, rank):
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(ConfigError, match=message):
        run_folder_of_rank(config | change)
