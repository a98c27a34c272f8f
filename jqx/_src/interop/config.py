"""Reads the quantization config of a checkpoint field by field."""

import functools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from ..checks import shown
from ..errors import fail
from ..files import open_regular

_MOST_BYTES = 64_000_000
"""Maximum size of a JSON file: indices of models with many experts need several MB."""

_MOST_OF_PATTERN, _MOST_OF_NAME = 20_000, 500
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
            self._refuse(f"a {type(data).__name__}", "a JSON object")
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

    def common(self, keys: Sequence[str], default: str) -> str:
        """Returns the lower-case value of fields that mean the same, after checking that they are
        equal; the default if there are none.
        """
        fields = [key for key in keys if self.data.get(key) is not None]
        value = str(self.data[fields[0]]).lower() if fields else default
        for key in fields:
            if str(self.data[key]).lower() != value:
                self.refuse(key, f"{value!r}, as {fields[0]}")
        return value

    def part(self, key: str) -> "Config":
        """Returns an inner object."""
        return Config(self.data.get(key), f"{self.where}.{key}")

    def two_sizes(self, key: str, value: Any, expected: str) -> tuple[int, int]:
        """Returns a list of two positive integers, the value of a field."""
        if isinstance(value, list) and len(value) == 2:
            rows, columns = value
            if type(rows) is type(columns) is int and min(rows, columns) > 0:
                return rows, columns
        self.refuse(key, expected)

    def refuse(self, key: str, expected: str) -> NoReturn:
        """Raises an error: the value of a field is not allowed."""
        self._refuse(f"{key} == {shown(self.data.get(key))}", expected)

    def _refuse(self, detail: str, expected: str) -> NoReturn:
        problem = f"{self.where} has a value that jqx does not support."
        fix = "correct the config, or convert the checkpoint with the library that wrote it."
        raise fail("interop.read", problem, given=detail, expected=expected, fix=fix)


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
        if not len(text) <= _MOST_BYTES:
            problem = f"{path!r} has over {_MOST_BYTES:,} bytes, too many for a config or an index."
            raise fail("interop.read", problem, fix="check the file.")
        return json.loads(text)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        problem = f"{path!r} is not JSON that can be read: {error or type(error).__name__}."
        raise fail("interop.read", problem, fix="copy or download it again.") from None


def read_config(folder: str) -> Mapping[str, Any] | None:
    """Returns `config.json` of a folder, with the quantization config of old GPTQ and AWQ folders,
    which is a file of its own; `None` if there is none of them.
    """
    paths = [os.path.join(folder, name) for name in ("config.json", *_OLD_NAMES)]
    configs = {path: read_json(path) for path in paths if os.path.lexists(path)}
    for path, data in configs.items():
        Config(data, repr(path))
    config = configs.pop(paths[0], None)
    if not configs or quantization_of(config) is not None:
        return config
    path, data = next(iter(configs.items()))
    method = "gptq" if path == paths[1] else "awq"
    return {**(config or {}), "quantization_config": {"quant_method": method, **data}}


_OLD_NAMES = ("quantize_config.json", "quant_config.json")
"""Names of files with the quantization config: of AutoGPTQ and GPTQModel, and of AWQ."""

KEYS = ("quantization_config", "compression_config")
"""Keys of the quantization config in the config of a model."""

_OF_GPTQ = {"desc_act", "sym", "damp_percent", "true_sequential", "static_groups"}
"""Keys that only the configs of GPTQ have."""


def wrapped(config: Mapping[str, Any], names: Iterable[str]) -> Mapping[str, Any]:
    """Returns the config of a model. A quantization config by itself becomes a part of one.

    Args:
      config: the config that the user has passed.
      names: names of the tensors of the checkpoint.
    """
    bits = {"bits", "group_size"} <= {*config}
    if quantization_of(config) is not None or isinstance(config.get("quantization"), Mapping):
        return config
    if _method(config) is not None:
        return {KEYS[0]: config}
    if "w_bit" in config or (bits and _OF_GPTQ & {*config}):
        return {KEYS[0]: {"quant_method": "awq" if "w_bit" in config else "gptq", **config}}
    if bits and not any(name.endswith(".qweight") for name in names):
        return {"quantization": config}
    return config


def method_of(config: Mapping[str, Any] | None) -> Any:
    """Returns the quantization method in the config of a model; `None` if there is none."""
    quantization = quantization_of(config)
    return None if quantization is None else _method(quantization.data)


def _method(data: Mapping[str, Any]) -> Any:
    """Returns the method in a quantization config."""
    if data.get("load_in_4bit") is True or data.get("load_in_8bit") is True:
        return "bitsandbytes"
    method = data.get("quant_method", data.get("method"))  # `method` is GPTQModel's own name
    return "compressed-tensors" if method is None and "config_groups" in data else method


def quantization_of(config: Mapping[str, Any] | None) -> Config | None:
    """Returns the quantization config in the config of a model, or of a part such as `text_config`;
    `None` if there is none.

    Raises:
      ValueError: if parts have different ones.
    """
    (where, fields), *others = [*_found(config or {}, ""), ("", None)]
    for part, data in others[:-1]:
        if "." in where and data != fields:
            Config({KEYS[0]: data}, part).refuse(KEYS[0], f"the same in all parts, as in {where}")
    return None if fields is None else Config(fields, where)


def _found(config: Mapping[str, Any], where: str) -> Iterator[tuple[str, Any]]:
    """Yields the quantization configs in a config and its parts, that of the whole first."""
    yield from ((where + key, config[key]) for key in KEYS if config.get(key) is not None)
    for key in _parts(config) if where.count(".") < _MOST_PARTS else ():
        yield from _found(config[key], f"{where}{key}.")


_MOST_PARTS = 4
"""How deep parts of models are in parts."""


def _parts(config: Mapping[str, Any]) -> list[str]:
    """Returns the keys of the configs of parts of a model."""
    nested = (key for key, item in config.items() if isinstance(item, Mapping) and key not in KEYS)
    return [key for key in nested if key.endswith("_config")]


def without_quantization(config: Mapping[str, Any], depth: int = 0) -> dict[str, Any]:
    """Returns the config of a model without quantization configs, those of parts included."""
    left = {key: item for key, item in config.items() if key not in (*KEYS, "quantization")}
    parts = _parts(config) if depth < _MOST_PARTS else ()
    return left | {key: without_quantization(config[key], depth + 1) for key in parts}


def matches(pattern: str, name: str, where: str) -> bool:
    """Returns whether a target of a config matches a module. A target is a name, or `re:` and a
    regular expression that matches from the start of the name.

    Raises:
      ValueError: if the expression is invalid, or may take a very long time.
    """
    if not pattern.startswith("re:"):
        return pattern == name
    compiled = _compiled(pattern[3:])
    if compiled is None:
        Config({"target": pattern}, where).refuse(
            "target",
            f"a regular expression of at most {_MOST_OF_PATTERN} characters without "
            "repeated groups",
        )
    if len(name) > _MOST_OF_NAME:
        Config({"target": name}, where).refuse(
            "target", f"names of at most {_MOST_OF_NAME} characters"
        )
    return compiled.match(name) is not None


@functools.cache
def _compiled(text: str) -> re.Pattern[str] | None:
    """Returns an expression; `None` if it is invalid, or may take a very long time."""
    fits = len(text) <= _MOST_OF_PATTERN and not _REPEATED_GROUP.search(text)
    try:
        return re.compile(text) if fits else None
    except (re.error, RecursionError, OverflowError):
        return None
