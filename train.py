"""Distil a drafter from its verifier: compose -> validate -> seed -> build -> run -> report.

python train.py                                  # rollouts, warm-up, streak-distillation, export
python train.py model=smollm2_block verifier=smollm2 objective=streak max_steps=2000
python train.py data.online=true                 # fresh rollouts while training
python train.py resume=true                      # go on with the newest checkpoint
"""

import os

# before the libraries that read them: spinning threads slow small operators, and our own bars are enough
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

from pathlib import Path

import hydra
from omegaconf import DictConfig

from specdiff2.runtime import build
from specdiff2.runtime.config_schema import TrainConfig
from specdiff2.runtime.preflight import preflight
from specdiff2.runtime.training import train

CONFIG_DIR = Path(__file__).resolve().parent / "conf"


@hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name="train")
def main(cfg: DictConfig) -> None:
    config = build.check(cfg, TrainConfig)
    if config["preflight"] is not False:
        return preflight(config, "train")
    if build.is_finished(cfg):
        return
    train(config, build.begin(config))


if __name__ == "__main__":
    build.run_entry_point(main, CONFIG_DIR)
