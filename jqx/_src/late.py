"""Modules that are imported when one of their names is first used, which keeps `import jqx` fast.

Their imports are below `if TYPE_CHECKING:`, where editors and type checkers read them.
"""

import difflib
import functools
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


class Late:
    """A stand-in for a module, with the attributes of the module, which it imports on first use.

    Args:
      module: the full name of the module.
    """

    def __init__(self, module: str):
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._module), name)


def late(
    module: str, names: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns the `__getattr__` and the `__dir__` of a package.

    Args:
      module: the name of the package.
      names: for the full name of each module that is imported late, the names that the package
        takes from it; without names the module is an attribute itself.
    """
    sources = {name: source for source, taken in names.items() for name in taken}
    modules = {x.removeprefix(f"{module}."): x for x, taken in names.items() if not taken}

    def getattr_of_late(name: str) -> Any:
        if name == "__all__":  # for `import *`
            return [public for public in dir_of_all() if not public.startswith("_")]
        if name in modules:  # the import sets the attribute too
            return importlib.import_module(modules[name])
        if name in sources:
            value = getattr(importlib.import_module(sources[name]), name)
            setattr(sys.modules[module], name, value)
            return value
        return _unknown(module, name)

    def dir_of_all() -> list[str]:
        return sorted({*vars(sys.modules[module]), *modules, *sources})

    return getattr_of_late, dir_of_all


def unknown(module: str) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a module, whose error for a name has the names that are near."""
    return functools.partial(_unknown, module)


def _unknown(module: str, name: str) -> Any:
    text = f"module {module!r} has no attribute {name!r}"
    if name.startswith("_"):
        raise AttributeError(text)
    if name in _OTHER_LIBRARIES:
        raise AttributeError(f"{text}: it is called jqx.{_OTHER_LIBRARIES[name]}")
    folders = [x for x in _FOLDERS if name in dir(importlib.import_module(f"jqx.{x}"))]
    near = [f"jqx.{folder}.{name}" for folder in folders]
    public = [x for x in dir(sys.modules[module]) if not x.startswith("_")]
    near = near or difflib.get_close_matches(name, public)
    raise AttributeError(f"{text}: did you mean {' or '.join(near)}?" if near else text)


_FOLDERS = "algorithms calibrators diagnostics extend gradients numerics presets".split()

_OTHER_LIBRARIES = {
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
"""What jqx calls things that other libraries have under these names."""
