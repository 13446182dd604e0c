"""A training checkpoint as a drafter folder, without any model: for runs that were cut short.

Every strategy writes the same checkpoint (``training.strategies``): trained tensors whole, under the module's names,
and what the drafter is. So this is renaming and copying, whatever number of processes trained it.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from specdiff2.models.drafter_files import BLOCK_FORMAT, EAGLE_FORMAT, WEIGHTS_FILE, store_drafter
from specdiff2.models.eagle_config import EagleConfig
from specdiff2.models.masked_lm_config import MaskedLMConfig
from specdiff2.runtime.resume import read_checkpoint
from specdiff2.types import CorruptFileError

PREFIX = "drafter."  # of the training module


def export_checkpoint(path: str | Path, out: str | Path) -> Path:
    """Write the drafter of a checkpoint to ``out``; its path.

    Raises:
        ConfigError: ``out`` holds something other than a drafter.
        CorruptFileError: not a checkpoint, or one from before checkpoints told what their drafter is.
    """
    checkpoint = read_checkpoint(path)
    drafter = checkpoint.record.get("drafter")
    if drafter is None:
        raise CorruptFileError(f"checkpoint {path}: does not say what its drafter is (written by an older version); go "
                               "on training with resume=... and export from there")  # fmt: skip
    state = torch.load(checkpoint.path, map_location="cpu", weights_only=True, mmap=True)["state_dict"]
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in state.items()}
    run = checkpoint.path.resolve().parent.parent
    facts = {"run": str(run), "step": checkpoint.step, "objective": checkpoint.record["schedule"][-1]["objective"]}
    if drafter["kind"] == MaskedLMConfig.__name__:
        from specdiff2.models.lora import adapter_name  # here, because peft takes seconds to import
        from specdiff2.models.masked_lm_files import store_masked_lm

        config = MaskedLMConfig(**drafter["config"])
        own = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        named = own if config.lora is None else {adapter_name(name): tensor for name, tensor in own.items()}
        return store_masked_lm(config, named, out, facts)
    name = EAGLE_FORMAT if drafter["kind"] == EagleConfig.__name__ else BLOCK_FORMAT
    tensors = {key: tensor.contiguous() for key, tensor in tensors.items()}
    return store_drafter(
        out, name, drafter["config"], facts, tensors, lambda new: save_file(tensors, new / WEIGHTS_FILE)
    )
