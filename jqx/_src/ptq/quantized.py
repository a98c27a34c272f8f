"""`Quantized`, which `ptq` returns, and `SavedModel`, which `jqx.load` returns for it: files do not
store functions.
"""

import dataclasses
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    Literal,
    NamedTuple,
    ParamSpec,
    Protocol,
    TypeVar,
    cast,
)

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_flatten_with_path

from ..checks import called, shown
from ..errors import fail, some
from ..late import Late
from ..signatures import P, R
from ..statistics.calibrators import Affine
from ..tensor.segments import abstract as abstract_leaf
from ..tensor.targets import TARGETS
from ..transforms.algorithm import AlgorithmResult, Unstacked
from ..transforms.arguments import check_operations, fitted_plan
from ..transforms.calibrate import arguments_of
from ..transforms.channel_map import ChannelMap, LowRank, Map, Maps
from ..transforms.convert import convert
from ..transforms.find import contractions
from ..transforms.hoist import Hoisted
from ..transforms.hoist import hoist as hoist_values
from ..transforms.map_channels import as_maps, map_channels, with_maps
from ..transforms.paths import Names, by_argument, insert_params, positions_of, type_text
from ..transforms.plan import Plan
from ..transforms.quantize_params import dequantize_params, lay_out_weights, named_leaves
from ..transforms.trace import is_array, is_quantized, trace_call

if TYPE_CHECKING:
    from ... import algorithms
    from ..algorithms import engine, grids, own_text, scaling
    from ..algorithms import interface as algorithm_report
    from ..diagnostics import report as model_report
else:  # imported when `ptq` runs, so that `import jqx` stays fast
    algorithms, scaling = Late("jqx.algorithms"), Late("jqx._src.algorithms.scaling")
    engine, grids = Late("jqx._src.algorithms.engine"), Late("jqx._src.algorithms.grids")
    own_text = Late("jqx._src.algorithms.own_text")
    algorithm_report = Late("jqx._src.algorithms.interface")
    model_report = Late("jqx._src.diagnostics.report")

_LIKE = (
    "pass parameters with the structure that f takes, of any values; arrays may be "
    "jax.ShapeDtypeStruct: jqx.load(path).bind(f, like=params)"
)

Q = ParamSpec("Q")
"""The arguments of another function, after the weights."""

S = TypeVar("S")
"""Its result."""

Hoist = bool | Literal["all"]
"""Values of `hoist=`."""

Target = str | Literal[False] | None
"""Values of `target=`: `None` is the default backend of JAX; `False` does not change layouts."""

_FIX_FOR_MODULES: dict[str, dict[str, str]] = {
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


@dataclasses.dataclass(frozen=True, eq=False)
class Quantized(Generic[P, R]):
    """A quantized function with its weights, plan, scales and report.

    `quantized(*batch)` is `quantized.function(quantized.params, *batch)`, for a first look. To run
    it often, compile the function: `jax.jit(quantized.function)(quantized.params, *batch)`. Do not
    compile `quantized` itself: `jax.jit(quantized)` stores a copy of the weights as constants.

    Attributes:
      function: the quantized function. It takes the weights at the same position as the float
        function.
      params: weights as QTensors, laid out for the target. Other parameters are unchanged.
      plan: which contractions are quantized, and how.
      affines: scales of activations, by key; empty if none is static.
      report: error and size of each weight. Prints as a table.
      inputs: the first batch, a tuple with `jax.ShapeDtypeStruct` in place of arrays. Files store
        it, so that a function is checked when it is bound. With `None` the function is checked at
        its first call.
      details: what the algorithm reports, for instance for each matrix. Files do not store it.
      maps: the channel maps that an algorithm adds at sites. If there are any, the function is
        that of `jqx.map_channels(f, plan, maps)`.
      basis: a function that returns, for the float parameters, those that the codes stand for, and
        maps: after `values, maps = basis(params)`, `jqx.map_channels(f, plan, maps)` of the values
        is the float function. The values are other ones if an algorithm scales or rotates weights.
        The maps are `maps`, without effect where these correct codes. It holds no copy of
        parameters. `None` if it is not known: files have it only if no algorithm has changed what
        codes stand for, and an algorithm of yours may not return it in
        `jqx.extend.AlgorithmResult`.
      source: the float function with its maps, of parameters like `params`; `to_onnx` reads it.
      parents: after `hoist=`, the parameters of the function that was split, one tree for each
        position, with `jax.ShapeDtypeStruct` in place of arrays; otherwise `None`.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> f = lambda w, x: x @ w
      >>> x, quantize = jnp.ones((1, 4)), jqx.ptq(f, jqx.presets.w8a16(), progress=False)
      >>> quantized = quantize(jnp.eye(4), [x])
      >>> quantized
      Quantized(1 of 1 contractions, 64 bytes of parameters become 32)
      >>> quantized(x)
      Array([[1., 1., 1., 1.]], dtype=float32)
    """

    function: Callable[Concatenate[Any, P], R]
    params: Any
    plan: Plan
    affines: Mapping[str, Affine]
    report: "model_report.Report"
    inputs: tuple[Any, ...] | None = None
    details: Any = None
    maps: Maps = dataclasses.field(default_factory=dict)
    parents: tuple[Any, ...] | None = None
    basis: Callable[[Any], tuple[Any, Maps]] | None = None
    source: Callable[..., Any] | None = dataclasses.field(default=None, repr=False)

    def __call__(self, *batch: P.args, **kwargs: P.kwargs) -> R:
        """Returns the result of the function on its weights and the other arguments."""
        function: Callable[..., R] = self.function
        try:
            return function(*arguments_of(self.plan, self.params, batch), **kwargs)
        except (TypeError, ValueError):
            self._check_without_params(batch)
            raise

    def _check_without_params(self, batch: Sequence[Any]) -> None:
        """Raises if the arguments include the parameters, which a call has already."""
        tree = jax.tree.structure(self.params)
        is_params = [x is self.params or jax.tree.structure(x) == tree for x in batch]
        if any(is_params) and tree.num_leaves > 1:
            problem = "the arguments include the parameters, which the call has already."
            fix = "write quantized(x), or quantized.function(quantized.params, x)."
            raise fail("Quantized", problem, fix=fix, error=TypeError)

    @called("Quantized.bind", "pass a function of the same weights: quantized.bind(step).")
    def bind(self, f: Callable[Concatenate[Any, Q], S]) -> "Quantized[Q, S]":
        """Returns the same weights, plan, scales and maps for another function of them.

        It is for models that are written as several functions, such as one that scores whole texts,
        on which weights were quantized, and one that decodes a token from a cache. What an
        algorithm keeps at sites (`maps`) is applied to the other function too.

        Args:
          f: a function that takes the weights where the first one takes them, and has the same
            contractions of them, in the same order, of operands with as many axes; its other
            arguments and the sizes of batches may differ, as may `jax.jit` and `jax.checkpoint`
            around it or its parts. After `hoist=`, a function of the
            parameters is split in the same way.

        Raises:
          TypeError: `f` is no function.
          ValueError: at the first call: `f` has other contractions than the plan.

        Example:
          >>> import jqx, jax.numpy as jnp
          >>> score, step = lambda w, x: x @ w, lambda w, token, scale: scale * (token @ w)
          >>> quantize = jqx.ptq(score, jqx.presets.w8a16(), progress=False)
          >>> quantized = quantize(jnp.eye(4), [jnp.ones((2, 4))])
          >>> quantized.bind(step)(jnp.ones((1, 4)), 2.0)
          Array([[2., 2., 2., 2.]], dtype=float32)
        """
        check_function("Quantized.bind", f)
        f = hoisted_like(self.plan, f, self.parents, None)
        function: Any = Mapped(f, self.plan, self.maps).converted(self.affines)
        source = Mapped(f, self.plan, self.maps).function
        bound: Any = dataclasses.replace(self, function=function, inputs=None, source=source)
        return bound

    def __repr__(self) -> str:
        return f"Quantized({summary(self.plan, self.report)})"

    def _repr_html_(self) -> str:
        return self.report.table().to_html(repr(self))


class Quantize(Protocol[P, R]):
    """What `ptq` returns before it gets parameters and batches."""

    def __call__(self, params: Any, /, batches: Iterable[Any] | None = None) -> Quantized[P, R]: ...


@dataclasses.dataclass(frozen=True, eq=False)
class SavedModel:
    """A quantized function loaded from a file, without the function itself, which `bind` takes.

    Attributes:
      params: weights as QTensors, in the default layout, and the other parameters. If `structured`
        is false, a dict of the leaves by their paths.
      plan: as in `jqx.Quantized`; so are all attributes below but `structured`.
      affines: scales of activations, by key.
      report: error and size of each weight.
      inputs: shapes and dtypes of the first batch; `None` if files cannot store its containers or
        their contents.
      structured: whether `params` has the containers that the function takes. Files store dicts,
        lists and tuples of arrays. Of other pytrees they store only the leaves that are arrays.
      maps: channel maps at sites.
      parents: as in `jqx.Quantized`; `None` also if files cannot store their containers.
      basis: as in `jqx.Quantized`; `None` if an algorithm has changed what codes stand for.

    Example:
      >>> import jqx, jax.numpy as jnp, tempfile
      >>> f, path = lambda w, x: x @ w, tempfile.mkdtemp() + "/model.safetensors"
      >>> x = jnp.ones((1, 4))
      >>> jqx.save(path, jqx.ptq(f, jqx.presets.w8a16(), progress=False)(jnp.eye(4), [x]))
      >>> quantized = jqx.load(path).bind(f)
      >>> quantized(x)
      Array([[1., 1., 1., 1.]], dtype=float32)
    """

    params: Any
    plan: Plan
    affines: Mapping[str, Affine]
    report: "model_report.Report"
    inputs: tuple[Any, ...] | None
    structured: bool = True
    maps: Maps = dataclasses.field(default_factory=dict)
    parents: tuple[Any, ...] | None = None
    basis: "Basis | None" = None

    @called("bind", "pass the function that was quantized: jqx.load(path).bind(f).")
    def bind(
        self,
        f: Callable[..., R],
        like: Any = None,
        *,
        target: Target = None,
        check: Literal["function"] | None = None,
    ) -> Quantized[..., R]:
        """Returns the quantized function of `f`: the same as the saved one, bit for bit.

        Args:
          f: the function that was quantized, or another one with the same parameters and
            contractions. Both are checked; `jax.jit` and `jax.checkpoint` around `f` or its parts
            make no difference. If the file was written with this version of jax, the
            names of its other operations are compared too, without their numbers and shapes; a
            difference is a warning.
          like: parameters with the structure that `f` takes: float, quantized or
            `jax.ShapeDtypeStruct`, such as `jax.eval_shape(init, key)`. Leaves that are not arrays
            are taken from it. Required if `structured` is false. If `hoist=` split the function,
            these are the parameters before that (a tuple if there are several positions), and they
            are required only if `parents` is `None`.
          target: the platform whose weight layout is used, as in `jqx.ptq`.
          check: `"function"` makes that difference an error, and also a file with which the names
            cannot be compared: of an older jqx, of another jax, or without `inputs`.

        Raises:
          TypeError: `f` is not a function.
          ValueError: `f` or `like` does not match what was quantized, `like` is required, `target`
            or `check` is unknown, or `check` finds other operations.
        """
        check_function("bind", f)
        platform = target_of("bind", target)
        parents, plan = self.parents, self.plan
        if plan.hoisted is not None and not isinstance(f, Hoisted):
            if like is not None:
                parents = (like,) if isinstance(plan.hoisted.params, int) else tuple(like)
            f, like = hoisted_like(plan, f, parents, self.inputs), None
        if check not in (None, "function"):
            problem = f"`check` is unknown: {shown(check)}."
            raise fail("bind", problem, fix='pass check="function", or leave it out.')
        params = self.params if like is None and self.structured else self._filled(like)
        if self.inputs is not None:
            fix = (
                "bind the function that was quantized. Another function of the same weights and "
                "contractions comes after it: jqx.load(path).bind(f).bind(step)."
            )
            args = insert_params(plan.params, params, self.inputs)
            call = trace_call("bind", f, plan.parameters, args, {}, lazy=True)
            plan = fitted_plan("bind", plan, call, contractions(call), fix)
            check_operations("bind", plan.operations, call.jaxpr, strict=check is not None)
        elif check is not None:
            check_operations("bind", "", None, strict=True)
        mapped = Mapped(f, plan, self.maps, self.basis)
        bound = quantized_of(mapped, self.affines, params, self.report, self.inputs, platform)
        return bound if parents is None else dataclasses.replace(bound, parents=parents)

    def __repr__(self) -> str:
        return f"SavedModel({summary(self.plan, self.report)})"

    def _repr_html_(self) -> str:
        return self.report.table().to_html(repr(self))

    def _filled(self, like: Any) -> Any:
        """Returns the parameters in the structure of `like`."""
        if like is None:
            problem = "the file does not hold the structure of the parameters, and there is no "
            problem += "`like`."
            raise fail("bind", problem, fix=f"{_LIKE}.")
        stored = leaves_by_path(self.params) if self.structured else self.params
        flat, tree = tree_flatten_with_path(like, is_leaf=is_quantized)
        arrays = {_name(keys): x for keys, x in flat if is_array(x)}
        for path in {**arrays, **stored}:
            expected, actual = type_text(stored.get(path)), type_text(arrays.get(path))
            if actual != expected:
                problem = "`like` does not match the parameters in the file."
                details = f"{path!r}: {actual}, and {expected} in the file"
                fix = "pass parameters with the structure that was quantized, of any values."
                raise fail("bind", problem, given=details, fix=fix)
        return tree.unflatten([stored[_name(keys)] if is_array(x) else x for keys, x in flat])


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """Returns the arrays and QTensors of a pytree, by path."""
    flat, _ = tree_flatten_with_path(tree, is_leaf=is_quantized)
    leaves = [(_name(keys), leaf) for keys, leaf in flat if is_array(leaf)]
    twice = [path for path, n in Counter(path for path, _ in leaves).items() if n > 1]
    if twice:
        problem = f"several parameters have the path {some(map(repr, twice))}."
        fix = "rename one: a key that contains '/' looks like a key inside another key."
        raise fail("save", problem, fix=fix)
    return dict(leaves)


def _name(keys: Any) -> str:
    return keystr(keys, simple=True, separator="/")


def quantized_of(
    mapped: "Mapped",
    scales: Mapping[str, Affine],
    codes: Any,
    report: "model_report.Report",
    inputs: tuple[Any, ...] | None,
    target: str | Literal[False],
) -> Quantized:
    """Returns a quantized function with its weights, laid out for a target."""
    plan = mapped.plan
    params = lay_out_weights(codes, plan, target) if target and plan.weights else codes
    leaves = dict(named_leaves("ptq", by_argument(plan.params, params), plan))
    weights = [  # with the bytes that they take in their layout
        dataclasses.replace(x, bytes_after=abstract_leaf(leaves[x.path]).nbytes)
        for x in report.weights
    ]
    return Quantized(
        mapped.converted(scales),
        params,
        plan,
        scales,
        dataclasses.replace(report, weights=tuple(weights)),
        inputs,
        maps=mapped.maps,
        parents=mapped.f.parents if isinstance(mapped.f, Hoisted) else None,
        basis=mapped.basis,
        source=mapped.function,
    )


def summary(plan: Plan, report: "model_report.Report") -> str:
    """Returns a one-line summary: what was quantized, and how many bytes that saves."""
    count = len(plan.sites) + len(plan.skipped)
    before, after, packed = report.bytes_before, report.bytes_after, report.bytes_packed
    return (
        f"{len(plan.sites)} of {count} contractions, "
        f"{before:,} bytes of parameters become {after:,}"
    ) + (f", {packed:,} with packed codes" if packed < after else "")


def abstract(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns arguments with `jax.ShapeDtypeStruct` in place of arrays."""
    return jax.tree.map(lambda x: jax.eval_shape(lambda: x) if is_array(x) else x, inputs)


@dataclasses.dataclass(frozen=True)
class Mapped:
    """A function with what algorithms do at its sites, and to its parameters; see `Quantized`."""

    f: Callable[..., Any]
    plan: Plan
    maps: Maps = dataclasses.field(default_factory=dict)
    basis: "Basis | None" = None

    @property
    def function(self) -> Callable[..., Any]:
        """The function with its maps."""
        return map_channels(self.f, self.plan, self.maps) if self.maps else self.f

    def then(self, outcome: AlgorithmResult, *, rewrites: bool = False) -> "Mapped":
        """Returns the function after what an algorithm has chosen, or rewritten."""
        basis = None if self.basis is None else self.basis.then(outcome, rewrites=rewrites)
        maps = with_maps("ptq", self.maps, outcome.maps)
        return dataclasses.replace(self, maps=maps, basis=basis)

    def restacked(self, stacked: "Mapped") -> "Mapped":
        """Returns the function of stacked weights, if this is one of their parts."""
        basis = None if self.basis is None else self.basis.restacked(stacked.plan)
        return Mapped(stacked.f, stacked.plan, self.maps, basis)

    def converted(self, scales: Mapping[str, Affine]) -> Callable[..., Any]:
        """Returns the function on integers."""
        return convert(self.function, self.plan, scales)


@dataclasses.dataclass(frozen=True)
class Basis:
    """The float parameters that codes stand for, after algorithms have rewritten weights. It
    rewrites float parameters again, and holds no copy of them.

    Attributes:
      steps: what algorithms do to parameters, in order.
      maps: the maps of the quantized function, with those that correct codes replaced by maps that
        change nothing.
    """

    steps: tuple[Callable[[Any], Any], ...] = ()
    maps: Maps = dataclasses.field(default_factory=dict)

    def __call__(self, params: Any) -> tuple[Any, Maps]:
        """Returns float parameters and maps of channels that give the float function."""
        values = dequantize_params(params) if self.steps else params
        for step in self.steps:
            values = step(values)
        return values, self.maps

    @classmethod
    def of_given(cls, maps: Maps) -> "Basis":
        """Returns the basis if nothing has rewritten parameters, and all maps correct codes."""
        by_site = as_maps("ptq", maps)
        return cls(maps={key: tuple(map(_without_effect, x)) for key, x in by_site.items()})

    def then(self, outcome: AlgorithmResult, *, rewrites: bool) -> "Basis | None":
        """Returns the basis after what an algorithm has chosen, or rewritten."""
        if outcome.basis is not None:
            maps = with_maps("ptq", self.maps, outcome.maps)
            return Basis((*self.steps, outcome.basis), maps)
        if rewrites:
            return None
        maps = with_maps("ptq", self.maps, Basis.of_given(outcome.maps).maps)
        return Basis(self.steps, maps)

    def restacked(self, plan: Plan) -> "Basis":
        """Returns the basis of stacked weights for one of their parts; the plan splits them."""

        def in_parts(step: Callable[[Any], Any], params: Any) -> Any:
            parts = Unstacked(plan, params)
            return parts.together(step(parts.params))

        return Basis(tuple(partial(in_parts, step) for step in self.steps), self.maps)


def _without_effect(x: Map) -> Map:
    """Returns a map with the same arrays in which they change nothing."""
    if isinstance(x, LowRank):
        return LowRank(jnp.zeros_like(x.a), jnp.zeros_like(x.b))
    factors = (jnp.broadcast_to(jnp.eye(y.shape[-1], dtype=y.dtype), y.shape) for y in x.factors)
    return ChannelMap(
        scale=None if x.scale is None else jnp.ones_like(x.scale),
        factors=tuple(factors),
        shift=None if x.shift is None else jnp.zeros_like(x.shift),
        clip=None if x.clip is None else jnp.full_like(x.clip, jnp.inf),
    )


def check_function(function: str, f: Any) -> None:
    """Checks that `f` is a function of its weights, and no model that holds them."""
    modules = {name: sys.modules.get(f"flax.{name}") for name in ("linen", "nnx")}
    flax = [name for name, x in modules.items() if x is not None and isinstance(f, x.Module)]
    details = f"an object of type {type(f).__name__}"
    if flax and getattr(f, "scope", None) is None:
        details, fix = f"{details}, a model of {flax[0]}", _FIX_FOR_MODULES[function][flax[0]]
    elif callable(f):
        return
    else:
        fix = "pass the function first, and the function itself, not what it returns."
    problem = "`f` is not a function of its weights."
    raise fail(function, problem, given=details, fix=fix, error=TypeError)


class BoundFunction(NamedTuple):
    """A function and its parameters, with the positions of these."""

    f: Callable[..., Any]
    params: Any
    argnums: int | tuple[int, ...]
    names: Names

    def arguments(self, params: Any, inputs: Sequence[Any]) -> list[Any]:
        """Returns all arguments of the function."""
        return insert_params(self.argnums, params, inputs)

    def call(self, params: Any, inputs: Sequence[Any]) -> Any:
        """Returns the result for other parameters."""
        return self.f(*self.arguments(params, inputs))


def check_hoist(hoist: Any) -> None:
    """Checks the value of `hoist=`."""
    if hoist is not True and hoist is not False and hoist != "all":
        fix = 'pass hoist=True, or hoist="all" for values that are larger than their parameters.'
        raise fail("ptq", f"`hoist` is unknown: {shown(hoist)}.", fix=fix)


def split_off(bound: BoundFunction, hoist: Hoist, inputs: tuple[Any, ...]) -> BoundFunction:
    """Returns the function without what it computes from its parameters alone, and these values."""
    if hoist is False:
        return bound
    values = "all" if hoist == "all" else "weights"
    split = hoist_values(bound.f, values, params=bound.argnums, names=bound.names)
    g, computed = split(*bound.arguments(bound.params, inputs))
    assert isinstance(g, Hoisted)
    return BoundFunction(g, computed, g.params, g.others or None)


def hoisted_like(
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
        problem = "the function was split by `hoist`, and the parameters before it are not known."
        raise fail("bind", problem, fix=f"{_LIKE}; or bind the g of jqx.hoist(f).")
    if inputs is None:
        return Hoisted(f, plan.hoisted, parents)
    what, argnums, names = plan.hoisted
    split = hoist_values(f, cast(Any, what), params=argnums, names=dict(names) or None)
    return split(*insert_params(positions_of(argnums), parents, inputs))[0]


def target_of(function: str, target: Target) -> str | Literal[False]:
    """Returns the target, with `None` resolved, after checking that it has layouts."""
    platform = jax.default_backend() if target is None else target
    if platform is False or (isinstance(platform, str) and platform in TARGETS):
        return platform
    is_gpu = str(target).lower() in ("cuda", "rocm", "nvidia", "amd")
    backend = f", and the backend of JAX is {platform!r}" if target is None else ""
    details = f"target == {shown(target)}{backend}"
    fix = "pass 'gpu'" if is_gpu else f"pass one of {', '.join(map(repr, TARGETS))}"
    fix += ", or target=False, which keeps the layout that files use."
    raise fail(function, "`target` is unknown.", given=details, fix=fix)
