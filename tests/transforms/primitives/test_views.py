import jax
import jax.numpy as jnp
import pytest

import jqx
from jqx._src.transforms.interpret import Rules, interpret
from jqx._src.transforms.trace import is_quantized, trace_call

from ...models.transforms import normal

VIEWS = {
    "transpose": lambda w: w.T,
    "reshape that splits": lambda w: w.reshape(2, 3, 4),
    "reshape of size-1 axes": lambda w: w.reshape(6, 1, 4, 1),
    "squeeze": lambda w: jnp.squeeze(w[:, None], 1),
    "expand": lambda w: w[:, None, :],
    "broadcast": lambda w: jnp.broadcast_to(w[None], (3, 6, 4)),
    "slice": lambda w: w[1:5:2, :3],
    "row": lambda w: w[2],
    "convert": lambda w: w.astype(jnp.bfloat16),
    "stop_gradient": jax.lax.stop_gradient,
    "copy": jnp.copy,
    "mul": lambda w: w * 4.0,
    "mul from the left": lambda w: 0.5 * w,
    "mul by a traced scalar": lambda w: w * jnp.float32(2),
    "div": lambda w: w / 8.0,
    "neg": lambda w: -w,
    "reverse": lambda w: w[::-1, ::-1],
    "tile": lambda w: jnp.tile(w, (2, 3)),
    "repeat of an axis": lambda w: jnp.broadcast_to(w[:, None], (6, 2, 4)).reshape(12, 4),
    "roll": lambda w: jnp.roll(w, 1, 0),
    "concatenate": lambda w: jnp.concatenate([w[2:], w, w[:1]]),
    "stack": lambda w: jnp.stack([w, 2 * w], 1),
    "split": lambda w: jnp.split(w, [1, 3], axis=1)[1],
    "unstack": lambda w: jnp.unstack(w, axis=1)[2],
    "barrier": lambda w: jax.lax.optimization_barrier((w, 1.0))[0],
    "several in a jit": lambda w: jax.jit(lambda w: (w.T * 2.0)[1:3].reshape(2, 3, 2))(w),
}
NO_VIEWS = {
    "mul by an array": lambda w: w * w,
    "division of a scalar": lambda w: 1.0 / w,
    "conversion to integers": lambda w: w.astype(jnp.int32),
    "sum": lambda w: w.sum(),
}
GRANULARITIES = [jqx.per_tensor(), jqx.per_axis(0), jqx.per_axis(1), jqx.per_axis(0, 1)]
ASYMMETRIC = {"symmetric": False, "calibrator": jqx.calibrators.minmax}


class Refusing(Rules):
    """Rules of a plan without sites, that refuse whatever is no view."""

    def at_site(self, site, eqn, operands):
        raise AssertionError

    def unsupported(self, eqn, operands):
        raise NotImplementedError(eqn.primitive.name)


def evaluate(view, q):
    call = trace_call("convert", view, 0, (q,), {})
    (out,), _ = interpret(
        call.jaxpr, call.consts, call.leaves, Refusing(jqx.Plan((), (), (), 0, ()))
    )
    return out


@pytest.mark.many
@pytest.mark.parametrize("fields", [{}, ASYMMETRIC], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_of_a_qtensor_is_the_view_of_its_real_values(name, granularity, fields):
    view = VIEWS[name]
    q = jqx.QTensor.quantize(normal(0, 6, 4), jqx.QSpec(jnp.int8, granularity, **fields))
    out = evaluate(view, q)
    assert is_quantized(out) and out.qtype == q.qtype
    # All factors are powers of two, so scaling the scale rounds as scaling the values does.
    assert jnp.array_equal(out.dequantize(), view(q.dequantize()))
    assert out.dequantize().dtype == view(q.dequantize()).dtype


@pytest.mark.parametrize("name", NO_VIEWS)
def test_what_is_no_view_is_not_taken_for_one(name):
    q = jqx.QTensor.quantize(normal(0, 6, 4), jqx.QSpec(jnp.int8))
    with pytest.raises(NotImplementedError):
        evaluate(NO_VIEWS[name], q)
