"""Field paths into JSON rows, and how a row's value becomes chat messages.

A path is a key, or keys and list indices joined by dots: ``question``, ``turns.0``, ``instances[0].input``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from specdiff2.data.prompt import Prompt
from specdiff2.types import ConfigError

Message = dict[str, str]
FieldNames = str | Sequence[str]

_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


class FieldMapping:
    """Which fields of a row hold prompt, answer, id and the rest; shared by all row sources.

    Several names for the prompt or the id are alternatives: the first one that a row has counts.
    """

    def __init__(
        self,
        prompt_field: FieldNames,
        answer_field: str | None,
        id_field: FieldNames | None,
        template: str | None,
        meta_fields: tuple[str, ...],
    ) -> None:
        if not prompt_field:
            raise ConfigError(f"prompt_field={prompt_field!r}: expected the name of a field")
        if template is not None and "{prompt}" not in template:
            raise ConfigError(f"template={template!r}: expected {{prompt}} somewhere in it")
        self.prompt_field, self.answer_field, self.id_field = prompt_field, answer_field, id_field
        self.template, self.meta_fields = template, meta_fields

    def describe(self) -> dict[str, Any]:
        return {"prompt_field": self.prompt_field, "id_field": self.id_field, "template": self.template}

    def to_prompt(self, row: Mapping[str, Any], *, where: str, default_id: str) -> Prompt:
        answer = None if self.answer_field is None else to_answer(get_field(row, self.answer_field, where))
        messages = to_messages(first_field(row, self.prompt_field, where), where, self.template)
        meta = {path: get_field(row, path, where) for path in self.meta_fields}
        return Prompt(self.prompt_id(row, where, default_id), messages, answer, meta)

    def prompt_id(self, row: Mapping[str, Any], where: str, default_id: str) -> str:
        return default_id if self.id_field is None else str(first_field(row, self.id_field, where))


def first_field(row: Mapping[str, Any], paths: FieldNames, where: str) -> Any:
    """The value at the first of the paths that the row has. Raises ConfigError as ``get_field``, for the last one."""
    alternatives = [paths] if isinstance(paths, str) else list(paths)
    for path in alternatives[:-1]:
        if has_field(row, path):
            return get_field(row, path, "")
    return get_field(row, alternatives[-1], where)


def has_field(row: Mapping[str, Any], path: str) -> bool:
    """Whether the row has a value at ``path`` (null is none)."""
    try:
        return get_field(row, path, "") is not None
    except ConfigError:
        return False


def get_field(row: Mapping[str, Any], path: str, where: str) -> Any:
    """The value at ``path``; a key that itself contains dots is found first.

    Raises:
        ConfigError: the row has no such field; names ``where`` and the fields that exist.
    """
    if path in row:
        return row[path]
    value: Any = row
    for part in re.sub(r"\[(\d+)\]", r".\1", path).split("."):
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, Sequence) and not isinstance(value, str) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        else:
            have = ", ".join(map(str, row)) if value is row else _shape(value)
            raise ConfigError(f"{where}: no field {path!r} (stopped at {part!r}); the row has: {have}")
    return value


def to_messages(value: Any, where: str, template: str | None = None) -> list[Message]:
    """Chat messages that end with a user turn.

    A string is the user turn; of a list of strings the first one is; of a list of role/content (or
    from/value) objects the first user turn and what comes before it are kept. ``template`` wraps the
    user turn: its ``{prompt}`` is replaced.

    Raises:
        ConfigError: the value is empty or has none of these shapes.
    """
    messages = _conversation(value, where)
    if not messages or not messages[-1]["content"].strip():
        raise ConfigError(f"{where}: the prompt is empty; expected some text, delete the row or choose another field")
    if template is not None:
        messages[-1]["content"] = template.replace("{prompt}", messages[-1]["content"])
    return messages


def to_answer(value: Any) -> str | None:
    """The reference answer as text; of a GSM8K solution only what follows ``####``."""
    if value is None:
        return None
    text = str(value)
    return text.rsplit("####", 1)[1].strip() if "####" in text else text.strip()


def _conversation(value: Any, where: str) -> list[Message]:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if isinstance(value, Sequence) and all(isinstance(turn, str) for turn in value):
        return [{"role": "user", "content": value[0]}] if value else []
    if isinstance(value, Sequence) and all(isinstance(turn, Mapping) for turn in value):
        messages: list[Message] = []
        for turn in value:
            role = _ROLES.get(str(turn.get("role", turn.get("from"))))
            content = turn.get("content", turn.get("value"))
            if role is None or not isinstance(content, str):
                raise ConfigError(f"{where}: a turn has {_shape(turn)}; expected role and content (or from and value)")
            messages.append({"role": role, "content": content})
            if role == "user":
                return messages
        return []
    raise ConfigError(f"{where}: the prompt field is {_shape(value)}; expected text, a list of texts or of messages")


def _shape(value: Any) -> str:
    if isinstance(value, Mapping):
        return "an object with " + (", ".join(map(str, value)) or "no field")
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"a list of {len(value)}"
    return f"a {type(value).__name__}"
