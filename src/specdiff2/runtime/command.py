"""What a user types, made safe for Hydra's grammar, and Hydra's refusals in our words."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import QuotedString
from hydra.errors import ConfigCompositionException, HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specdiff2.runtime.config_schema import locate, unknown_key
from specdiff2.types import ConfigError

PROMPT = "prompt="
MULTIRUN = frozenset({"-m", "--multirun"})  # there, commas and choices in a prompt are meant


def quote_prompt(arguments: Sequence[str]) -> list[str]:
    """The arguments with the text of ``prompt=`` quoted, so that Hydra takes it letter by letter.

    The shell removes the user's quotes; commas, apostrophes, parentheses or ``=`` would then be Hydra's grammar.
    Left alone: an empty or ``null`` value, one that Hydra sees as quoted already, and sweeps.
    """
    if MULTIRUN & set(arguments):
        return list(arguments)
    return [PROMPT + quote(a.removeprefix(PROMPT)) if _needs_quotes(a) else a for a in arguments]


def quote(text: str) -> str:
    r"""``text`` as a Hydra quoted string. Backslashes count only before a quote, the end or ``${``: doubled there."""
    text = re.sub(r"(\\*)\$\{", lambda match: match.group(1) * 2 + "\\${", text)  # for OmegaConf: no interpolation
    text = re.sub(r"(\\*)'", lambda match: match.group(1) * 2 + "\\'", text)
    text = re.sub(r"(\\+)$", lambda match: match.group(1) * 2, text)
    return f"'{text}'"


def _needs_quotes(argument: str) -> bool:
    value = argument.removeprefix(PROMPT)
    if value == argument or not value or value.lower() == "null":
        return False
    if value[0] not in "'\"" or value[0] != value[-1]:
        return True
    try:
        parsed = OverridesParser.create().parse_override(argument)
    except HydraException:  # 'one' and 'two'
        return True
    return not isinstance(parsed._value, QuotedString)  # value() has lost the quotes


def clear_composition_error(error: Exception, config_dir: Path, arguments: Sequence[str] = ()) -> Exception:
    """Hydra's and OmegaConf's own refusals (``gama=3``, a missing option) in our words.

    Args:
        arguments: what the user typed; suggestions come from the options chosen there.
    """
    text = str(error)
    found = re.search(r"Could not override '([^']+)'", text) or re.search(r"Key '([^']+)' is not in struct", text)
    if found is None or not isinstance(error, ConfigCompositionException | OmegaConfBaseException):
        return ConfigError(text.split("\nConfig search path:")[0].strip())
    full = re.search(r"full_key: (\S+)", str(error.__cause__ or text))
    key = found.group(1) if "." in found.group(1) or full is None else full.group(1)
    configs = compositions(config_dir, arguments)
    for config in configs:
        if _is_parameter(config, key):
            return ConfigError(f"setting {key!r} exists but has no value in conf/ yet: add it with a plus, +{key}=...")
    return unknown_key(key, sorted({name for config in configs for name in _flatten(config, "")}))


def compositions(config_dir: Path, arguments: Sequence[str]) -> list[dict[str, Any]]:
    """The entry points' configurations with the user's choices of options (``data=jsonl``), as far as they compose."""
    choices = [a for a in arguments if (config_dir / a.partition("=")[0].lstrip("+")).is_dir() and "=" in a]
    found = []
    for path in sorted(config_dir.glob("*.yaml")):
        for chosen in (choices, []):
            GlobalHydra.instance().clear()
            try:
                with initialize_config_dir(str(config_dir.resolve()), version_base="1.3"):
                    config = OmegaConf.to_container(compose(path.stem, chosen), resolve=False)
            except (HydraException, OmegaConfBaseException):  # an option of the other entry point
                continue
            assert isinstance(config, dict)
            found.append(config)
            break
    return found  # type: ignore[return-value]


def _is_parameter(config: dict[str, Any], key: str) -> bool:
    """Whether what ``key``'s section builds takes a parameter of that name."""
    *sections, leaf = key.split(".")
    node: Any = config
    for section in sections:
        node = node.get(section) if isinstance(node, dict) else None
    if not isinstance(node, dict) or "_target_" not in node or leaf in node:
        return False
    try:
        parameters = inspect.signature(locate(str(node["_target_"]), key)).parameters
    except (ConfigError, ValueError):
        return False
    return leaf in parameters


def _flatten(node: Any, prefix: str) -> list[str]:
    if not isinstance(node, dict):
        return [prefix]
    start = f"{prefix}." if prefix else ""
    children = [key for name, child in node.items() for key in _flatten(child, f"{start}{name}")]
    return ([prefix] if prefix else []) + children
