"""What `quantize_params` and `ptq` know of algorithms, which choose the codes of weights where
rounding to nearest is not enough, and `unstack`, which gives them functions without split weights.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from ..checks import shown
from ..errors import fail
from ..tensor.qtensor import QTensor
from ..tensor.segments import Lazy, abstract
from .channel_map import Maps
from .paths import (
    Split,
    as_arguments,
    by_argument,
    insert_params,
    is_parameter_line,
    is_whole,
    line_of,
    parameter_of,
    part_paths,
    positions_of,
    split_leaf,
    stack_leaf,
)
from .plan import Plan
from .trace import TracedOnce, is_quantized, trace_call
from .walk import evaluate


class Inapplicable(ValueError):
    """Raised if an algorithm finds nothing in a function to work on."""


class Algorithm(Protocol):
    """Chooses the codes of the weights of a plan, or other weights that round better.

    Any function with these arguments is an algorithm. It returns parameters, or `AlgorithmResult`:
    parameters and a report. An algorithm may have these methods and attributes:

    - `run(f, plan, params, batches, progress=...)`, with the same results. `jqx.ptq` calls it
      instead, so that the algorithm can work on the function itself, for example layer by layer.
    - `rewrite`, with the same arguments as `run`. It returns float parameters that round better,
      for the same function or nearly, and in `AlgorithmResult.maps` what is done at its sites.
      `jqx.ptq` continues with these, and calibrates on them. `jqx.compare` needs
      `AlgorithmResult.basis` too.
    - `correct(f, plan, params, codes, affines, batches, progress=...)`, which is called when the
      codes of weights and the scales of activations are known. It returns parameters to use instead
      of those with codes, or `AlgorithmResult.maps`.
    - `observers`, a dict as `jqx.calibrate` takes it, such as `{".*": jqx.extend.hessian}`. Then
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
      ...     observers = {".*": jqx.extend.mean}
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
    needs_function = not is_class and (
        chained(algorithm) is not None or any(has(algorithm, name) for name in _METHODS)
    )
    is_plain = callable(algorithm) and not is_class
    if algorithm is None or is_plain or (needs_function and of_functions):
        return
    details = f"the class {algorithm.__name__}" if is_class else shown(algorithm)
    problem, fix = "`algorithm` is not an algorithm.", _instead(algorithm)
    if needs_function:
        problem = "`algorithm` needs the function, and batches."
        fix = "pass it to jqx.ptq(f, policy, algorithm)(params, batches)."
    raise fail(function, problem, given=details, fix=fix, error=TypeError)


_METHODS = ("rewrite", "run", "correct")
"""Methods of an algorithm that works on the function."""


NAMES = tuple(
    "adaround auto_round awq bias_correction eora equalize gptq loftq nearest rotate "
    "smooth_quant".split()
)
"""The algorithms of `jqx.algorithms`."""

_OTHERS = {
    **dict.fromkeys(("rtn", "round", "roundtonearest", "minmax"), "nearest"),
    **dict.fromkeys(("quarot", "spinquant", "hadamard"), "rotate"),
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
        names_by_key = {each_name.replace("_", ""): each_name for each_name in NAMES} | _OTHERS
        if plain in names_by_key:
            return f"call it: jqx.algorithms.{names_by_key[plain]}()."
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
    algorithms = () if algorithm is None else chained(algorithm) or (algorithm,)
    rewrites = tuple(x for x in algorithms if has(x, "rewrite"))
    corrections = tuple(x for x in algorithms if has(x, "correct"))
    choosers = [x for x in algorithms if not has(x, "rewrite") and not has(x, "correct")]
    return Parts(rewrites, choosers[0] if choosers else None, corrections)


def has(algorithm: Any, method: str) -> bool:
    """Whether an algorithm has a method. A field of a user's algorithm may have the same name."""
    return callable(getattr(algorithm, method, None))


def chained(algorithm: Any) -> tuple[Any, ...] | None:
    """Returns the algorithms of a chain, and `None` for a single algorithm."""
    parts = getattr(algorithm, "algorithms", None)
    is_single = callable(algorithm) or any(has(algorithm, x) for x in _METHODS)
    return parts if isinstance(parts, tuple) and not is_single else None


class AlgorithmResult(NamedTuple):
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


def as_result(result: Any) -> AlgorithmResult:
    """Returns the result of an algorithm as a `AlgorithmResult`."""
    return result if isinstance(result, AlgorithmResult) else AlgorithmResult(result, None)


def merge_codes(function: str, codes: Any, rounded: Any) -> Any:
    """Returns parameters with the codes that an algorithm chose, and rounded ones elsewhere. Checks
    that the chosen codes fit the plan, as those rounded to nearest do.
    """

    def merged(leaf: Any, nearest: Any) -> Any:
        kinds = abstract(leaf), abstract(nearest)
        if not is_quantized(kinds[0]):
            return nearest
        structures = map(jax.tree.structure, kinds)
        if len({*structures}) > 1 or kinds[0].scale.shape != kinds[1].scale.shape:
            problem = "the algorithm chose codes that do not fit the plan."
            fix = f"return QTensors of plan.weights, here {nearest!r}."
            raise fail(function, problem, given=repr(leaf), fix=fix)
        return leaf

    return jax.tree.map(merged, codes, rounded, is_leaf=is_quantized)


# `unstack`: a function in which the parts of split weights are parameters of their own.


@dataclasses.dataclass(frozen=True, eq=False)
class Unstacked:
    """A function whose plan splits weights, as a function of their parts.

    In `params` a tuple of its parts takes the place of each weight that is split. Each part is an
    ordinary parameter, whose path in `plan` is such as `layers/w[0:1]`. So algorithms need to know
    nothing of parts.

    Attributes:
      stacked: the plan of the function of whole weights.
      original: its parameters.
      f: the function, if that of parts is needed.
    """

    stacked: Plan
    original: Any
    f: TracedOnce | None = None

    @functools.cached_property
    def plan(self) -> Plan:
        """The plan of `function`: the same sites, and no splits."""
        path_of_name = {name: path for path, name in self.stacked.names}
        names = dict(self.stacked.names)
        for split in self.stacked.splits:
            path = path_of_name.get(split.path, split.path)
            names.pop(path, None)
            for i, part in enumerate(split.parts):
                names[f"{path}/{i}" if path else str(i)] = part.path
        lines = itertools.chain(*map(self._lines_of_parts, self.stacked.signature))
        return dataclasses.replace(
            self.stacked, names=tuple(names.items()), signature=tuple(lines), splits=()
        )

    def _lines_of_parts(self, line: str) -> list[str]:
        """Returns the lines of the parts of a parameter; any other line is unchanged."""
        if not is_parameter_line(line):
            return [line]
        path, dtype, shape = parameter_of(line)
        split = self.stacked.split_of(path)
        parts = split_leaf("ptq", jax.ShapeDtypeStruct(shape, bool), split)  # only shapes matter
        named = zip(part_paths(path, split), parts, strict=True)
        return [line_of(part_path or "", dtype, part.shape) for part_path, part in named]

    @functools.cached_property
    def params(self) -> Any:
        """The parameters of `function`."""
        parts = [
            leaf if split is None else tuple(split_leaf("ptq", leaf, split))
            for leaf, split in self._stacks
        ]
        return self._with_leaves(parts) if self.stacked.splits else self.original

    def function(self, *args: Any, **kwargs: Any) -> Any:
        """The function of parts."""
        argnums = self.stacked.params
        params = args[argnums] if isinstance(argnums, int) else tuple(args[i] for i in argnums)
        others = [x for i, x in enumerate(args) if i not in positions_of(argnums)]
        args = tuple(insert_params(argnums, self.together(params, joins=False), others))
        assert self.f is not None
        call = trace_call("ptq", self.f, self.stacked.parameters, args, kwargs)
        return jax.tree.unflatten(call.out_tree, evaluate(call.jaxpr, call.consts, call.leaves))

    def together(self, params: Any, *, joins: bool = True) -> Any:
        """Returns parameters with whole weights: `Segments` where a part is quantized, and where
        none is an array, or with `joins=False` `Segments` too.
        """
        if not self.stacked.splits:
            return params
        new, old = (
            self._tree.flatten_up_to(by_argument(self.stacked.params, x))
            for x in (params, self.params)
        )
        leaves = []
        for (stack, split), parts, old_parts in zip(self._stacks, new, old, strict=True):
            if split is None:
                leaves.append(parts)
            elif all(a is b for a, b in zip(parts, old_parts, strict=True)):
                leaves.append(stack)
            elif joins and not any(isinstance(x, (QTensor, Lazy)) for x in parts):
                leaves.append(jnp.concatenate(parts, split.axis))
            else:
                leaves.append(stack_leaf(parts, split))
        return self._with_leaves(leaves)

    @functools.cached_property
    def _tree(self) -> Any:
        return jax.tree.structure(by_argument(self.stacked.params, self.original), is_leaf=is_whole)

    @functools.cached_property
    def _stacks(self) -> list[tuple[Any, Split | None]]:
        """The leaves of the original parameters, each with its split."""
        tree = by_argument(self.stacked.params, self.original)
        named = self.stacked.parameters.named("ptq", tree)
        return [(leaf, self.stacked.split_of(name)) for name, leaf in named]

    def _with_leaves(self, leaves: list[Any]) -> Any:
        """Returns parameters with other leaves, as an algorithm gets them."""
        return as_arguments(self.stacked.params, jax.tree.unflatten(self._tree, leaves))
