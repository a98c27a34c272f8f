"""Reads the quantization config of a checkpoint field by field."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from .._checks import require_that, shown
from .._errors import message
from .._files import open_regular

_MOST_BYTES = 64_000_000
"""Maximum size of a JSON file: indices of models with many experts need several MB."""

_MOST_OF_PATTERN = 500
"""Maximum length in characters of a pattern, and of the name that it is matched with."""

_REPEATED_GROUP = re.compile(r"\)\s*[*+{]")
"""A repeated group: matching could take exponential time."""


class Config:
    """A JSON object of a config file. Its fields are checked when they are read.

    Attributes:
      data: the object.
      where: name of the config in messages.
    """

    def __init__(self, data: Any, where: str) -> None:
        self.where = where
        if not isinstance(data, Mapping):
            self._refuse(f"a {type(data).__name__}", "a JSON object", where)
        self.data: Mapping[str, Any] = data

    def __contains__(self, key: str) -> bool:
        return self.data.get(key) is not None

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        """Returns an integer of at least `least`."""
        value = self.data.get(key)
        value = default if value is None else value
        if type(value) is not int or value < least:
            self.refuse(key, f"an integer of {least} or more")
        return value

    def one_of(self, key: str, choices: Sequence[Any], default: Any = None) -> Any:
        """Returns a value that is one of `choices`, of their type."""
        value = self.data.get(key)
        value = default if value is None else value
        if not any(type(value) is type(choice) and value == choice for choice in choices):
            self.refuse(key, f"one of {', '.join(map(repr, choices))}")
        return value

    def flag(self, key: str, default: bool | None = None) -> bool:
        """Returns a boolean."""
        return self.one_of(key, (True, False), default)

    def names(self, key: str) -> tuple[str, ...]:
        """Returns a list of strings; an empty one if the field is missing."""
        value = self.data.get(key)
        value = [] if value is None else value
        if not (isinstance(value, list) and all(isinstance(name, str) for name in value)):
            self.refuse(key, "a list of strings")
        return tuple(value)

    def part(self, key: str) -> "Config":
        """Returns an inner object."""
        return Config(self.data.get(key), f"{self.where}.{key}")

    def refuse(self, key: str, expected: str) -> NoReturn:
        """Raises an error: the value of a field is not allowed."""
        self._refuse(f"{key} == {shown(self.data.get(key))}", expected, self.where)

    def _refuse(self, given: str, expected: str, where: str) -> NoReturn:
        raise ValueError(
            message(
                "interop.read",
                f"{where} has a value that jqx does not support.",
                given=given,
                expected=expected,
                mend="correct the config, or convert the checkpoint with the library that wrote "
                "it.",
            )
        )


def read_json(path: str) -> Any:
    """Returns the contents of a JSON file.

    Raises:
      OSError: if the file cannot be read.
      ValueError: if the file is too long or is not JSON.
    """
    with open_regular("interop.read", path) as file:
        size = os.fstat(file.fileno()).st_size  # `read` allocates its argument at once
        text = file.read(min(size, _MOST_BYTES) + 1)
    try:
        require_that(
            len(text) <= _MOST_BYTES,
            error=ValueError,
            function="interop.read",
            problem=f"{path!r} is too long.",
            given=f"more than {_MOST_BYTES:,} bytes",
            expected="a config, or an index of tensors",
            mend="check the file.",
        )
        return json.loads(text)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(
            message(
                "interop.read",
                f"{path!r} is not JSON that can be read.",
                given=str(error) or type(error).__name__,
                expected="a JSON object",
                mend="copy or download it again.",
            )
        ) from None


def read_config(folder: str) -> Mapping[str, Any] | None:
    """Returns `config.json` of a folder, with `quantize_config.json` (of old GPTQ files) as its
    `quantization_config`; `None` if there is neither.
    """
    paths = [os.path.join(folder, name) for name in ("config.json", "quantize_config.json")]
    found, beside = (read_json(path) if os.path.lexists(path) else None for path in paths)
    for path, data in zip(paths, (found, beside), strict=True):
        if data is not None:
            Config(data, repr(path))
    if beside is not None and "quantization_config" not in (found or {}):
        return {**(found or {}), "quantization_config": {"quant_method": "gptq", **beside}}
    return found


def quantization_of(config: Mapping[str, Any] | None) -> Config | None:
    """Returns the quantization config in the config of a model, or in its `text_config`; `None` if
    there is none.
    """
    text = (config or {}).get("text_config")
    for part in (config, text if isinstance(text, Mapping) else None):
        for key in ("quantization_config", "compression_config"):
            if part and part.get(key) is not None:
                return Config(part[key], key)
    return None


def matches(pattern: str, name: str, where: str) -> bool:
    """Returns whether a target of a config matches a module. A target is a name, or `re:` and a
    regular expression that matches from the start of the name.

    Raises:
      ValueError: if the expression is invalid, or may take a very long time.
    """
    if not pattern.startswith("re:"):
        return pattern == name
    text = pattern[3:]
    fits = len(text) <= _MOST_OF_PATTERN and not _REPEATED_GROUP.search(text)
    compiled = None
    if fits:
        try:
            compiled = re.compile(text)
        except (re.error, RecursionError, OverflowError):
            compiled = None
    if compiled is None:
        Config({"target": pattern}, where).refuse(
            "target",
            f"a regular expression of at most {_MOST_OF_PATTERN} characters without "
            "repeated groups",
        )
    return compiled.match(name[:_MOST_OF_PATTERN]) is not None
