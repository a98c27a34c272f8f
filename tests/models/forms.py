"""Functions that contract inside every control-flow form, and the same with quantization by hand.

Each is written for any product `dot(x, w)`. Its numbers are multiples of powers of two with so few
bits that float32 holds every sum, in any order: what is quantized by hand gives the same bits.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jqx

from ..arrays import on_device

LAYERS, K, ROWS = 2, 6, 4
STEP = 2.0**-2
"""The scale of activations: codes of 8 bits reach 31.75."""

ACTIVATION = jqx.QSpec(jnp.int8, calibrator=jqx.calibrators.fixed(-127 * STEP, 127 * STEP))
WEIGHT = jqx.QSpec(jnp.int4, jqx.per_channel())
POLICIES = {
    "weights": jqx.Policy([jqx.Rule(weight=WEIGHT)]),
    "weights and activations": jqx.Policy([jqx.Rule(weight=WEIGHT, activation=ACTIVATION)]),
}


def weights():
    """A stack [layers, K, K]: codes of 4 bits times 1/4, and less than half a step beside."""
    rng = np.random.default_rng(0)
    codes = rng.integers(-7, 8, (LAYERS, K, K)).astype(np.float32)
    codes[:, 0] = 7  # the largest of each channel: its scale is 1/4
    beside = rng.integers(-3, 4, codes.shape) / 8
    beside[:, 0] = 0
    return on_device(
        (codes + np.where(np.abs(codes) == 7, -np.abs(beside) * np.sign(codes), beside)) / 4
    )


def rows(*lead):
    """Activations [..., rows, K]: multiples of 1/8 in [-1, 1]."""
    rng = np.random.default_rng(1)
    return on_device(rng.integers(-8, 9, (*lead, ROWS, K)) / 8, jnp.float32)


def matmul(x, w):
    return x @ w


def by_hand(quantized):
    """A product whose left operand is quantized first, or not."""

    def dot(x, w):
        if quantized:
            x = jqx.quantize_dequantize(x, on_device(STEP, x.dtype), qtype=jnp.int8)
        return x @ w

    return dot


def rounded(w):
    """The weights on their grid, gradients passing straight through (nothing is clipped)."""
    return w + lax.stop_gradient(jnp.round(w * 4) / 4 - w)


def act(x):
    """Keeps numbers small."""
    return jnp.clip(x, -2, 2)


def scan_xs(dot, w, x):
    return lax.scan(lambda c, w: (act(dot(c, w)), c), x, w)


def scan_constant(dot, w, x):
    return lax.scan(lambda c, _: (act(dot(c, w[0])), None), x, length=2)[0]


def scan_carried(dot, w, x):
    def step(carry, _):
        c, w = carry
        return (act(dot(c, w[1])), w), c.sum(axis=0)

    (c, _), sums = lax.scan(step, (x, w), length=2, reverse=True)
    return c, sums


def scan_of_rows(dot, w, x):
    return lax.scan(lambda c, row: (c + row.sum(), dot(row[None], w[0])), x[0, 0], x)


def scan_in_scan(dot, w, x):
    def outer(c, _):
        return lax.scan(lambda c, w: (act(dot(c, w)), None), c, w[:1])[0], None

    return lax.scan(outer, x, length=2)[0]


def stacks_in_scan(dot, w, x):
    def outer(c, w):
        return lax.scan(lambda c, w: (act(dot(c, w)), None), c, w)[0], None

    return lax.scan(outer, x, jnp.reshape(w, (2, 1, K, K)))[0]


def while_constant(dot, w, x):
    def step(carry):
        i, c = carry
        return i + 1, act(dot(c, w[0]))

    return lax.while_loop(lambda carry: carry[0] < 2, step, (0, x))[1]


def while_carried(dot, w, x):
    def step(carry):
        i, c, w = carry
        return i + 1, act(dot(c, w[1])), w

    return lax.while_loop(lambda carry: carry[0] < 2, step, (0, x, w))[1]


def fori(dot, w, x):
    return lax.fori_loop(0, 2, lambda i, c: act(dot(c, w[0])), x)


def fori_indexed(dot, w, x):
    return lax.fori_loop(0, 2, lambda i, c: act(dot(c, w[i])), x)


def cond(dot, w, x):
    return lax.cond(x[0, 0] > 9, lambda: dot(x, w[0]), lambda: -dot(x, w[1]))


def switch(dot, w, x):
    branches = [lambda w, x: dot(x, w[0]), lambda w, x: x, lambda w, x: dot(x, w[1]) + 1]
    return lax.switch(2, branches, w, x)


def mapped(dot, w, x):
    return lax.map(lambda row: dot(row[None], w[0])[0], x)


def remat(dot, w, x):
    layer = jax.checkpoint(lambda w, x: act(dot(x, w)))
    return layer(w[1], layer(w[0], x))


def remat_in_scan(dot, w, x):
    return lax.scan(jax.checkpoint(lambda c, w: (act(dot(c, w)), None)), x, w)[0]


def jitted(dot, w, x):
    layer = jax.jit(lambda w, x: act(dot(x, w)))
    return layer(w[1], layer(w[0], x))


def vmapped(dot, w, x):
    return jax.vmap(lambda w: dot(x, w))(w)


def cond_in_scan(dot, w, x):
    def step(c, w):
        return lax.cond(c[0, 0] > 0, lambda: act(dot(c, w)), lambda: act(-dot(c, w))), None

    return lax.scan(step, x, w)[0]


def while_in_scan(dot, w, x):
    def step(c, w):
        done = lax.while_loop(lambda s: s[0] < 1, lambda s: (s[0] + 1, act(dot(s[1], w))), (0, c))
        return done[1], None

    return lax.scan(step, x, w)[0]


def scan_in_while(dot, w, x):
    def step(state):
        i, c = state
        return i + 1, lax.scan(lambda c, w: (act(dot(c, w)), None), c, w)[0]

    return lax.while_loop(lambda state: state[0] < 1, step, (0, x))[1]


def scan_in_cond(dot, w, x):
    def run():
        return lax.scan(lambda c, w: (act(dot(c, w)), None), x, w)[0]

    return lax.cond(x[0, 0] > 9, lambda: x, run)


def associative_scan(dot, w, x):
    y = dot(x, w[0])
    return lax.associative_scan(jnp.add, y, axis=0)


def associative_scan_of_products(dot, w, x):
    return lax.associative_scan(lambda a, b: act(dot(a + b, w[0])), x, axis=0)


def custom_jvp(dot, w, x):
    @jax.custom_jvp
    def f(w, x):
        return dot(x, w)

    @f.defjvp
    def rule(primals, tangents):
        (w, x), (dw, dx) = primals, tangents
        return f(w, x), 2 * (dx @ w + x @ dw)

    return f(w[0], x)


def custom_vjp(dot, w, x):
    @jax.custom_vjp
    def f(w, x):
        return dot(x, w)

    f.defvjp(lambda w, x: (f(w, x), (w, x)), lambda kept, y: (2 * kept[1].T @ y, 2 * y @ kept[0].T))
    return f(w[0], x)


def custom_vmap(dot, w, x):
    """A function with a rule for `vmap` has no derivative in reverse unless it gets one."""

    def product(w, x):
        return dot(x, w)

    mapped = jax.custom_batching.custom_vmap(product)

    @mapped.def_vmap
    def rule(size, batched, w, x):
        axes = [0 if x else None for x in batched]
        return jax.vmap(product, axes, axis_size=size)(w, x), True

    return custom_vjp(lambda x, w: mapped(w, x), w, x)


WHILES = (while_constant, while_carried, while_in_scan, scan_in_while)
"""Without a derivative in reverse."""

ALL = (
    *(scan_xs, scan_constant, scan_carried, scan_of_rows, scan_in_scan, stacks_in_scan),
    *WHILES,
    *(fori, fori_indexed, cond, switch, mapped, remat, remat_in_scan, jitted, vmapped),
    *(
        cond_in_scan,
        scan_in_cond,
        associative_scan,
        associative_scan_of_products,
        custom_jvp,
        custom_vjp,
        custom_vmap,
    ),
)
FORMS = {f.__name__: f for f in ALL}
UNTAKEN = ("cond", "switch", "cond_in_scan")
"""With a site that is not reached: its scale cannot be calibrated."""


def function(name):
    """A form over plain products."""
    return functools.partial(FORMS[name], matmul)


def together(*functions):
    """What several functions return of the same arguments, as one compiled program."""
    return jax.jit(lambda *args: [f(*args) for f in functions])


def gradients(*functions):
    """The gradients of several functions in their first two arguments, of one program."""

    def gradient(f):
        total = lambda *args: sum(jnp.sum(y) for y in jax.tree.leaves(f(*args)))  # noqa: E731
        return jax.grad(total, (0, 1))

    return together(*map(gradient, functions))


def reference(name, policy):
    """The same with quantization by hand."""
    dot = by_hand(policy != "weights")
    return lambda w, x: FORMS[name](dot, rounded(w), x)
