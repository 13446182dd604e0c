"""A search for the fastest settings with Optuna: where the study lies, how it goes on, what it may try.

The study is a SQLite file in the sweep folder. A run with the same ``run_id`` goes on with it: trials that were cut off
are tried again, and only as many new ones follow as are missing. Optuna (2.10, the release the Hydra plugin takes) is
imported only here and only for such sweeps; this module knows neither Hydra nor models.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)
_SQLITE = "sqlite:///"


def prepare_study(storage: str, name: str, num_trials: int) -> tuple[int, int]:
    """Make the folder of the study, open or begin it, and queue the trials that were cut off.

    Args:
        storage: ``sqlite:///`` and the path of the file, or another address that SQLAlchemy takes.

    Returns:
        (trials that are left to do, trials that are done).
    """
    logging.getLogger("alembic").setLevel(logging.WARNING)
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if storage.startswith(_SQLITE):
        _stamp(Path(storage.removeprefix(_SQLITE)))
    study = optuna.create_study(study_name=name, storage=storage, direction="maximize", load_if_exists=True)
    states = optuna.trial.TrialState
    trials = study.get_trials(deepcopy=False)
    for trial in trials:
        if trial.state == states.RUNNING:  # only one process works on a sweep folder: nobody runs it any more
            study.tell(trial.number, state=states.FAIL)
            study.enqueue_trial(trial.params)
    num_done = sum(trial.state == states.COMPLETE for trial in trials)
    if num_done:
        log.info("study %s: %d trials done, %d to go", name, num_done, max(0, num_trials - num_done))
    return max(0, num_trials - num_done), num_done


def _stamp(path: Path) -> None:
    """Write the version of Optuna's tables into a new file.

    Optuna does so itself, but its releases below 3.1 never commit it under SQLAlchemy 2 and then refuse the file
    (github.com/facebookresearch/hydra issue 2562).
    """
    import optuna
    from alembic.script import ScriptDirectory

    head = ScriptDirectory(str(Path(optuna.__file__).parent / "storages/_rdb/alembic")).get_current_head()
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute("CREATE TABLE IF NOT EXISTS alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY)")
        if database.execute("SELECT count(*) FROM alembic_version").fetchone() == (0,):
            database.execute("INSERT INTO alembic_version VALUES (?)", (head,))


def sampler_space(config: Any, trial: Any) -> None:
    """What the chosen sampler reads, and nothing else: ``num_nodes`` for a grown tree, K and temperature for drafts.

    ``hydra.sweeper.custom_search_space`` of ``conf/hydra/sweeper/optuna_speed.yaml``. A key that the command line sets
    or gives a range of its own is left alone.
    """
    given = {**trial.user_attrs, **trial.params}
    tree = str(given.get("sampler", config.sampler.name)).startswith("tree") and given.get("sampler") != "tree_match"
    suggestions: dict[str, Callable[[str], Any]] = (
        {"sampler.num_nodes": lambda key: trial.suggest_int(key, 4, 64, log=True)}
        if tree
        else {
            "sampler.K": lambda key: trial.suggest_int(key, 1, 16, log=True),
            "sampler.temperature": lambda key: trial.suggest_float(key, 0.2, 1.6, step=0.1),
        }
    )
    for key, suggest in suggestions.items():
        if key not in given:
            suggest(key)
