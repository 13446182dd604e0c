"""The entry point of eval.py, but seed 7 ends the process as the kernel does when memory runs out."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import hydra

import eval as entry


@hydra.main(version_base="1.3", config_path=str(entry.CONFIG_DIR), config_name="eval")
def main(cfg):
    if cfg.seed == 7:
        os._exit(9)
    return entry.main.__wrapped__(cfg)


if __name__ == "__main__":
    entry.build.run_entry_point(main, entry.CONFIG_DIR)
