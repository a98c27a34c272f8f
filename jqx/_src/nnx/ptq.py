"""`ptq` for an nnx model, on the values of its variables."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from ..checks import called, check_instance
from ..compat import is_concrete
from ..errors import fail, some
from ..policy import Policy, check_policy
from ..ptq.ptq import Effort, check_effort
from ..ptq.ptq import ptq as ptq_of_function
from ..ptq.quantized import Hoist, Quantized, SavedModel, Target
from ..statistics.statistics import RowWeight
from ..transforms.algorithm import Algorithm
from ..transforms.stats import OnNonfinite
from ..transforms.trace import is_parameter
from .quantized import check_float
from .state import is_node, leaves_by_path, replaced_by, values, was_written, with_values


class QuantizeModel(Protocol):
    """What `ptq` returns before it gets batches."""

    def __call__(self, batches: Iterable[Any] | None = None) -> Quantized: ...


@called("nnx.ptq", "call it in two steps: jqx.nnx.ptq(model, policy)(batches).")
def ptq(
    model: nnx.Module,
    policy: Policy,
    algorithm: Algorithm | None = None,
    *,
    effort: Effort | None = None,
    hoist: Hoist = False,
    method: str = "__call__",
    target: Target = None,
    weight: RowWeight | None = None,
    on_nonfinite: OnNonfinite = "error",
    own_text: bool | None = None,
    progress: bool = True,
    **kwargs: Any,
) -> QuantizeModel:
    """Quantizes an nnx model after training: `ptq(model, policy)(batches)`.

    `quantized.function(quantized.params, *args)` calls the model on integers, and is pure: `params`
    are nested dicts of the values of the variables by path, and of arrays that are attributes, with
    QTensors in the place of weights (`nnx.Param`).
    Streams of random numbers stay in the function. A call that writes a variable, such as a running
    mean in training or a cache, is an error: use `jqx.nnx.quantize` for such models. `model` is not
    changed. The weights are those that the model has when batches are passed.

    Args:
      model: any float model.
      policy: what is quantized; paths are those of the parameters, such as `blocks/0/up/kernel`.
      algorithm: as in `jqx.ptq`; its `params` are those nested dicts.
      method: name of the method to call.
      effort: as in `jqx.ptq`.
      hoist: as in `jqx.ptq`; then `params` are what was split off.
      target: as in `jqx.ptq`.
      weight: as in `jqx.ptq`.
      on_nonfinite: as in `jqx.ptq`.
      own_text: as in `jqx.ptq`.
      progress: as in `jqx.ptq`.
      **kwargs: keyword arguments of every call. Calls may pass others.

    Returns:
      A function of batches. Each batch is a tuple of the arguments of the model, or a single
      argument. Without batches, a model of tokens writes its own text, as in `jqx.ptq`. The
      function returns a `jqx.Quantized`, which `jqx.save` writes. After `jqx.load`,
      `jqx.nnx.bind` binds it to the model again.

    Raises:
      TypeError: if an argument has another type.
      ValueError: if `model` or a part of it is quantized already, or a call writes a variable; or
        as for `jqx.ptq`.

    Example:
      >>> import jax, jqx, jqx.nnx, jax.numpy as jnp
      >>> from flax import nnx
      >>> model, x = nnx.Linear(64, 8, rngs=nnx.Rngs(0)), jnp.ones((1, 64))
      >>> quantized = jqx.nnx.ptq(model, jqx.presets.w8a8(), progress=False)([x])
      >>> quantized
      Quantized(1 of 1 contractions, 2,080 bytes of parameters become 576)
      >>> bool(jnp.allclose(jax.jit(quantized.function)(quantized.params, x), model(x), atol=0.02))
      True
    """
    check_policy("nnx.ptq", policy)
    check_effort("nnx.ptq", effort, algorithm)
    check_float("nnx.ptq", model)

    fix = "pass a list of batches alone, such as [x]: the parameters are those of the model."

    @called("nnx.ptq(model, policy)", fix)
    def quantize(batches: Iterable[Any] | None = None) -> Quantized:
        function, state = _as_function("nnx.ptq", model, method, kwargs)
        names = {
            "/".join(map(str, path)): None
            for path, variable in nnx.to_flat_state(state)
            if not isinstance(variable, nnx.Param)
            and any(map(is_parameter, jax.tree.leaves(variable)))
        }
        options: Any = {"effort": effort, "target": target, "progress": progress, "hoist": hoist}
        options |= {"weight": weight, "on_nonfinite": on_nonfinite, "own_text": own_text}
        return ptq_of_function(function, policy, algorithm, names=names, **options)(
            values(state), batches
        )

    return quantize


@called("nnx.bind", "pass the model second: jqx.nnx.bind(jqx.load(path), model).")
def bind(
    saved: SavedModel,
    model: nnx.Module,
    *,
    method: str = "__call__",
    target: Target = None,
    check: Literal["function"] | None = None,
    **kwargs: Any,
) -> Quantized:
    """Returns the quantized model of a file, bit for bit equal to the one that was saved.

    Args:
      saved: the result of `jqx.load`.
      model: a model with the structure of the one that was quantized. Its values are not used, and
        it may be abstract, from `nnx.eval_shape`, if all its arrays are variables. Streams of
        random numbers are taken from it.
      method: name of the method to call.
      target: as in `jqx.ptq`.
      check: as in `jqx.SavedModel.bind`.
      **kwargs: keyword arguments of every call, the same as for `jqx.nnx.ptq`.

    Raises:
      TypeError: if an argument has another type.
      ValueError: if the model is not the one that was quantized; or as for `jqx.SavedModel.bind`.

    Example:
      >>> import jqx, jqx.nnx, jax.numpy as jnp, tempfile
      >>> from flax import nnx
      >>> model, x = nnx.Linear(4, 8, rngs=nnx.Rngs(0)), jnp.ones((1, 4))
      >>> path = tempfile.mkdtemp() + "/linear.safetensors"
      >>> jqx.save(path, jqx.nnx.ptq(model, jqx.presets.w8a16(), progress=False)([x]))
      >>> jqx.nnx.bind(jqx.load(path), model)(x).shape
      (1, 8)
    """
    fix = "pass the result of jqx.load for a quantized model."
    check_instance("nnx.bind", "saved", saved, SavedModel, fix=fix)
    check_float("nnx.bind", model)
    if stateless := _stateless_attributes(model):
        raise fail(
            "nnx.bind",
            "an abstract model has attributes without values that are no variables: "
            f"{some(map(repr, stateless))}.",
            fix="pass the model itself, of any values; or make the attribute an nnx.Variable.",
        )
    return saved.bind(
        _as_function("nnx.bind", model, method, kwargs)[0], target=target, check=check
    )


def _stateless_attributes(model: nnx.Module) -> list[str]:
    """Returns the paths of attributes of an abstract model that take part in its graph, not in its
    state: Flax keeps arrays that are no variables there.
    """
    variables = {tuple(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model))}

    def has_no_values(x: Any) -> bool:
        is_traced = isinstance(x, jax.Array) and not is_concrete(x)
        return is_traced or isinstance(x, jax.ShapeDtypeStruct)

    abstract = [
        (*map(str, path), name, *(jax.tree_util.keystr((key,), simple=True) for key in keys))
        for path, node in nnx.iter_graph(model)
        if isinstance(node, nnx.Pytree)
        for name, value in vars(node).items()
        for keys, leaf in jax.tree_util.tree_leaves_with_path(value, is_leaf=is_node)
        if has_no_values(leaf)
    ]
    return ["/".join(path) for path in abstract if path not in variables]


def _as_function(
    function: str, model: nnx.Module, method: str, kwargs: Mapping[str, Any]
) -> tuple[Callable[..., Any], Any]:
    """Returns a model as a function of the values of its variables, and the state of these."""

    def is_random(path: Any, variable: Any) -> bool:
        """Whether a variable belongs to a stream, or an array is a key: files store neither."""
        dtype = getattr(variable, "dtype", None)
        is_key = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
        return isinstance(variable, nnx.RngState) or is_key

    graphdef, streams, state = nnx.split(model, is_random, ...)
    empty = nnx.map_state(lambda _, variable: replaced_by(variable, None), state)
    paths = [tuple(map(str, path)) for path, _ in nnx.to_flat_state(state)]

    def call(params: Any, *args: Any, **call_kwargs: Any) -> Any:
        if missing := ["/".join(path) for path in paths if not _has_value(params, path)]:
            problem = f"the parameters have no value for {some(map(repr, missing))} of the model."
            raise fail(function, problem, fix="pass quantized.params, of this model.")
        own_streams = jax.tree.map(lambda x: x, streams)  # variables of this trace
        inner = nnx.merge(graphdef, own_streams, with_values(empty, params))
        old = leaves_by_path(inner)
        out = getattr(inner, method)(*args, **{**kwargs, **call_kwargs})
        written = nnx.state(inner, lambda path, variable: was_written(path, variable, old))
        changed = ["/".join(map(str, path)) for path, _ in nnx.to_flat_state(written)]
        if changed:
            raise fail(
                function,
                f"`{method}` writes variables, which a pure function cannot do: "
                f"{some(map(repr, changed))}.",
                fix="call model.eval() first, which stops dropout and running means; or use "
                "jqx.nnx.quantize and jqx.nnx.convert, for caches too.",
            )
        return out

    return call, state


def _has_value(params: Any, path: tuple[str, ...]) -> bool:
    """Whether nested dicts have a value at a path."""
    for name in path:
        if not isinstance(params, Mapping) or name not in params:
            return False
        params = params[name]
    return True
