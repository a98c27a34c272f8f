"""Names of the previous release: they work for one release, with a DeprecationWarning."""

import difflib
import functools
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

_FEW = 12
"""How many names a module has at most whose error for an unknown name lists all."""


def renamed(
    module: str, names: Mapping[str, str], stacklevel: int = 2, *, internal: bool = True
) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a module that finds old names, with a DeprecationWarning. Its
    error for an unknown name has the names that are near.

    Args:
      module: the name of the module, `jqx` or `jqx.<folder>`.
      names: the renamed names: `{"old": "jqx.place.new"}`. The names in the `_shared.py` of a
        folder also count as old: they were public, and are internal now.
      stacklevel: the level of the warning, if the result is called by another function.
      internal: whether the names in `_shared.py` count.
    """
    return functools.partial(_find, module, names, stacklevel, internal)


def _find(module: str, names: Mapping[str, str], stacklevel: int, internal: bool, name: str) -> Any:
    if name in names:
        parts = names[name].split(".")[1:]
        value = functools.reduce(getattr, parts, sys.modules["jqx"])
        fix = f"use {names[name]}"
    else:
        value = None if name.startswith("__") or not internal else _internal(module, name)
        fix = "it is internal to jqx"
    if value is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}{_near(module, name)}")
    text = f"{module}.{name} will be removed in the next release: {fix}."
    warnings.warn(text, DeprecationWarning, stacklevel=stacklevel)
    return value


def _internal(module: str, name: str) -> Any:
    if importlib.util.find_spec(f"{module}._shared") is None:
        return None
    return vars(importlib.import_module(f"{module}._shared")).get(name)


def _near(module: str, name: str) -> str:
    if name.startswith("_"):
        return ""
    if name in _OTHERS:
        return f": it is called jqx.{_OTHERS[name]}"
    elsewhere = [place for place in _PLACES if f"jqx.{place}" != module and _has(place, name)]
    elsewhere += [""] if module != "jqx" and hasattr(sys.modules["jqx"], name) else []
    if elsewhere:
        found = [".".join(part for part in ("jqx", place, name) if part) for place in elsewhere]
        return f": did you mean {' or '.join(found)}?"
    public = [known for known in dir(sys.modules[module]) if not known.startswith("_")]
    close = difflib.get_close_matches(name, public)
    if not close and len(public) > _FEW:
        return ""
    return f": did you mean {' or '.join(close)}?" if close else f": it has {', '.join(public)}"


_OTHERS = {
    **dict.fromkeys(("QArray", "QuantizedTensor", "QuantizedArray"), "QTensor"),
    **dict.fromkeys(("QuantizationRule", "QRule"), "Rule"),
    **dict.fromkeys(("QConfig", "QuantizationConfig", "QuantArgs", "QuantSpec"), "QSpec"),
    **dict.fromkeys(("quantize_model", "quantize_", "post_training_quantization"), "ptq"),
    **dict.fromkeys(("qat", "prepare_qat", "fake_quantize_model"), "simulate"),
    **dict.fromkeys(("fake_quant", "FakeQuantize"), "fake_quantize"),
    **dict.fromkeys(("rtn", "round_to_nearest"), "algorithms.nearest"),
    **dict.fromkeys(("quarot", "spinquant", "hadamard"), "algorithms.rotate"),
    **dict.fromkeys(("ste", "straight_through_estimator"), "gradients.ste"),
    "smoothquant": "algorithms.smooth_quant",
}
"""Names of other libraries."""

_PLACES = (
    "algorithms",
    "calibrators",
    "diagnostics",
    "gradients",
    "interop",
    "linen",
    "nnx",
    "numerics",
    "observers",
    "onednn",
    "parallel",
    "presets",
    "tflite",
)
"""The public folders of jqx."""


def _has(place: str, name: str) -> bool:
    """Whether a folder has a public name. Those for Flax are looked at only if it is loaded."""
    if place in ("linen", "nnx") and "flax" not in sys.modules:
        return False
    try:
        names = dir(importlib.import_module(f"jqx.{place}"))
    except ImportError:
        return False
    return name in names
