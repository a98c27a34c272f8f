"""A function with maps of channels, and the check that it is one of its weights."""

import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any

from .._errors import fail
from ..calibrators import Affine
from ..transforms import Plan, convert, map_channels
from ..transforms._shared import Chosen, Maps, with_maps
from ._basis import Basis


@dataclasses.dataclass(frozen=True)
class Mapped:
    """A function with what algorithms do at its sites, and to its parameters; see `Quantized`."""

    f: Callable[..., Any]
    plan: Plan
    maps: Maps = dataclasses.field(default_factory=dict)
    basis: Basis | None = None

    @property
    def function(self) -> Callable[..., Any]:
        """The function with its maps."""
        return map_channels(self.f, self.plan, self.maps) if self.maps else self.f

    def then(self, chosen: Chosen, *, rewrites: bool = False) -> "Mapped":
        """Returns the same after what an algorithm has chosen, or rewritten."""
        basis = None if self.basis is None else self.basis.then(chosen, rewrites=rewrites)
        maps = with_maps("ptq", self.maps, chosen.maps)
        return dataclasses.replace(self, maps=maps, basis=basis)

    def of_whole(self, whole: "Mapped") -> "Mapped":
        """Returns the same for a function of whole weights, if this is one of their parts."""
        basis = None if self.basis is None else self.basis.of_whole(whole.plan)
        return Mapped(whole.f, whole.plan, self.maps, basis)

    def converted(self, scales: Mapping[str, Affine]) -> Callable[..., Any]:
        """Returns the function on integers."""
        return convert(self.function, self.plan, scales)


_OF_MODULES: dict[str, dict[str, str]] = {
    "ptq": {
        "linen": "use jqx.linen.ptq(module, policy)(variables, batches), or pass module.apply, "
        "whose parameters are the variables.",
        "nnx": "use jqx.nnx.ptq(model, policy)(batches).",
    },
    "bind": {
        "linen": "use jqx.linen.bind(jqx.load(path), module), or pass module.apply.",
        "nnx": "use jqx.nnx.bind(jqx.load(path), model).",
    },
    "Quantized.bind": {
        "linen": "pass module.apply, or another function of the variables.",
        "nnx": "pass a function of quantized.params; jqx.nnx.bind(jqx.load(path), model) binds "
        "what was saved.",
    },
}
"""What to write for models of Flax, by function."""


def check_whole(function: str, f: Any) -> None:
    """Checks that `f` is a function of its weights, and no model that holds them."""
    flax = [name for name in ("linen", "nnx") if isinstance(f, _module_of(name))]
    if flax and getattr(f, "scope", None) is None:
        of, fix = f"a model of {flax[0]}", _OF_MODULES[function][flax[0]]
    elif callable(f):
        return
    else:
        of, fix = "", "pass the function first, and the function itself, not what it returns."
    kind = f"an object of type {type(f).__name__}"
    raise fail(
        function,
        "`f` is not a function of its weights.",
        given=f"{kind}, {of}" if of else kind,
        expected="a function of arrays and pytrees of arrays",
        fix=fix,
        error=TypeError,
    )


def _module_of(name: str) -> Any:
    """Returns the class of modules of Flax, if it is imported."""
    return getattr(sys.modules.get(f"flax.{name}"), "Module", ())
