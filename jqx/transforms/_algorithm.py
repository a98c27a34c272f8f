"""Algorithms: they choose the codes of weights where rounding to nearest is not enough."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import jax

from .._checks import shown
from .._errors import fail
from ..tensor._shared import abstract
from ._map_channels import Maps
from ._plan import Plan
from ._trace import is_quantized


class Inapplicable(ValueError):
    """Raised if an algorithm finds nothing in a function to work on."""


class Algorithm(Protocol):
    """Chooses the codes of the weights of a plan, or other weights that round better.

    Any function with these arguments is an algorithm. It returns parameters, or `Chosen`:
    parameters and a report. An algorithm may have these methods and attributes:

    - `run(f, plan, params, batches, progress=...)`, with the same results. `jqx.ptq` calls it
      instead, so that the algorithm can work on the function itself, for example layer by layer.
    - `rewrite`, with the same arguments as `run`. It returns float parameters that round better,
      for the same function or nearly, and in `Chosen.maps` what is done at its sites. `jqx.ptq`
      continues with these, and calibrates on them. `jqx.compare` needs `Chosen.basis` too.
    - `correct(f, plan, params, codes, affines, batches, progress=...)`, which is called when the
      codes of weights and the scales of activations are known. It returns parameters to use instead
      of those with codes, or `Chosen.maps`.
    - `observers`, a dict as `jqx.calibrate` takes it, such as `{".*": jqx.observers.hessian}`. Then
      batches are calibrated on, even without static scales, and `stats` holds what the observers
      recorded: for a site of the plan, `stats["layer0/w:dot_general:lhs@hessian"]`. The operands of
      a site have its keys and the paths of weights. A weight that several sites share has
      statistics at each site. They are not added up, because sites may sum over different axes of
      the weight (`hessian.merge` adds them where the axes are the same).
    - `lazy`, which if true allows leaves of `params`, and weights that it returns, to be
      `jqx.interop.Lazy`. For other algorithms these are an error.

    `plan.map_weights(f, params)` visits the weights of any tree of parameters, with their names and
    specs. For linen and nnx, `params` has the form that their `ptq` documents.

    If rules select steps of a scan, `jqx.ptq` passes the function, plan and parameters of parts: in
    `params` a tuple of its parts takes the place of each weight that is split. The parts are
    weights of the plan, with paths such as `layers/w[0:1]`.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> class Centred:
      ...     observers = {".*": jqx.observers.mean}
      ...
      ...     def __call__(self, plan, params, stats):
      ...         return jnp.where(stats[":dot_general:lhs@mean"].total.T > 0, params, 0.0)
      >>> quantize = jqx.ptq(lambda w, x: x @ w, jqx.presets.w8a16(), Centred(), progress=False)
      >>> quantize(jnp.ones((2, 2)), [jnp.array([[1.0, -1.0]])]).params.dequantize()[:, 0]
      Array([1., 0.], dtype=float32)
    """

    def __call__(self, plan: Plan, params: Any, stats: Any) -> Any:
        """Returns the parameters. Each planned weight is a QTensor of the plan's format, or a float
        array that is then rounded to nearest.

        Args:
          plan: what is quantized, and how: `plan.weights` and `plan.sites`.
          params: the parameters, in float.
          stats: statistics of the calibration; `None` if there was none.
        """
        ...


def check_algorithm(function: str, algorithm: Any, *, of_functions: bool = False) -> None:
    """Checks that an algorithm can be called; with `of_functions` it may need the function."""
    is_class = isinstance(algorithm, type)
    wants = [name for name in ("rewrite", "run", "correct") if has(algorithm, name)]
    wants += ["algorithms"] if chained(algorithm) is not None else []
    fits = not is_class and (callable(algorithm) or (of_functions and bool(wants)))
    if not fits and not is_class and wants and not of_functions:
        raise fail(
            function,
            "`algorithm` needs the function, and batches.",
            given=shown(algorithm),
            expected="an algorithm that chooses codes from statistics alone, such as "
            "jqx.algorithms.gptq()",
            fix="pass it to jqx.ptq(f, policy, algorithm)(params, batches).",
            error=TypeError,
        )
    if algorithm is not None and not fits:
        raise fail(
            function,
            "`algorithm` is not an algorithm.",
            given=f"the class {algorithm.__name__}" if is_class else shown(algorithm),
            expected="a function (plan, params, stats) that returns the parameters, or None",
            fix=_instead(algorithm),
            error=TypeError,
        )


NAMES = (
    "adaround",
    "auto_round",
    "awq",
    "bias_correction",
    "eora",
    "equalize",
    "gptq",
    "loftq",
    "nearest",
    "rotate",
    "smooth_quant",
)
"""The algorithms of `jqx.algorithms`."""

_OTHERS = {
    "rtn": "nearest",
    "round": "nearest",
    "roundtonearest": "nearest",
    "minmax": "nearest",
    "quarot": "rotate",
    "spinquant": "rotate",
    "hadamard": "rotate",
    "cle": "equalize",
    "optq": "gptq",
}
"""Algorithms by the names that others give them."""


def _instead(value: Any) -> str:
    """Returns what to write in place of a value that is no algorithm."""
    name = getattr(value, "__name__", value)
    if isinstance(value, type) and not value.__module__.startswith("jqx."):
        return f"call the class: {name}()."
    if isinstance(name, str):
        plain = name.lower().replace("_", "").replace("-", "").replace(" ", "")
        own = {known.replace("_", ""): known for known in NAMES} | _OTHERS
        if plain in own:
            return f"call it: jqx.algorithms.{own[plain]}()."
    if isinstance(value, (list, tuple)):
        return "join them: jqx.algorithms.chain(first, second)."
    return (
        "leave it out for what measured best, pass jqx.algorithms.nearest() to round to nearest, "
        "or another algorithm; other options have names, such as params=1."
    )


class Parts(NamedTuple):
    """The parts of an algorithm or of `jqx.algorithms.chain`: those that rewrite parameters, the
    one that chooses codes or `None`, and those that correct afterwards.
    """

    rewrites: tuple[Any, ...]
    rounding: Any
    corrections: tuple[Any, ...]


def parts_of(algorithm: Any) -> Parts:
    """Returns the parts of an algorithm."""
    each = () if algorithm is None else chained(algorithm) or (algorithm,)
    rewrites = tuple(x for x in each if has(x, "rewrite"))
    corrections = tuple(x for x in each if has(x, "correct"))
    rest = [x for x in each if not has(x, "rewrite") and not has(x, "correct")]
    return Parts(rewrites, rest[0] if rest else None, corrections)


def has(algorithm: Any, method: str) -> bool:
    """Whether an algorithm has a method. A field of a user's algorithm may have the same name."""
    return callable(getattr(algorithm, method, None))


def chained(algorithm: Any) -> tuple[Any, ...] | None:
    """Returns the algorithms of a chain, and `None` for a single algorithm."""
    parts = getattr(algorithm, "algorithms", None)
    is_single = callable(algorithm) or any(has(algorithm, x) for x in ("rewrite", "run", "correct"))
    return parts if isinstance(parts, tuple) and not is_single else None


def observers_of(algorithm: Algorithm | None) -> Any:
    """Returns the observers that an algorithm needs, if any."""
    return getattr(algorithm, "observers", None)


class Chosen(NamedTuple):
    """The result of an algorithm with a report.

    Attributes:
      params: the parameters, as `Algorithm` returns them.
      report: any object; it becomes `jqx.Quantized.details`.
      maps: maps of channels at sites, as `jqx.map_channels` takes them.
      basis: a function that returns, for the float parameters that were given, those with which
        the function with these maps is the float function. It should hold no copy of parameters.
        `jqx.compare` and corrections of codes compare with its result. `None`: `rewrite` does not
        say; for others it is the function of the given parameters, without these maps.
      few: matrices that were left as rounding to nearest leaves them, because few inputs reached
        them, each with the reason.
    """

    params: Any
    report: Any
    maps: Maps = MappingProxyType({})
    basis: Callable[[Any], Any] | None = None
    few: Mapping[str, str] = MappingProxyType({})


def as_chosen(result: Any) -> Chosen:
    """Returns the result of an algorithm as a `Chosen`."""
    return result if isinstance(result, Chosen) else Chosen(result, None)


def picked(function: str, chosen: Any, rounded: Any) -> Any:
    """Returns parameters with the codes that an algorithm chose, and rounded ones elsewhere. Checks
    that the chosen codes fit the plan, as those rounded to nearest do.
    """

    def pick(own: Any, nearest: Any) -> Any:
        kinds = abstract(own), abstract(nearest)
        if not is_quantized(kinds[0]):
            return nearest
        if not (
            jax.tree.structure(kinds[0]) == jax.tree.structure(kinds[1])
            and kinds[0].scale.shape == kinds[1].scale.shape
        ):
            raise fail(
                function,
                "the algorithm chose codes that do not fit the plan.",
                given=repr(own),
                expected=repr(nearest),
                fix="return QTensors of the formats and granularities of plan.weights.",
            )
        return own

    return jax.tree.map(pick, chosen, rounded, is_leaf=is_quantized)
