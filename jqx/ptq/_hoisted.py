"""`hoist=` of `ptq`, and functions that are bound to weights that were split off."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from .._checks import shown
from .._errors import fail
from ..transforms import Plan, hoist
from ..transforms._shared import Hoisted, Names, hoisted_as, placed

Hoist = bool | Literal["all"]
"""Values of `hoist=`."""


class Own(NamedTuple):
    """A function and its parameters, and where these are."""

    f: Callable[..., Any]
    params: Any
    places: int | tuple[int, ...]
    names: Names


def check_hoist(given: Any) -> None:
    """Checks the value of `hoist=`."""
    if given is not True and given is not False and given != "all":
        raise fail(
            "ptq",
            "`hoist` is unknown.",
            given=f"hoist == {shown(given)}",
            expected='False, True or "all"',
            fix='pass hoist=True, or hoist="all" for values that are larger than their parameters.',
        )


def split_off(own: Own, given: Hoist, inputs: tuple[Any, ...]) -> Own:
    """Returns the function without what it computes from its parameters alone, and these values."""
    if given is False:
        return own
    what = "all" if given == "all" else "weights"
    split = hoist(own.f, what, params=own.places, names=own.names)
    g, computed = split(*placed(own.places, own.params, inputs))
    assert isinstance(g, Hoisted)
    return Own(g, computed, g.params, g.others or None)


def without_values(
    plan: Plan, f: Callable[..., Any], parents: tuple[Any, ...] | None, inputs: Any
) -> Callable[..., Any]:
    """Returns a function in the form that a plan is for: split, if the planned one was.

    Args:
      plan: the plan.
      f: a function of the parameters, or of what was split off.
      parents: the parameters before the split, as shapes.
      inputs: the other arguments, as shapes; `None` if they are not known.
    """
    if plan.hoisted is None or isinstance(f, Hoisted):
        return f
    if parents is None:
        raise fail(
            "bind",
            "the function was split by `hoist`, and the parameters before it are not known.",
            given="a function that is not split, and no `like`",
            expected="parameters with the structure that f takes, of any values; arrays may be "
            "jax.ShapeDtypeStruct",
            fix="pass them: jqx.load(path).bind(f, like=params), or bind the g of jqx.hoist(f).",
        )
    return hoisted_as(f, plan.hoisted, parents or (), inputs)
