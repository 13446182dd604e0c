"""A grid's page: curves over the settings, from the configuration and the summary of one run."""

from __future__ import annotations

from pathlib import Path

from record_builder import GRID_CONFIG, baseline, grid_run, record, write_run

from specdiff2.runtime.grid_page import grid_rows, write_grid_page


def test_rows_get_their_settings() -> None:
    rows, axes = grid_rows([{"method": "autoregressive"}, {"method": "specdiff2_K-4_gamma-2"}], GRID_CONFIG)
    assert rows == [
        {"method": "autoregressive", "K": None, "gamma": None},
        {"method": "specdiff2_K-4_gamma-2", "K": 4, "gamma": 2, "line": "specdiff2"},
    ]
    assert [(axis.key, axis.numbers) for axis in axes] == [("K", {"4": 4.0}), ("gamma", {"2": 2.0})]
    assert grid_rows([{"method": "a"}], {"grid": None}) == ([{"method": "a"}], [])


def test_page_has_curves_over_every_setting_and_no_other_method(tmp_path: Path) -> None:
    html = write_grid_page(grid_run(tmp_path)).read_text(encoding="utf-8")
    assert "Over K" in html and "Over gamma" in html
    assert "gamma=4: 3 at 1" in html and "gamma=2: 1 at 4" in html  # mean streak by K
    assert ">other<" not in html and not list(tmp_path.glob("*.partial"))


def test_a_run_without_a_grid_has_no_page(tmp_path: Path) -> None:
    assert write_grid_page(write_run(tmp_path, [record(), baseline()])) is None
    assert not (tmp_path / "grid.html").exists()
