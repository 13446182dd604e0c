"""Quantised verifiers: the ``verifier.quantization`` mapping, or a checkpoint that is quantised already.

Everything is checked before weights are read: the method, its settings, and that its package is here. The arithmetic
is the package's own. A quantised verifier is a verifier of its own, with a law and a fingerprint of its own: what was
trained for the plain one is refused.

Source: transformers 5.24, quantizers/auto.py and utils/quantization_config.py (methods, settings, packages they name).
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    AutoHfQuantizer,
    AutoQuantizationConfig,
)
from transformers.utils.quantization_config import TorchAoConfig

from specdiff2.models.placement import Placement
from specdiff2.types import ConfigError

# method -> (module that must be there, what installs it)
PACKAGES = {
    "aqlm": ("aqlm", "'aqlm[gpu,cpu]'"),
    "auto-round": ("auto_round", "auto-round"),
    "awq": ("gptqmodel", "gptqmodel"),
    "bitsandbytes": ("bitsandbytes", "bitsandbytes"),
    "compressed-tensors": ("compressed_tensors", "compressed-tensors"),
    "eetq": ("kernels", "kernels"),
    "gptq": ("gptqmodel", "gptqmodel optimum"),
    "hqq": ("hqq", "hqq"),
    "quanto": ("optimum.quanto", "optimum-quanto"),
    "torchao": ("torchao", "torchao"),
    "vptq": ("vptq", "vptq"),
}
# what the quantisers and their packages raise for bad settings, missing parts and missing hardware
_REFUSALS = (ImportError, ValueError, TypeError, KeyError, AssertionError, RuntimeError)


def prepare_quantization(
    settings: Mapping[str, Any] | None, config: PreTrainedConfig, placement: Placement, name: str
) -> dict[str, Any]:
    """Options for ``from_pretrained``: empty where there is nothing to quantise.

    Args:
        settings: ``quant_method`` and its settings, or None.
        config: of the checkpoint, which may say that it is quantised already.

    Raises:
        ConfigError: unknown method or setting, a missing package (with the command that installs it), hardware that
            the method cannot use, or a checkpoint that is quantised in another way.
    """
    stored = getattr(config, "quantization_config", None)
    if stored is not None and not isinstance(stored, Mapping):
        stored = stored.to_dict()
    if settings is None and stored is None:
        return {}
    if placement.num_ranks > 1:
        raise ConfigError(f"{name}: a quantised verifier is not split over processes; use device_map=auto, not tp_plan")
    device_map = placement.options.get("device_map")
    if settings is None:
        _checked(stored, device_map, f"{name} is quantised", stored=True)
        return {}
    if stored is not None and _method(stored) != _method(settings):
        raise ConfigError(
            f"quantization: {name} is quantised already ({_method(stored)}), which {_method(settings)} cannot change; "
            "set verifier.quantization=null"
        )
    what = f"quantization of {name}"
    return {"quantization_config": _checked(settings, device_map, what, stored=stored is not None)}


def _checked(settings: Mapping[str, Any], device_map: object, what: str, *, stored: bool) -> Any:
    method = _method(settings)
    known = sorted({key.removesuffix("_4bit").removesuffix("_8bit") for key in AUTO_QUANTIZER_MAPPING})
    if method not in known:
        raise ConfigError(f"{what}: quant_method={method!r}: expected one of {', '.join(known)}")
    module, package = PACKAGES.get(method, ("transformers", ""))
    if not _installed(module):
        raise ConfigError(f"{what} by {method}, which needs a package that is not installed: pip install {package}")
    if not stored:
        _check_keys(settings, method)
    try:
        config = _torchao(settings) if method == "torchao" else AutoQuantizationConfig.from_dict(dict(settings))
        quantizer = AutoHfQuantizer.from_config(config, pre_quantized=stored)
        quantizer.validate_environment(device_map=device_map, weights_only=True)
    except _REFUSALS as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"{what} by {method} is not possible here: {reason}; change verifier.quantization (null: none)"
        ) from error
    return config


def _method(settings: Mapping[str, Any]) -> str:
    """``bitsandbytes`` may be named by its ``load_in_8bit`` / ``load_in_4bit`` alone, as transformers has it."""
    method = settings.get("quant_method")
    if method is None and (settings.get("load_in_8bit") or settings.get("load_in_4bit")):
        return "bitsandbytes"
    return str(getattr(method, "value", method))


def _check_keys(settings: Mapping[str, Any], method: str) -> None:
    """transformers drops settings it does not know; a typo must not."""
    kind = AUTO_QUANTIZATION_CONFIG_MAPPING.get(method) or AUTO_QUANTIZATION_CONFIG_MAPPING[f"{method}_8bit"]
    known = {"quant_method"}
    for owner in kind.__mro__:
        known |= set(inspect.signature(owner.__init__).parameters) - {"self", "args", "kwargs"}
    unknown = sorted(set(settings) - known)
    if unknown:
        raise ConfigError(
            f"quantization.{unknown[0]}: {method} has no such setting; expected some of {', '.join(sorted(known))}"
        )


def _torchao(settings: Mapping[str, Any]) -> TorchAoConfig:
    """``quant_type`` as the name of a torchao class with its defaults, or the dictionary that torchao writes itself."""
    kind = settings.get("quant_type")
    if not isinstance(kind, str):
        return AutoQuantizationConfig.from_dict(dict(settings))
    found = getattr(importlib.import_module("torchao.quantization"), kind, None)
    if found is None:
        raise ValueError(f"torchao.quantization has no {kind!r}; expected such as Int8WeightOnlyConfig")
    others = {key: value for key, value in settings.items() if key not in ("quant_method", "quant_type")}
    return TorchAoConfig(found(), **others)


def _installed(module: str) -> bool:
    parents = module.split(".")
    return all(importlib.util.find_spec(".".join(parents[: i + 1])) is not None for i in range(len(parents)))
