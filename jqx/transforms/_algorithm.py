"""Algorithms: what chooses the codes of weights, where rounding to nearest is not enough."""

from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import jax

from .._checks import require_that, shown
from ..tensor._shared import abstract
from ._map_channels import Maps
from ._plan import Plan
from ._trace import is_quantized


class Inapplicable(ValueError):
    """An algorithm finds nothing in a function that it could do."""


class Algorithm(Protocol):
    """Chooses the codes of the weights of a plan, or other weights that round better.

    Any function of these arguments is one. It returns parameters, or `Chosen`: parameters and a
    report. Where it has a method `run(f, plan, params, batches, progress=...)` of the same results,
    `jqx.ptq` calls that instead: an algorithm may look at the function as it pleases, such as layer
    after layer. Where it has a method `rewrite` of the same arguments, it returns float parameters
    that round better, of the same function or nearly, and with `Chosen.maps` what is done at its
    sites: `jqx.ptq` goes on with these, and calibrates on them. Where it has a method
    `correct(f, plan, params, codes, affines, batches, progress=...)`, that is called when the codes
    of weights and the scales of activations are known: it returns other parameters in the place of
    those with codes, or `Chosen.maps`.

    Where it has an attribute `observers`, a dict as `jqx.calibrate` takes it, such as
    `{".*": jqx.observers.hessian}`, batches are calibrated on, static scales or not, and `stats`
    holds what the observers have recorded: of a site of the plan,
    `stats["layer0/w:dot_general:lhs@hessian"]`. Its operands name their keys and the paths of
    weights. A weight that several sites share has statistics at each: they are not added up, since
    a site may sum over other axes of it than another (`hessian.merge` does, where they are alike).

    Where it has an attribute `lazy` that is true, leaves of `params` may be `jqx.interop.Lazy`, and
    weights that it returns too; to others these are an error.

    `plan.map_weights(f, params)` goes through the weights of any tree of parameters, with their
    names and specs. For linen and nnx, `params` is what `ptq` of theirs says.

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
        """Returns the parameters, each planned weight as a QTensor of the plan's format, or as
        floats, which are rounded to nearest then.

        Args:
          plan: what is quantized, and how: `plan.weights` and `plan.sites`.
          params: the parameters, in float.
          stats: of the calibration; `None` where there was none.
        """
        ...


def check_algorithm(function: str, algorithm: Any, *, of_functions: bool = False) -> None:
    """Checks that an algorithm can be called; `of_functions` says that it may want the function."""
    is_class = isinstance(algorithm, type)
    wants = [
        name for name in ("rewrite", "run", "correct", "algorithms") if hasattr(algorithm, name)
    ]
    fits = not is_class and (callable(algorithm) or (of_functions and bool(wants)))
    require_that(
        fits or is_class or not wants or of_functions,
        error=TypeError,
        function=function,
        problem="`algorithm` needs the function, and batches.",
        given=f"{algorithm!r}",
        expected="an algorithm that chooses codes by statistics alone, such as "
        "jqx.algorithms.gptq()",
        mend="pass it to jqx.ptq(f, policy, algorithm)(params, batches).",
    )
    require_that(
        algorithm is None or fits,
        error=TypeError,
        function=function,
        problem="`algorithm` is no algorithm.",
        given=f"the class {algorithm.__name__}" if is_class else shown(algorithm),
        expected="a function (plan, params, stats) that returns the parameters, or None",
        mend=f"call the class: {algorithm.__name__}()."
        if is_class
        else "leave it out to round to nearest; other options go by name, such as params=1.",
    )


class Parts(NamedTuple):
    """The algorithms of `jqx.algorithms.chain`, or one: what rewrites parameters, what chooses
    codes, or `None`, and what corrects after that.
    """

    rewrites: tuple[Any, ...]
    rounding: Any
    corrections: tuple[Any, ...]


def parts_of(algorithm: Any) -> Parts:
    """Returns the parts of an algorithm."""
    each = () if algorithm is None else getattr(algorithm, "algorithms", (algorithm,))
    rewrites = tuple(x for x in each if hasattr(x, "rewrite"))
    corrections = tuple(x for x in each if hasattr(x, "correct"))
    rest = [x for x in each if not hasattr(x, "rewrite") and not hasattr(x, "correct")]
    return Parts(rewrites, rest[0] if rest else None, corrections)


def observers_of(algorithm: Algorithm | None) -> Any:
    """Returns the observers that an algorithm asks for, if it does."""
    return getattr(algorithm, "observers", None)


class Chosen(NamedTuple):
    """What an algorithm returns that has something to report.

    Attributes:
      params: the parameters, as of `Algorithm`.
      report: of any kind; `jqx.Quantized.details` has it.
      maps: what is done with channels at sites, as `jqx.map_channels` takes it.
      real: with which float parameters the function of these maps is the float function, where that
        is not with those that were given: what corrects codes compares with it. `None`: with those.
    """

    params: Any
    report: Any
    maps: Maps = MappingProxyType({})
    real: Any = None


def as_chosen(result: Any) -> Chosen:
    """Returns what an algorithm has returned, with a report or without."""
    return result if isinstance(result, Chosen) else Chosen(result, None)


def picked(function: str, chosen: Any, rounded: Any) -> Any:
    """Returns parameters with the codes that an algorithm chose, where it did, after checking that
    they are of the plan, as those are that were rounded to nearest.
    """

    def pick(own: Any, nearest: Any) -> Any:
        kinds = abstract(own), abstract(nearest)
        if not is_quantized(kinds[0]):
            return nearest
        require_that(
            jax.tree.structure(kinds[0]) == jax.tree.structure(kinds[1])
            and kinds[0].scale.shape == kinds[1].scale.shape,
            error=ValueError,
            function=function,
            problem="the algorithm chose codes that are not of the plan.",
            given=repr(own),
            expected=repr(nearest),
            mend="return QTensors of the formats and granularities of plan.weights.",
        )
        return own

    return jax.tree.map(pick, chosen, rounded, is_leaf=is_quantized)
