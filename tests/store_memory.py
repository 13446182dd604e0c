"""Size of a rollout store against memory and time: makes one, indexes it and trains on it (without a model).

    python tests/store_memory.py --rows 10000,100000,1000000 --steps 2000 [--lists] [--folder /tmp/stores]

prints one JSON line a size, each measured in a process of its own: seconds to build and to reopen the index, its
bytes, rollouts a second through ``StepLoader``, and how far peak resident memory rose above that before the store was
opened. ``--lists`` reads the rollouts into a list first, as training did
before the index.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

from specdiff2.data.datamodule import RolloutDataModule
from specdiff2.data.rollout_indexing import open_index
from specdiff2.data.rollouts import RolloutStore

SHARD_ROWS = 100_000


def write_store(folder: Path, num_rows: int) -> None:
    """Rollouts of 8 + 8 .. 23 tokens in the layout that the store writes, without the store's checks and syncs."""
    RolloutStore(folder, {"verifier": "synthetic"})
    ids = np.random.default_rng(0).integers(1000, 50000, 4096).tolist()
    texts = [",".join(map(str, ids[start : start + 8 + start % 16])) for start in range(2048)]
    line = '{"rollout_id":"p%07d/T1/0","temperature":1.0,"prompt_ids":[%s],"completion_ids":[%s],"meta":{}}\n'
    prompt = ",".join(map(str, ids[-8:]))
    for shard, start in enumerate(range(0, num_rows, SHARD_ROWS)):
        rows = range(start, min(start + SHARD_ROWS, num_rows))
        lines = "".join(line % (row, prompt, texts[row * 7 % len(texts)]) for row in rows)
        (folder / f"shard-{shard:05d}.jsonl").write_text(lines, encoding="ascii")


def peak_mib() -> float:
    """Largest resident size of this process since ``reset_peak``."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def reset_peak() -> float:
    """Forget earlier peaks (``man 5 proc``: clear_refs); the resident size now, MiB."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return psutil.Process().memory_info().rss / 2**20


def measure(folder: Path, num_steps: int, lists: bool) -> dict[str, float]:
    """One store in this process; ``num_steps`` of 16 rollouts, from the first and from the middle of a pass."""
    data = RolloutDataModule([], gamma=8, batch_size=16, windows_per_rollout=4)
    before = reset_peak()
    times = [time.perf_counter()]
    if lists:
        data._train_source = RolloutStore.open(folder).load()
    else:
        open_index(folder)
        times.append(time.perf_counter())
        index = open_index(folder)
        times.append(time.perf_counter())
        data._train_source = index
    times.append(time.perf_counter())
    data.setup()
    loader = data.train_dataloader()
    middle = len(data.train_rollouts) // 32
    for step in (*range(num_steps // 2), *range(middle, middle + num_steps // 2)):
        loader.batch(step)
    loader.state_dict()
    times.append(time.perf_counter())
    seconds = np.diff(times).round(3).tolist()
    opened = {"load_s": seconds[0]} if lists else {"build_s": seconds[0], "reopen_s": seconds[1]}
    return {
        "num_rollouts": len(data.train_rollouts),
        "store_mib": round(sum(path.stat().st_size for path in folder.glob("shard-*")) / 2**20, 1),
        "index_mib": round(sum(path.stat().st_size for path in folder.glob(".index/rows.bin")) / 2**20, 1),
        **opened,
        "rollouts_per_s": round(num_steps * 16 / seconds[-1], 1),
        "peak_growth_mib": round(peak_mib() - before, 1),
    }


def measure_apart(folder: Path, num_steps: int, lists: bool = False) -> dict[str, float]:
    """``measure`` in a new process."""
    command = [sys.executable, __file__, "--measure", str(folder), "--steps", str(num_steps), *["--lists"] * lists]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", default="10000,100000,1000000", help="sizes of the stores, by commas")
    parser.add_argument("--steps", type=int, default=2000, help="steps of 16 rollouts that are read")
    parser.add_argument("--lists", action="store_true", help="load the rollouts into a list, as training once did")
    parser.add_argument("--folder", type=Path, help="keep the stores there; a temporary folder by default")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure is not None:
        print(json.dumps(measure(options.measure, options.steps, options.lists)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        for num_rows in map(int, options.rows.split(",")):
            folder = (options.folder or Path(temporary)) / str(num_rows)
            if not folder.exists():
                write_store(folder, num_rows)
            print(json.dumps(measure_apart(folder, options.steps, options.lists)), flush=True)


if __name__ == "__main__":
    main()
