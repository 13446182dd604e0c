"""What the terminal shows: our own lines and progress bars, warnings of libraries, not their advertisements."""

from __future__ import annotations

import logging
import warnings

# expected here, so not worth a line: (reason, start of the message)
_EXPECTED = (
    ("held-out windows are the StreakMonitor's business", "You passed in a `val_dataloader`"),
    ("a run is continued in a folder of its own", "The dirpath has changed"),
    ("the run folder is meant to hold checkpoints too", "Checkpoint directory"),
    ("epochs mean nothing here", "The number of training batches"),
    ("rollouts are read from memory", "The 'train_dataloader' does not have many workers"),
)


def quiet_libraries() -> None:
    """Silence progress notes of libraries; errors and unexpected warnings stay."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    for _, message in _EXPECTED:
        warnings.filterwarnings("ignore", message=message.replace("(", r"\("))
    for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.WARNING)
    keep_stdout_clean()
    # it kills this process without another word where a process that it has started dies before training begins
    logging.getLogger("lightning.fabric.strategies.launchers.subprocess_script").setLevel(logging.INFO)


def keep_stdout_clean() -> None:
    """accelerate imports DeepSpeed where it is installed, which then says on stdout that there is no GPU."""
    logging.getLogger("DeepSpeed").addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    return "Setting accelerator to CPU" not in record.getMessage()
