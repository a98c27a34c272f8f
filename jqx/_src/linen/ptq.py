"""A linen module as a pure function of its variables, and `ptq` on them."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from flax import errors
from flax import linen as nn

from ..checks import called, check_instance
from ..errors import fail, some
from ..policy import Policy, check_policy
from ..ptq.ptq import Effort, check_effort
from ..ptq.ptq import ptq as ptq_of_function
from ..ptq.quantized import Hoist, Quantize, Quantized, SavedModel, Target
from ..statistics.statistics import RowWeight
from ..transforms.algorithm import Algorithm
from ..transforms.stats import OnNonfinite
from .quantized import Quantized as QuantizedModule
from .quantized import values

Variables = Mapping[str, Any]


@called("linen.pure", "pass jqx.linen.pure(module, variables).")
def pure(
    module: nn.Module, variables: Variables, **kwargs: Any
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Returns a module as a pure function, and the tree of its values: `f, params`.

    `f(params, *args)` is `module.apply(params, *args, **kwargs)`, and every transform of jqx takes
    both. `params` are the variables as nested dicts, without boxes such as `nn.Partitioned`. Paths
    begin with the name of the collection: `params/Dense_0/kernel`. With
    `names={"params": "", "batch_stats": None}` they are those of `jqx.linen.ptq`, and the
    collection `batch_stats` has no weights.

    Args:
      module: any unbound float module.
      variables: the variables, as `module.init` returns them.
      **kwargs: arguments of every call, as for `module.apply`, such as `method=`, `mutable=`,
        `rngs=` and keyword arguments of the module. Calls may pass others: a training step passes
        new keys, `f(params, x, rngs={"dropout": key})`. With `mutable=`, `f` returns `(out,
        written)`, and `{**params, **written}` are the next variables.

    Raises:
      TypeError: if an argument has another type.
      ValueError: if `module` is bound or quantized already.

    Example:
      >>> import jax, jqx, jqx.linen, jax.numpy as jnp
      >>> from flax import linen as nn
      >>> module, x = nn.BatchNorm(use_running_average=False), jnp.ones((1, 4))
      >>> variables = module.init(jax.random.key(0), x)
      >>> f, params = jqx.linen.pure(module, variables, mutable=["batch_stats"])
      >>> out, written = jax.jit(f)(params, x)
      >>> sorted(params), sorted(written)
      (['batch_stats', 'params'], ['batch_stats'])
      >>> params = {**params, **written}
    """
    f, fix = _as_function("linen.pure", module, kwargs), "pass what module.init returns."
    check_instance("linen.pure", "variables", variables, Mapping, fix=fix)
    return f, values(variables)


@called("linen.ptq", "call it in two steps: jqx.linen.ptq(module, policy)(variables, batches).")
def ptq(
    module: nn.Module,
    policy: Policy,
    algorithm: Algorithm | None = None,
    *,
    effort: Effort | None = None,
    hoist: Hoist = False,
    target: Target = None,
    weight: RowWeight | None = None,
    on_nonfinite: OnNonfinite = "error",
    own_text: bool | None = None,
    progress: bool = True,
    **kwargs: Any,
) -> Quantize:
    """Quantizes a linen module after training: `ptq(module, policy)(variables, batches)`.

    It is `jqx.ptq` of `module.apply`: `quantized.function(quantized.params, *args)` applies the
    module on integers. Its `params` are the variables, with QTensors in the collection `params`,
    and without boxes such as `nn.Partitioned`. Other collections stay unchanged and have no
    weights. Use `jqx.linen.quantize` for training, and for modules that keep state between calls.

    Args:
      module: any unbound float module.
      policy: what is quantized; paths are those in `variables["params"]`.
      algorithm: as in `jqx.ptq`; its `params` are the variables.
      effort: as in `jqx.ptq`.
      hoist: as in `jqx.ptq`; then `params` are what was split off.
      target: as in `jqx.ptq`.
      weight: as in `jqx.ptq`.
      on_nonfinite: as in `jqx.ptq`.
      own_text: as in `jqx.ptq`.
      progress: as in `jqx.ptq`.
      **kwargs: arguments of every call, as for `module.apply`, such as `method=`, `mutable=`,
        `rngs=` and keyword arguments of the module. Calls may pass others: `quantized(x,
        rngs=...)`.

    Returns:
      A function of variables and batches. Each batch is a tuple of the arguments of the module, or
      a single argument. Without batches, a module of tokens writes its own text, as in `jqx.ptq`.
      The function returns a `jqx.Quantized`, which `jqx.save` writes. After
      `jqx.load`, `jqx.linen.bind` binds it to the module again.

    Raises:
      TypeError: if an argument has another type.
      ValueError: if `module` is bound or quantized already; or as for `jqx.ptq`.

    Example:
      >>> import jax, jqx, jqx.linen, jax.numpy as jnp
      >>> from flax import linen as nn
      >>> x, module = jnp.ones((1, 64)), nn.Dense(8)
      >>> variables = module.init(jax.random.key(0), x)
      >>> quantized = jqx.linen.ptq(module, jqx.presets.w8a8(), progress=False)(variables, [x])
      >>> quantized
      Quantized(1 of 1 contractions, 2,080 bytes of parameters become 576)
      >>> y = jax.jit(quantized.function)(quantized.params, x)
      >>> bool(jnp.allclose(y, module.apply(variables, x), atol=0.02))
      True
    """
    check_policy("linen.ptq", policy)
    check_effort("linen.ptq", effort, algorithm)
    function = _as_function("linen.ptq", module, kwargs)

    fix = "pass the variables that module.init returns, and a list of batches, such as [x]."

    @called("linen.ptq(module, policy)", fix)
    def quantize(variables: Variables, batches: Iterable[Any] | None = None) -> Quantized:
        check_instance("linen.ptq", "variables", variables, Mapping, fix=fix)
        params = values(variables)
        if "params" not in params:
            problem = f"the variables have no collection 'params': {some(map(repr, params))}."
            raise fail("linen.ptq", problem, fix="pass {'params': params}.")
        names = {name: "" if name == "params" else None for name, tree in params.items() if tree}
        options: Any = {"effort": effort, "target": target, "progress": progress, "hoist": hoist}
        options |= {"weight": weight, "on_nonfinite": on_nonfinite, "own_text": own_text}
        return ptq_of_function(function, policy, algorithm, names=names, **options)(params, batches)

    return quantize


@called("linen.bind", "pass the module second: jqx.linen.bind(jqx.load(path), module).")
def bind(
    saved: SavedModel,
    module: nn.Module,
    like: Any = None,
    *,
    target: Target = None,
    check: Literal["function"] | None = None,
    **kwargs: Any,
) -> Quantized:
    """Returns the quantized module of a file, bit for bit equal to the one that was saved.

    Args:
      saved: the result of `jqx.load`.
      module: the module that was quantized.
      like: as in `jqx.SavedModel.bind`.
      target: as in `jqx.ptq`.
      check: as in `jqx.SavedModel.bind`.
      **kwargs: arguments of every call, the same as for `jqx.linen.ptq`.

    Raises:
      TypeError: if an argument has another type.
      ValueError: if the module is not the one that was quantized; or as for `jqx.SavedModel.bind`.

    Example:
      >>> import jax, jqx, jqx.linen, jax.numpy as jnp, tempfile
      >>> from flax import linen as nn
      >>> path, module, x = tempfile.mkdtemp() + "/dense.safetensors", nn.Dense(8), jnp.ones((1, 4))
      >>> variables = module.init(jax.random.key(0), x)
      >>> quantize = jqx.linen.ptq(module, jqx.presets.w8a16(), progress=False)
      >>> jqx.save(path, quantize(variables, [x]))
      >>> jqx.linen.bind(jqx.load(path), module)(x).shape
      (1, 8)
    """
    fix = "pass the result of jqx.load for a quantized module."
    check_instance("linen.bind", "saved", saved, SavedModel, fix=fix)
    function = _as_function("linen.bind", module, kwargs)
    try:
        return saved.bind(function, like, target=target, check=check)
    except errors.FlaxError as error:
        raise fail(
            "linen.bind",
            "the module does not take the variables of the file.",
            given=f"{type(module).__name__}: {str(error).splitlines()[0]}",
            fix="pass the module that was quantized, made with its original fields.",
        ) from error


def _as_function(function: str, module: nn.Module, kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    """Returns a module as a function of its variables."""
    check_instance(function, "module", module, nn.Module, fix="pass a linen module.")
    if module.scope is not None or isinstance(module, QuantizedModule):
        state = "quantized" if module.scope is None else "bound"
        problem = f"this {type(module).__name__} is {state} already."
        raise fail(function, problem, fix="pass the float module itself, unbound.")

    def apply(variables: Any, *args: Any, **call_kwargs: Any) -> Any:
        options = {**kwargs, **call_kwargs}
        try:
            return module.apply(variables, *args, **options)
        except errors.ModifyScopeVariableError as error:
            problem = "the call writes variables that are not mutable."
            facts = f"mutable == {options.get('mutable', False)!r}: {str(error).splitlines()[0]}"
            fix = 'name their collections, mutable=["batch_stats"]; or pass the argument of the '
            fix += "module that stops running means, such as train=False."
            raise fail(function, problem, given=facts, fix=fix) from error

    return apply
