"""Measure speculative decoding: compose -> validate -> seed -> build -> run -> report.

python eval.py                                   # the drafter that the package ships, on unseen problems
python eval.py sampler.K=8 sampler.gamma=8
python eval.py -m sampler.K=1,4,8                # one merged table, CSV and K-curve
python eval.py batch_sizes=[1,2,4,8,16]          # tokens/s of so many prompts at once
torchrun --nproc-per-node 8 eval.py              # prompts split over processes, a GPU each; srun as well
python eval.py prompt="Why is the sky blue?"     # show the streaks of one answer
"""

import os

# before the libraries that read them: spinning threads slow small operators, and our own bars are enough
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

from pathlib import Path

import hydra
from omegaconf import DictConfig

from specdiff2.runtime import build
from specdiff2.runtime.config_schema import EvalConfig
from specdiff2.runtime.evaluation import evaluate
from specdiff2.runtime.preflight import preflight

CONFIG_DIR = Path(__file__).resolve().parent / "conf"


@hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name="eval")
def main(cfg: DictConfig) -> None:
    config = build.check(cfg, EvalConfig)
    if config["preflight"] is not False:
        return preflight(config, "eval")
    if build.is_finished(cfg):
        return
    evaluate(config, build.begin(config))


if __name__ == "__main__":
    build.run_entry_point(main, CONFIG_DIR)
