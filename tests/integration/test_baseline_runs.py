"""``train.py model=smollm2_ar``, ``eval.py sampler=sps`` and ``sampler=prompt_lookup``, from words to the summary."""

from __future__ import annotations

from pathlib import Path

import pytest
from entry_runs import Options, evaluate_here, strict_json, train_here
from helpers import char_tokenizer, tiny_llama

from specdiff2.models.verifier import HFVerifier
from specdiff2.types import ConfigError

TRAIN = ["model=smollm2_ar", "model.gamma=1", "objective=ce", "prefix_loss_weight=1.0", "~objective.warmup_steps"]


def rows_of(run: Path) -> dict[str, dict]:
    return {row["method"]: row for row in strict_json(run / "summary.json")["rows"]}


def test_an_autoregressive_drafter_is_trained_published_and_decoded(tiny_options: Options, tmp_path: Path) -> None:
    """`sampler=sps` finds what `model=smollm2_ar` publishes, beside the same drafter as transformers' assistant."""
    root = f"paths.root={tmp_path}"
    train_here(tiny_options, tmp_path / "train", *TRAIN, root)
    drafter = tmp_path / "outputs/drafters/smollm2_ar/best"
    assert (drafter / "config.json").is_file()
    methods = [
        f"+sampler@methods.{name}={name}" for name in ("sps", "prompt_lookup", "hf_assisted", "hf_prompt_lookup")
    ]
    threshold = ["methods.hf_assisted.assistant_confidence_threshold=0", f"methods.hf_assisted.assistant={drafter}"]
    options = [*methods, *threshold, "model=smollm2_ar", "experiment=default", root]
    run = evaluate_here(tiny_options, tmp_path / "run", *options, "verifier=hf", "max_new_tokens=12")
    rows = rows_of(run)
    for name in ("sps", "prompt_lookup", "hf_assisted", "hf_prompt_lookup"):
        assert rows[name]["lossless_check"]["identical"] == rows[name]["lossless_check"]["checked"] == 3, name
    assert (rows["sps"]["gamma"], rows["sps"]["num_drafts"], rows["prompt_lookup"]["gamma"]) == (5, 1, 10)
    assert rows["sps"]["mean_streak"] is not None and rows["prompt_lookup"]["mean_streak"] is not None
    decoders = strict_json(run / "benchmark.json")["decoders"]
    assert decoders["prompt_lookup"]["drafter"] == "prompt_lookup:10:2"
    assert decoders["sps"]["draft_temperature"] == 0.0 and decoders["sps"]["drafter"]
    warm = evaluate_here(
        tiny_options, tmp_path / "warm", "sampler=sps", "sampler.K=1", "verifier.temperature=0.7", root
    )
    assert strict_json(warm / "benchmark.json")["decoders"]["sps"]["draft_temperature"] == 0.7


def test_any_smaller_model_and_an_untrained_one_draft(tiny_options: Options, tmp_path: Path) -> None:
    folder = tmp_path / "small"
    char_tokenizer(folder)
    tiny_llama(64, seed=7, num_hidden_layers=1, eos_token_id=2).save_pretrained(folder)
    options = ["sampler=sps", "sampler.K=1", "benchmark.limit=1"]
    for drafter in (str(folder), "untrained"):
        given = [f"sampler.drafter={drafter}", "model=smollm2_ar", "model.gamma=1", "sampler.gamma=7"]
        run = evaluate_here(tiny_options, tmp_path / Path(drafter).name / "run", *options, *given)
        row = rows_of(run)["sps"]
        assert row["gamma"] == 7 and row["lossless_check"]["identical"] == 1


def test_what_is_missing_is_told_before_the_verifier_loads(
    tiny_options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the verifier was loaded")

    monkeypatch.setattr(HFVerifier, "from_pretrained", refuse)
    monkeypatch.setattr("specdiff2.models.hub.is_offline_mode", lambda: True)
    options = ["sampler.K=1", f"paths.root={tmp_path}"]
    with pytest.raises(ConfigError, match=r"python train.py model=smollm2_ar`"):
        evaluate_here(tiny_options, tmp_path / "a", "sampler=sps", *options)
    with pytest.raises(ConfigError, match=r"hf download some/model"):
        evaluate_here(tiny_options, tmp_path / "b", "sampler=sps", "sampler.drafter=some/model", *options)
    with pytest.raises(ConfigError, match=r"copies at most 10"):
        evaluate_here(tiny_options, tmp_path / "c", "sampler=prompt_lookup", "sampler.gamma=11", *options)
    with pytest.raises(ConfigError, match=r"K=2 with drafter 'prompt_lookup', .*sampler=prompt_lookup"):
        evaluate_here(tiny_options, tmp_path / "d", "sampler=specdiff2", "drafter=prompt_lookup")
