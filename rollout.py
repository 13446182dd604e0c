"""Sample rollouts from the verifier, before training and at any scale: compose -> validate -> seed -> sample.

python rollout.py                                          # the rollouts that `python train.py` would sample first
python rollout.py verifier=qwen72b engine=openai engine.url=http://host:8000/v1     # from a vLLM or SGLang server
torchrun --nproc-per-node 8 rollout.py verifier=qwen7b     # one writer a GPU; more may be started at any time, anywhere
"""

import os

# before the libraries that read them: spinning threads slow small operators, and our own bars are enough
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

from pathlib import Path

import hydra
from omegaconf import DictConfig

from specdiff2.runtime import build
from specdiff2.runtime.config_schema import RolloutConfig
from specdiff2.runtime.rollout_run import check_writer, sample_rollouts

CONFIG_DIR = Path(__file__).resolve().parent / "conf"


@hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name="rollout")
def main(cfg: DictConfig) -> None:
    config = build.check(cfg, RolloutConfig)
    check_writer(config)
    build.begin(config)
    sample_rollouts(config)


if __name__ == "__main__":
    build.run_entry_point(main, CONFIG_DIR)
