"""`convert`: the quantized function on integers. `simulate`: the same in floating point,
differentiable; with `backward` its forward pass runs on integers.
"""

import dataclasses
import zlib
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .. import compat
from ..checks import as_dtype, called, check_real
from ..compat import Eqn
from ..errors import fail
from ..gradients.estimators import Surrogate, draws
from ..policy import Policy
from ..signatures import P, R
from ..tensor.grid import fake_quantize_as
from ..tensor.qtensor import QTensor
from ..tensor.spec import QSpec
from .arguments import check_function
from .higher_order import Records
from .integers import OnIntegers, quantized_leaves
from .interpret import Rules, interpret
from .known_values import check_unsupported
from .make_plan import as_plan, params_of
from .partitioned import gathered, partial_sums, weight_shardings
from .plan import GivenAffines, Plan, Site, Weight
from .regions import Recorder, recorder
from .rules import CONTRACTIONS, in_float
from .trace import Call, is_quantized, trace_call
from .views import Trainable, codes_of, is_coded, real_of


@called("convert", "call it in two steps: jqx.convert(f, plan, affines)(params, x).")
def convert(
    f: Callable[P, R],
    plan: Plan | Policy,
    affines: GivenAffines = None,
    *,
    unsupported: str = "error",
    partial_dtype: DTypeLike | None = None,
    gather_axes: str | tuple[str, ...] | None = None,
    shardings: Any = None,
) -> Callable[P, R]:
    """Returns `f` with its planned contractions run on integers.

    `simulate(f, plan, affines, backward=jnp.float32)` has the same bits, and gradients. Plain
    `simulate` computes in float, so its results differ from these more with depth. If weights are
    packed for jqx-cpu, one kernel computes several products and what is between them, with other
    last bits of functions such as `exp`.

    Args:
      f: the function that the plan was made for.
      plan: a `Plan`, or a `Policy` to plan the call with (then argument 0 holds the parameters).
      affines: scales from `jqx.affines`, for every static activation and output. `"dynamic"`
        computes them from the current values instead. `None` if the plan has no static ones. A
        QTensor has its own scale: pass learned scales of weights to `quantize_params` too.
      unsupported: what to do if a QTensor reaches an operation without a quantized form:
        `"error"`, or `"dequantize"` to continue in float.
      partial_dtype: dtype such as `jnp.bfloat16` or `jnp.float32`, for products whose contracted
        axis is split over several devices. Each device scales its part of the sum, and the parts
        are added in this dtype. `None` leaves it to the compiler, which adds the int32 sums of the
        devices: this is exact, and takes four bytes an element. Scales of activations cover the
        whole axis in both cases. It applies to `dot_general`, also as einsum traces it; everything
        else is left to the compiler.
      gather_axes: name, or names, of the mesh axes along which rows are partitioned too (FSDP).
        Weights are gathered along them where a contraction reads them, as codes and scales. `None`
        leaves it to the compiler. If scales are in blocks, it gathers dequantized floats.
      shardings: how the float weights are sharded, as `jqx.parallel.shardings` takes it, for
        `partial_dtype` and `gather_axes`. `None` if the function is called outside of jit, or if
        the axes of the mesh are explicit: then the arrays carry their shardings.

    Returns:
      A function with the arguments and the result of `f`. Weights may be QTensors and Segments, as
      `quantize_params` makes them; a float weight is quantized on the fly. Any other argument may
      hold QTensors too, such as a cache from `quantize_state`. `f` is traced with arrays of their
      shape and dtype. Contractions read the codes, `dynamic_update_slice` and `select` quantize
      what they write, and values carried by loops, and results, stay quantized. Wrap the function
      in `jax.jit`. In profiles and compiled programs, the name scope `jqx[path:op]` marks each
      contraction.

    Raises:
      TypeError: if `f` is not a function or `plan` is not a plan.
      ValueError: if the plan was made for another function; if `affines`, or a QTensor, does not
        fit it; if a static activation or output has no scale; if `unsupported` is unknown; or if
        `partial_dtype`, `gather_axes` or `shardings` have no effect.
      NotImplementedError: if a QTensor reaches an operation without a quantized form.

    Example:
      >>> import jqx, jax, jax.numpy as jnp
      >>> f = lambda w, x: x @ w
      >>> w, x = jnp.eye(2) * 3.0, jnp.array([[1.0, -2.0]])
      >>> plan = jqx.make_plan(f, jqx.presets.w8a8_dynamic())(w, x)
      >>> jax.jit(jqx.convert(f, plan))(jqx.quantize_params(w, plan), x).round(1)
      Array([[ 3., -6.]], dtype=float32)
    """
    check_function("convert", f)
    params = params_of("convert", plan)
    check_unsupported("convert", unsupported)

    def converted(*args: P.args, **kwargs: P.kwargs) -> R:
        call = _without_returned_stacks(trace_call("convert", f, params, args, kwargs))
        fitted = as_plan("convert", plan, call, params)
        scales = fitted.scales_of("convert", affines)
        if shardings is not None and partial_dtype is None and gather_axes is None:
            problem = "`shardings` have no effect without partial_dtype or gather_axes."
            raise fail("convert", problem, fix="pass one of these, or leave shardings out.")
        rules = OnIntegers(fitted, scales, dequantize=unsupported == "dequantize", call=call)
        if partial_dtype is not None or gather_axes is not None:
            named = dict(zip(call.paths, call.leaves, strict=True))
            shardings_of = weight_shardings("convert", fitted, shardings, named)
            gather = gathered("convert", gather_axes, shardings_of)
            parted = shardings_of if gather is None else gather.left
            partial = partial_sums("convert", partial_dtype, parted)
            rules = dataclasses.replace(rules, partial=partial, gather=gather)
        leaves = quantized_leaves(call, call.leaves, rules)
        out, _ = interpret(call.jaxpr, call.consts, leaves, rules)
        return jax.tree.unflatten(call.out_tree, _results(call, out, rules))

    return converted


def _without_returned_stacks(call: Call) -> Call:
    """Returns a call without the stacks that the function returns as they are given. Joining their
    parts, which may have several formats, has no quantized form, and `_results` needs no stack.
    """
    if not call.returned:
        return call
    outvars = enumerate(call.jaxpr.outvars)
    remaining = [call.jaxpr.invars[0] if i in call.returned else atom for i, atom in outvars]
    jaxpr = compat.without_dead(call.jaxpr.replace(outvars=remaining))
    return dataclasses.replace(call, jaxpr=jaxpr)


def _results(call: Call, out: Sequence[Any], rules: OnIntegers) -> list[Any]:
    """Returns results in the form of the arguments. An argument that is returned unchanged is the
    same object. Results contain QTensors only if the arguments do.
    """
    leaf_of = dict(zip(call.jaxpr.invars, call.leaves, strict=True))
    atoms = [None if compat.is_literal(atom) else atom for atom in call.jaxpr.outvars]
    results = [leaf_of.get(atom, x) for atom, x in zip(atoms, out, strict=True)]
    results = [call.returned.get(i, x) for i, x in enumerate(results)]
    if any(map(is_quantized, call.leaves)):
        return results
    for x in filter(is_quantized, results):
        if not rules.dequantize:
            problem = f"`f` returns a float weight that is quantized on the fly: {x!r}."
            fix = "pass jqx.quantize_params(params, plan), or leave the weight out of the result."
            raise fail("convert", problem, fix=fix, error=NotImplementedError)
    return [real_of(x) for x in results]


# `simulate`, with `convert`'s bits in the forward pass if `backward` is given.


@dataclasses.dataclass(frozen=True)
class _FakeQuantize(Rules):
    backward: DTypeLike | None = None

    function: ClassVar[str | None] = "simulate"

    def weight(self, leaf: Any, weight: Weight | None) -> Any:
        """Rounds a weight; also keeps its codes if contractions run on integers."""
        has_codes = is_quantized(leaf)
        if weight is None:
            return Trainable.state(leaf) if has_codes else leaf
        real = leaf.dequantize() if has_codes else self.round(leaf, weight.spec, weight.key)
        if self.backward is None:
            return real
        return Trainable(leaf if has_codes else self.quantize(leaf, weight.spec, weight.key), real)

    def quantize(self, x: Any, spec: QSpec, name: str) -> QTensor:
        """Returns the codes for the result of `round`, without gradients."""
        fixed = jax.lax.stop_gradient((jnp.asarray(x), self.affines.get(name)))
        q = QTensor.quantize(fixed[0], spec, fixed[1])
        return dataclasses.replace(q, values=as_stored(q.values))

    def round(self, x: Any, spec: QSpec, name: str) -> jax.Array:
        """Rounds to the grid of a spec, with separate random numbers for each name."""
        key = None
        if draws(spec.gradient) and self.key is not None:
            key = jax.random.fold_in(self.key, zlib.crc32(name.encode()))
        return fake_quantize_as(jnp.asarray(x), spec, self.affines.get(name), key)

    def at_site(self, site: Site, eqn: Eqn, operands: Sequence[Any]) -> tuple[jax.Array, Records]:
        count = len(site.operands)
        observed = [  # weights were rounded before their first use
            (i, operand.spec, operand.key)
            for i, operand in enumerate(site.operands)
            if operand.role == "activation" and operand.spec and not is_coded(operands[i])
        ]
        rounded = [real_of(x) for x in operands]
        for i, spec, name in observed:
            rounded[i] = self.round(operands[i], spec, name)
        if self.backward is not None and self.holds_codes(site, operands):
            codes = [codes_of(x) for x in operands]
            for i, spec, name in observed:
                codes[i] = self.quantize(operands[i], spec, name)
            result = _integer_forward(eqn, codes, rounded, count, self.backward)
        else:
            (result,) = compat.bind(eqn, rounded)
        if site.output is not None:
            result = self.round(result, site.output, site.output_key)
        return result, {}

    def holds_codes(self, site: Site, operands: Sequence[Any]) -> bool:
        """Whether the weights of a site come with their codes. Only those inside custom derivative
        rules of the user do not.
        """
        weights = [
            x
            for operand, x in zip(site.operands, operands, strict=False)
            if operand.role == "weight" and self.plan.weight_at(operand.path) is not None
        ]
        return all(isinstance(x, Trainable) for x in weights)

    def recorder(self) -> Recorder | None:
        return None if self.backward is None else recorder()

    def in_float(self, eqn: Eqn, operands: Sequence[Any]) -> list[Any]:
        return super().in_float(eqn, operands) if self.backward is None else in_float(eqn, operands)

    def contract(self, eqn: Eqn, operands: Sequence[Any]) -> list[Any]:
        if self.backward is None:
            return self.unsupported(eqn, operands)
        codes, real = [codes_of(x) for x in operands], [real_of(x) for x in operands]
        count = len(CONTRACTIONS[eqn.primitive.name].kept(eqn))
        return [_integer_forward(eqn, codes, real, count, self.backward)]


@called("simulate", "call it in two steps: jqx.simulate(f, plan, affines)(params, x).")
def simulate(
    f: Callable[P, R],
    plan: Plan | Policy,
    affines: GivenAffines = None,
    *,
    backward: DTypeLike | None = None,
    key: jax.Array | None = None,
) -> Callable[P, R]:
    """Returns `f` with its quantization simulated in floating point, for training.

    Weights are rounded to their grid before their first use, activations (and outputs) at their
    sites, each with the gradient estimator of its spec. The contractions run in float. With
    `backward=` they run on integers, as in `convert`, and only those of the backward pass run in
    float.

    To evaluate what will be deployed, pass `backward=jnp.float32`: the result has the same bits as
    that of `convert`. Without it the two diverge with depth. Products in float and on integers
    differ in the last bit, so that now and then a value is rounded to another code, and every layer
    amplifies the difference. In a language model with 30 layers (SmolLM2-135M, W8A8, dynamic
    scales) they differ by 0.0009 after one layer and by 0.12 in the logits (relative L2), which is
    as much as the error of quantization itself.

    Args:
      f: the function that the plan was made for.
      plan: a `Plan`, or a `Policy` to plan the call with (then argument 0 holds the parameters).
      affines: scales from `jqx.affines`, for every static activation and output. `"dynamic"`
        computes them from the current values instead. `None` if the plan has no static ones.
        Scales of weights are computed from their values, unless `affines` has an entry
        `<path>:weight`.
      backward: `None`, or the float dtype to which the operands of contractions in the backward
        pass are rounded, such as `jnp.bfloat16`. The forward pass then runs on integers and has the
        same bits as `convert`. Inside `jax.custom_jvp` and `jax.custom_vjp` it stays in float.
      key: random key, for specs whose gradient estimator draws numbers; pass a new one for each
        step.

    Returns:
      A function with the arguments and the result of `f`. QTensors that are weights of the plan are
      dequantized. All others, such as a cache, stay quantized, as in `convert`: values are
      quantized when written, with a straight-through gradient.

    Raises:
      TypeError: if `f` is not a function, `plan` is not a plan or `backward` is not a float dtype.
      ValueError: if the plan was made for another function, `affines` does not fit it, a static
        activation or output has no scale, `key` is missing or has no effect, or `backward` is given
        and the gradient estimator of a spec does not work on the integers.

    Gradient: with respect to all float arguments, and to given scales. Dynamic scales are
      constants. A symmetric scale by `absmax` clips nothing, so `ste` is the identity there. This
      includes NaN, which makes all values that share its scale NaN. Inside `jax.custom_jvp` and
      `jax.custom_vjp` the rule of the user applies, evaluated in float. Scales that are used only
      there have a gradient of zero.

    Example:
      >>> import jqx, jax, jax.numpy as jnp
      >>> f = lambda w, x: (x @ w).sum()
      >>> w, x = jnp.array([[0.3], [1.0]]), jnp.ones((1, 2))
      >>> plan = jqx.make_plan(f, jqx.presets.w8a16(weight={"qtype": jnp.int2}))(w, x)
      >>> jqx.simulate(f, plan)(w, x)
      Array(1., dtype=float32)
      >>> jqx.simulate(f, plan, backward=jnp.float32)(w, x) == jqx.convert(f, plan)(w, x)
      Array(True, dtype=bool)
      >>> jax.grad(jqx.simulate(f, plan))(w, x)
      Array([[1.],
             [1.]], dtype=float32)
    """
    check_function("simulate", f)
    params = params_of("simulate", plan)
    if backward is not None:
        backward = as_dtype("simulate", "backward", backward)
        check_real("simulate", "`backward`", backward)

    def simulated(*args: P.args, **kwargs: P.kwargs) -> R:
        call = trace_call("simulate", f, params, args, kwargs)
        fitted = as_plan("simulate", plan, call, params)
        scales = fitted.scales_of("simulate", affines)
        _check_gradients(fitted, backward, key)
        rules = _FakeQuantize(fitted, scales, key, backward)
        leaves = [
            rules.weight(leaf, fitted.weight_at(path))
            for leaf, path in zip(call.leaves, call.paths, strict=True)
        ]
        out, _ = interpret(call.jaxpr, call.consts, leaves, rules)
        # State that the caller passed as codes is returned as codes, and a weight as floats.
        results = [x.codes if isinstance(x, Trainable) and x.is_state else real_of(x) for x in out]
        return jax.tree.unflatten(call.out_tree, results)

    return simulated


def as_stored(codes: jax.Array) -> jax.Array:
    """Returns codes that are kept for the backward pass, as codes.

    XLA on CPU would otherwise keep the quotients, which are four times as large, and round them
    again where they are dequantized. It removes barriers before it fuses, but moves nothing through
    a condition whose value it cannot know, such as a constant behind a barrier.
    """

    def on_cpu(codes: jax.Array) -> jax.Array:
        yes = jax.lax.optimization_barrier(jnp.bool_(True))
        return jax.lax.cond(yes, lambda codes: codes, jax.lax.neg, codes)

    return jax.lax.platform_dependent(codes, cpu=on_cpu, default=jax.lax.optimization_barrier)


def _check_gradients(plan: Plan, backward: DTypeLike | None, key: jax.Array | None) -> None:
    """Checks that the estimators of a plan take the options of `simulate`."""
    specs = [weight.spec for weight in plan.weights]
    for site in plan.sites:
        specs += [x for x in (*(o.spec for o in site.operands if o.path is None), site.output) if x]
    gradients = [spec.gradient for spec in specs]
    if key is not None and not any(map(draws, gradients)):
        problem = "`key` has no effect: no gradient estimator of the plan draws random numbers."
        fix = "drop key, or use an estimator such as jqx.gradients.stochastic."
        raise fail("simulate", problem, fix=fix)
    surrogate = next((x for x in gradients if isinstance(x, Surrogate)), None)
    if backward is not None and surrogate is not None:
        problem = "`backward` runs the forward pass on integers, which this estimator does not use."
        details = f"backward == {backward}, and the estimator {surrogate}"
        fix = "choose another gradient= for that spec, or backward=None."
        raise fail("simulate", problem, given=details, fix=fix)


# A contraction on integers, with the gradient of the dequantized contraction.


def _integer_forward(
    eqn: Eqn,
    codes: Sequence[Any],
    real: Sequence[jax.Array],
    count: int,
    dtype: DTypeLike,
) -> jax.Array:
    """Evaluates a contraction of QTensors, or of QTensors and arrays.

    Args:
      eqn: the contraction.
      codes: the operands, as they are contracted.
      real: the same as arrays; gradients are with respect to the first `count` of them.
      count: number of operands that can be quantized; these come first.
      dtype: dtype of the operands of the contractions in the backward pass.
    """

    family = CONTRACTIONS[eqn.primitive.name]

    @jax.custom_vjp
    def contract(real: Sequence[jax.Array], codes: Sequence[Any], others: Sequence[Any]) -> Any:
        return family.apply(eqn, [*codes, *others])

    def forward(real: Sequence[jax.Array], codes: Sequence[Any], others: Sequence[Any]) -> Any:
        result = _differentiable_once(lambda real: family.apply(eqn, [*codes, *others]), dtype)
        return result(real), (codes, others)

    def backward(residuals: Any, cotangent: jax.Array) -> Any:
        codes, others = residuals
        rounded = [x.dequantize() if isinstance(x, QTensor) else x for x in codes]

        def gradients(cotangent: jax.Array) -> list[jax.Array]:
            cotangents = family.gradients(eqn, [*rounded, *others], cotangent, dtype)
            return [g.astype(x.dtype) for g, x in zip(cotangents, rounded, strict=True)]

        return _differentiable_once(gradients, dtype)(cotangent), None, None

    contract.defvjp(forward, backward)
    parts = real[:count], codes[:count], real[count:]
    return contract(*compat.vary_alike(*map(list, parts)))


def _differentiable_once(f: Callable[[Any], Any], dtype: DTypeLike) -> Callable[[Any], Any]:
    """Returns a function of a first derivative that raises where it is differentiated again. Codes
    have no derivative, so the result would lack the terms of the weights and activations.
    """
    function = jax.custom_jvp(f)

    @function.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        problem = f"backward={jnp.dtype(dtype).name} has no second derivatives."
        fix = "leave out backward= there: jqx.simulate(f, plan, affines)."
        raise fail("simulate", problem, fix=fix, error=NotImplementedError)

    return function
