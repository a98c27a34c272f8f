"""`ptq`: plan, calibrate, quantize and lay out, in one call."""

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import jax

from .._checks import check_instance, require_that
from ..calibrators import Affine
from ..diagnostics._shared import report_of
from ..policy import Policy
from ..tensor import pack_for
from ..tensor._shared import TARGETS, check_target
from ..transforms import Plan, affines, calibrate_batches, convert, make_plan
from ..transforms._shared import check_function
from ._algorithm import Algorithm, with_codes
from ._quantized import Quantized


def ptq(
    f: Callable[..., Any],
    policy: Policy,
    algorithm: Algorithm | None = None,
    *,
    params: int | tuple[int, ...] = 0,
    target: str | Literal[False] | None = None,
    progress: bool = True,
) -> Callable[[Any, Iterable[Any]], Quantized]:
    """Quantizes a function after training: `ptq(f, policy)(params, batches)`.

    It plans, calibrates where activations have static scales, finds the scales, quantizes the
    weights and lays them out; `make_plan`, `calibrate_batches`, `affines`, `quantize_params`,
    `convert` and `pack_for` are its steps, each of which may be taken alone.

    Args:
      f: a function of arrays and pytrees of arrays.
      policy: what is quantized, and how, such as `jqx.presets.w8a8()`.
      algorithm: chooses the codes of weights; `None` rounds to nearest. It is called with the plan,
        the parameters and the statistics of the calibration (`None` without one), and returns the
        parameters, with QTensors or better floats in the places of weights.
      params: position, or positions, of the arguments of `f` that hold weights.
      target: `"cpu"`, `"gpu"` or `"tpu"`, for which weights are laid out; `None` means
        `jax.default_backend()`, and `False` leaves them as files keep them.
      progress: whether to show a bar, as in `calibrate_batches`.

    Returns:
      A function of the parameters (a tuple where there are several positions) and of batches: each
      a tuple of the other arguments of `f`, or a lone one. The first is planned with; the others
      are read only where activations have static scales. It returns a `Quantized`.

    Raises:
      TypeError: `f` is no function, `policy` no `Policy`, or `batches` cannot be iterated over.
      ValueError: there is no batch, `target` is unknown, or a step refuses what it is given.

    Gradient: none; weights are codes.

    Example:
      >>> import jqx, jax, jax.numpy as jnp
      >>> f = lambda params, x: jax.nn.relu(x @ params["w"])
      >>> params, batches = {"w": jnp.eye(64)}, [jnp.ones((8, 64)), jnp.full((8, 64), 2.0)]
      >>> quantized = jqx.ptq(f, jqx.presets.w8a8(), progress=False)(params, batches)
      >>> quantized
      Quantized(1 of 1 contractions, 16,384 bytes of parameters become 4,352)
      >>> y = jax.jit(quantized.function)(quantized.params, batches[0])
      >>> bool(jnp.allclose(y, f(params, batches[0]), atol=0.02))
      True
    """
    check_function("ptq", f)
    mend = "pass for example jqx.presets.w8a8()."
    check_instance("ptq", "policy", policy, Policy, mend=mend)
    if target is None:
        target = jax.default_backend()
        target = target if target in TARGETS else False
    if target is not False:
        check_target("ptq", target, None)

    def quantize(values: Any, batches: Iterable[Any]) -> Quantized:
        mend = "pass a list of batches, or a generator: jqx.ptq(f, policy)(params, batches)."
        check_instance("ptq", "batches", batches, Iterable, mend=mend)
        first, every = _first(batches)
        plan = make_plan(f, policy, params=params)(*_arguments(params, values, first))
        stats, scales = None, {}
        if plan.static_specs():
            stats = calibrate_batches(f, plan, values, every, progress=progress)
            scales = affines(plan, stats)
        codes = with_codes(plan, values, algorithm, stats)
        return quantized_of(f, plan, scales, values, codes, target)

    return quantize


def quantized_of(
    f: Callable[..., Any],
    plan: Plan,
    scales: Mapping[str, Affine],
    params: Any,
    codes: Any,
    target: str | Literal[False],
) -> Quantized:
    """Returns a quantized function with its weights, laid out for a target."""
    found = report_of(plan, params, lambda: codes)
    laid_out = pack_for(codes, target) if target and plan.weights else codes
    return Quantized(convert(f, plan, scales), laid_out, plan, scales, found)


def _first(batches: Iterable[Any]) -> tuple[Any, Iterable[Any]]:
    """Returns the first batch, and all of them, that one among them."""
    every = iter(batches)
    found = list(itertools.islice(every, 1))
    require_that(
        found,
        error=ValueError,
        function="ptq",
        problem="there is no batch.",
        given="an empty `batches`, or a generator that was used up",
        expected="one batch or more",
        mend="pass a list, or make the generator anew.",
    )
    return found[0], itertools.chain(found, every)


def _arguments(places: int | tuple[int, ...], params: Any, batch: Any) -> list[Any]:
    """Returns the arguments of the function: the parameters at their positions, and the batch."""
    arguments = list(batch) if isinstance(batch, tuple) else [batch]
    pairs = [(places, params)] if isinstance(places, int) else zip(places, params, strict=True)
    for place, value in sorted(pairs, key=lambda pair: pair[0]):
        arguments.insert(place, value)
    return arguments
