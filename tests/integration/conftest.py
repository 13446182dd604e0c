"""A tiny model folder and prompt files, enough to run both entry points end to end in seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import char_tokenizer, tiny_llama

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama with a character tokenizer, as ``verifier=hf verifier.source=...`` takes it."""
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = char_tokenizer(folder)
    tiny_llama(64, bos_token_id=1, eos_token_id=2, pad_token_id=0).save_pretrained(folder)
    assert len(tokenizer) <= 64
    return folder


@pytest.fixture(scope="session")
def prompt_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight short questions; the separator U+2028 inside one of them must not end a line."""
    path = tmp_path_factory.mktemp("prompts") / "questions.jsonl"
    rows = [{"question": f"what is {n} + {n}?", "answer": f"#### {2 * n}"} for n in range(7)]
    rows.append({"question": "one\u2028line", "answer": "#### 1"})
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def tiny_options(tiny_folder: Path, prompt_file: Path) -> dict[str, list[str]]:
    """Overrides of both entry points for the tiny pair."""
    common = ["experiment=tiny", f"verifier.source={tiny_folder}", "verifier.dtype=float32"]
    prompts = [f"data.train_prompts.path={prompt_file}", "data.train_prompts.prompt_field=question"]
    train = [*common, "data=jsonl", *prompts, "data.train_prompts.skip=3", "data.val_prompts.limit=3"]
    benchmark = ["benchmark=jsonl", f"benchmark.path={prompt_file}", "benchmark.prompt_field=question"]
    return {"train": train, "eval": [*common, *benchmark, "benchmark.limit=3"]}


@pytest.fixture(scope="session")
def run_script() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run ``train.py`` or ``eval.py`` in a folder of its own, as a user would."""

    def run(script: str, *overrides: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
        defaults = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "WANDB_SILENT": "true"}
        return subprocess.run(
            [sys.executable, str(ROOT / script), *overrides],
            cwd=cwd,
            env={**os.environ, **defaults, **environment},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    return run
