"""``eval.py`` by several processes: each decodes every n-th prompt on its own device, one of them merges.

    torchrun --nproc-per-node 8 eval.py ...        # also `srun -n 64 python eval.py ...`; rank 0 waits and merges
    python eval.py run_id=X shard=0/4              # jobs without a launcher; the last one merges

No collectives: a process that dies costs its own unfinished prompts, and the same command with the same run_id, with
any number of processes, decodes these alone. What lies where is ``evaluation.shards``; turns of a conversation stay
together.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from specdiff2.data.multi_turn import num_turns
from specdiff2.data.prompt import Prompt, require_unique_ids
from specdiff2.evaluation.json_files import read_json
from specdiff2.evaluation.parts import Part, prompts_digest
from specdiff2.evaluation.shards import MERGED_FILE, SHARDS, is_pending, merge
from specdiff2.launch import launched, local_rank
from specdiff2.runtime.provenance import hardware, write_json
from specdiff2.runtime.rank_files import Share, has_died, how_to_go_on, states, take_lock, tell, wait_for_others
from specdiff2.types import ConfigError, SpecDiffError

log = logging.getLogger(__name__)
_held: list[Any] = []  # locks of this process, until it ends


def share_of(config: Mapping[str, Any]) -> Share | None:
    """What this process decodes; None: everything, as the only process or together with all others (``tp_plan``).

    Raises:
        ConfigError: a ``shard`` that is none, or a task that cannot be split.
    """
    if "shard" not in config:
        return None
    given, tp_plan, found = config["shard"], config["verifier"].get("tp_plan"), launched()
    if given is not None:
        share = _parse(given)
        if found is not None or tp_plan is not None:
            other = "verifier.tp_plan" if found is None else f"a launcher of {found[1]} processes"
            raise ConfigError(f"shard={given} and {other}: expected one of them; set shard=null, or start one process")
    elif tp_plan is not None:
        return None
    elif found is not None:
        share = Share(*found, launched=True)
    elif (Path(config["paths"]["run"]) / SHARDS).is_dir():  # one process goes on with what several began
        share = Share(0, 1, launched=False)
    else:
        return None
    _check_task(config, share)
    return share


def _check_task(config: Mapping[str, Any], share: Share) -> None:
    needed = {"task": "decode", "prompt": None, "batch_sizes": None}
    for key, value in needed.items():
        if config[key] != value:
            raise ConfigError(
                f"{key}={config[key]!r} and {share.num_ranks} processes that split prompts: expected "
                f"{key}={value or 'null'}; for this run start one process, with a run_id of its own"
            )


def _parse(given: str) -> Share:
    match = re.fullmatch(r"(\d+)/(\d+)", given)
    if match is None or int(match[1]) >= int(match[2]):
        raise ConfigError(f"shard={given!r}: expected NUMBER/COUNT with 0 <= NUMBER < COUNT, as in shard=0/4")
    return Share(int(match[1]), int(match[2]), launched=False)


def part_of(share: Share, prompts: Sequence[Prompt], benchmark: str) -> tuple[list[Prompt], Part]:
    """Prompts rank, rank + num_ranks, ..., and where they and their later turns lie in the whole benchmark.

    Raises:
        ConfigError: two prompts with one id.
    """
    require_unique_ids(prompts, benchmark)
    turns = [num_turns(prompt) for prompt in prompts]
    first = [0, *itertools.accumulate(turns)]
    own = range(share.rank, len(prompts), share.num_ranks)
    indices = [first[index] + turn for index in own for turn in range(turns[index])]
    content = prompts_digest((one.prompt_id, [one.messages, list(one.later_turns)]) for one in prompts)
    return [prompts[i] for i in own], Part(indices, {"num_prompts": first[-1], "prompts_sha256": content})


def open_shard(share: Share, config: Mapping[str, Any]) -> Path:
    """The folder this process writes to, one for each kind of machine that its rank has run on.

    Raises:
        ConfigError: this process has no GPU of its own.
        SpecDiffError: an older process with the same share still runs.
    """
    if share.launched:
        _check_device(config["verifier"].get("device", "auto"))
    if not share.speaks:
        logging.disable(logging.INFO)
    shards = Path(config["paths"]["run"]) / SHARDS
    shards.mkdir(parents=True, exist_ok=True)
    lock = take_lock(shards / f"{share.name}.lock", wait=False)
    if lock is None:
        other = states(share, shards)[share.rank]
        raise SpecDiffError(
            f"rank {share.rank} of {share.num_ranks} still runs as process {other.get('pid')} on {other.get('host')}: "
            "wait until it ends, or end it, and run the same command again"
        )
    _held.append(lock)
    mine = hardware(config, threads=torch.get_num_threads())
    for attempt in itertools.count():
        folder = shards / (share.name + (f".{attempt}" if attempt else ""))
        known = read_json(folder / "run.json", "a run's file; delete the folder to measure again")
        if known is None or all(known.get(key) == value for key, value in mine.items()):
            break
    tell(share, shards, "running")
    return folder


def _check_device(device: str) -> None:
    """There is a GPU for this process's ``local_rank``; Slurm may show a task its own GPU alone."""
    local = local_rank()
    count = torch.cuda.device_count()
    bound = count == 1 and "SLURM_STEP_ID" in os.environ
    if device in ("auto", "cuda") and count and local >= count and not bound:
        raise ConfigError(
            f"process {local} of this machine has no GPU of its own, torch sees {count}: start at most {count} "
            "processes a machine, or set verifier.device=cpu"
        )


@contextlib.contextmanager
def telling(share: Share | None, config: Mapping[str, Any]) -> Iterator[None]:
    """Says when this process's work fails or is stopped. A launcher stops all ranks when one of them dies.

    Raises:
        SpecDiffError: SIGTERM, with the ranks that have died.
    """
    if share is None:
        yield
        return
    shards = Path(config["paths"]["run"]) / SHARDS

    def stop(number: int, frame: Any) -> None:
        others = states(share, shards).items()
        dead = [f"rank {rank} (process {one['pid']}) has died" for rank, one in others if has_died(one)]
        told = "; ".join([*dead, f"rank {share.rank} of {share.num_ranks} was stopped by SIGTERM"])
        raise SpecDiffError(f"{told}; {how_to_go_on(config['run_id'])}")

    handles = share.launched and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if handles:
        signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except BaseException as error:
        tell(share, shards, "failed", error=f"{type(error).__name__}: {error}")
        log.error("rank %d of %d failed", share.rank, share.num_ranks)
        raise
    finally:
        if handles:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        while _held:
            _held.pop().close()


@contextlib.contextmanager
def merging(
    share: Share, config: Mapping[str, Any], folder: Path, num_prompts: Mapping[str, int]
) -> Iterator[Path | None]:
    """This process has decoded its prompts. The run folder with everything merged, if it is the one to report on it.

    Args:
        folder: this process's own.
        num_prompts: of each benchmark, by its place below a run.

    Raises:
        SpecDiffError: rank 0 waits for a process that has failed, died or is silent for ``shard_wait_s``.
        MismatchError, CorruptFileError: see ``evaluation.shards.merge``.
    """
    run = Path(config["paths"]["run"])
    tell(share, run / SHARDS, "done")
    if share.launched and share.rank == 0:
        wait_for_others(share, run / SHARDS, config["run_id"], config["shard_wait_s"])
    lock = None if share.launched else take_lock(run / SHARDS / "merge.lock", wait=True)  # two jobs may end at once
    with lock or contextlib.nullcontext():
        if not _is_mine(share, run):
            yield None
            return
        split = merge(run, num_prompts)
        record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        write_json(run / "run.json", {**record, "split": split})
        yield run
        write_json(run / SHARDS / MERGED_FILE, {"merged_by": share.name})


def _is_mine(share: Share, run: Path) -> bool:
    """Whether this process merges: rank 0 of a launcher, else the last one that has finished."""
    if share.launched or share.num_ranks == 1:
        return share.rank == 0
    left = [rank for rank, state in states(share, run / SHARDS).items() if state["status"] != "done"]
    if left:
        named = ", ".join(f"{rank}/{share.num_ranks}" for rank in left)
        log.info("shard %d/%d is done, not yet: %s; the last one to finish merges", share.rank, share.num_ranks, named)
    return not left and is_pending(run)
