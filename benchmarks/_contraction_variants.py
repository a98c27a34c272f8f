"""Contractions in JAX, ready to be timed: XLA's own, and jqx and qwix in one scheme."""

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from _contraction_problems import (
    Attention,
    Conv,
    NotAvailable,
    Problem,
    Product,
    Variant,
    Variants,
)
from _harness import Call
from jax import lax

import jqx

NN = (((1,), (0,)), ((), ()))
NT = (((1,), (1,)), ((), ()))
QK = (((2,), (2,)), ((0,), (0,)))
PV = (((2,), (1,)), ((0,), (0,)))
NHWC = ("NHWC", "HWIO", "NHWC")


def compiled(f: Callable[..., Any], *args: Any) -> Call:
    """Returns a call of `f` under jit. Flattening the arguments in Python is left out of it: where
    this matters, a program has many contractions under one jit.
    """
    leaves, tree = jax.tree.flatten(args)
    jitted = jax.jit(lambda *leaves: f(*jax.tree.unflatten(tree, leaves)))
    return lambda: jax.block_until_ready(jitted(*leaves))


class Arithmetic(NamedTuple):
    """How one library quantizes and contracts.

    Attributes:
      quantize: takes an array, its axes that have a scale of their own, and keywords `qtype`,
        `blocks` (axis to size) and `symmetric`.
      dot: as `lax.dot_general`.
      conv: as `lax.conv_general_dilated`.
    """

    quantize: Callable[..., Any]
    dot: Callable[..., jax.Array]
    conv: Callable[..., jax.Array]


def _jqx() -> Arithmetic:
    def quantize(
        x: jax.Array,
        own: tuple[int, ...],
        qtype: Any = jnp.int8,
        blocks: Mapping[int, int] | None = None,
        symmetric: bool = True,
    ) -> jqx.QTensor:
        sizes = dict.fromkeys(own, 1) | dict(blocks or {})
        granularity = jqx.per_block(sizes) if sizes else jqx.per_tensor()
        calibrator = jqx.calibrators.absmax if symmetric else jqx.calibrators.minmax
        spec = jqx.QSpec(qtype, granularity, symmetric=symmetric, calibrator=calibrator)
        return jqx.QTensor.quantize(x, spec)

    conv = getattr(jqx, "conv_general_dilated", _no_conv)
    return Arithmetic(quantize, jqx.dot_general, conv)


def _no_conv(*_: Any, **__: Any) -> jax.Array:
    raise NotAvailable("jqx has no conv_general_dilated yet")


def _qwix() -> Arithmetic:
    qwix = import_module("qwix")

    def quantize(
        x: jax.Array,
        own: tuple[int, ...],
        qtype: Any = jnp.int8,
        blocks: Mapping[int, int] | None = None,
        symmetric: bool = True,
    ) -> Any:
        how = "absmax" if symmetric else "minmax"
        return qwix.quantize(
            x, qtype, channelwise_axes=own, tiled_axes=blocks, calibration_method=how
        )

    return Arithmetic(quantize, qwix.dot_general, qwix.conv_general_dilated)


def jax_variants(problem: Problem, x: np.ndarray, w: np.ndarray) -> Variants:
    """Yields XLA's float32 first: it is what the others are compared with."""
    match problem:
        case Product():
            yield from _products(problem, jnp.asarray(x), jnp.asarray(w))
        case Conv():
            yield from _convs(problem, jnp.asarray(x), jnp.asarray(w))
        case Attention():
            yield from _attentions(problem, jnp.asarray(x), jnp.asarray(w))


def _read(count: int) -> Variant:
    """The time to read as many bytes."""
    make = partial(compiled, jnp.max, jnp.ones(count, jnp.int8))
    return Variant(f"XLA, read of {count / 1e6:.2f} MB", make, bare=True)


def _dot(numbers: Any, dtype: Any) -> Callable[..., jax.Array]:
    return partial(lax.dot_general, dimension_numbers=numbers, preferred_element_type=dtype)


def _int8(*shape: int) -> jax.Array:
    codes = np.random.default_rng(0).integers(-127, 128, shape, np.int8)
    return jnp.asarray(codes)


def _s8_dot(m: int, k: int, n: int) -> Variants:
    dot = partial(compiled, _dot(NN, jnp.int32), _int8(m, k), _int8(k, n))
    yield Variant("XLA, s8 dot to int32, [K,N]", dot, bare=True)
    dot = partial(compiled, _dot(NT, jnp.int32), _int8(m, k), _int8(n, k))
    yield Variant("XLA, s8 dot to int32, [N,K]", dot, bare=True)


def _products(p: Product, x: jax.Array, w: jax.Array) -> Variants:
    float32, weight_only = _dot(NN, jnp.float32), p.scheme == "weight-only"
    yield Variant("XLA float32, [K,N]", partial(compiled, float32, x, w))
    if p.m == 1 or weight_only:
        yield Variant("XLA float32, [N,K]", partial(compiled, _dot(NT, jnp.float32), x, w.T))
    halves = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
    yield Variant("XLA bfloat16", partial(compiled, float32, *halves))
    if weight_only:
        yield Variant("naive, dequantized first", partial(_naive, p, x, w))
    if p.m == 1:
        yield _read(p.weight_bytes)
    else:
        yield from _s8_dot(p.m, p.k, p.n)
    if p.scheme == "asymmetric":
        for form, codes in {
            "symmetric": {},
            "int8 zero points": {"symmetric": False},
            "uint8 zero points": {"symmetric": False, "qtype": jnp.uint8},
        }.items():
            for name, lay in _layouts(8).items():
                variant = f"jqx, {form}" + (f", {name}" if name != "[K,N]" else "")
                yield Variant(variant, partial(_product, p, _jqx, x, w, lay, **codes))
            yield Variant(f"qwix, {form}", partial(_product, p, _qwix, x, w, **codes))
        return
    for form, lay in _layouts(p.bits).items():
        yield Variant(f"jqx, {form}", partial(_product, p, _jqx, x, w, lay))
    yield Variant("qwix", partial(_product, p, _qwix, x, w))


def _layouts(bits: int) -> dict[str, Callable[[Any], Any]]:
    """How jqx can lay out a weight."""
    layouts = {"[K,N]": lambda q: q, "pack_for": _pack_for}
    if bits < 8:
        layouts |= {"packed along N": lambda q: q.pack(1), "packed along K": lambda q: q.pack(0)}
    return layouts


def _pack_for(q: Any) -> Any:
    if not hasattr(q, "pack_for"):
        raise NotAvailable("QTensor has no pack_for yet")
    return q.pack_for("cpu")


def _naive(p: Product, x: jax.Array, w: jax.Array) -> Call:
    return compiled(lambda x, q: lax.dot_general(x, q.dequantize(), NN), x, _weight(p, _jqx(), w))


def _weight(p: Product, a: Arithmetic, w: jax.Array, **codes: Any) -> Any:
    codes = {"qtype": jnp.int8 if p.bits == 8 else jnp.int4} | codes
    return a.quantize(w, (1,), blocks={0: p.block} if p.block else None, **codes)


def _product(
    p: Product,
    library: Callable[[], Arithmetic],
    x: jax.Array,
    w: jax.Array,
    lay: Callable[[Any], Any] = lambda q: q,
    **codes: Any,
) -> Call:
    a = library()
    weight = lay(_weight(p, a, w, **codes))
    if p.scheme == "weight-only":
        return compiled(lambda x, w: a.dot(x, w, NN), x, weight)
    if p.scheme == "dynamic":
        return compiled(lambda x, w: a.dot(a.quantize(x, (0,)), w, NN), x, weight)
    return compiled(lambda x, w: a.dot(x, w, NN), a.quantize(x, (), **codes), weight)


def _convs(p: Conv, x: jax.Array, w: jax.Array) -> Variants:
    options: dict[str, Any] = {"window_strides": (1, 1), "padding": "SAME"}
    options |= {"dimension_numbers": NHWC, "feature_group_count": p.groups}
    float32 = partial(lax.conv_general_dilated, **options)
    int32 = partial(float32, preferred_element_type=jnp.int32)
    yield Variant("XLA float32", partial(compiled, float32, x, w))
    codes = _int8(*x.shape), _int8(*w.shape)
    yield Variant("XLA, s8 conv to int32", partial(compiled, int32, *codes), bare=True)
    if p.depthwise:
        yield Variant("XLA shifted float32", partial(compiled, _shifted, x, w))
        yield _read(x.size * 5 + w.size)  # codes in, float32 out
    else:
        yield from _s8_dot(x.size // p.channels, w.size // p.channels, p.channels)

    def make(library: Callable[[], Arithmetic]) -> Call:
        a = library()
        return compiled(
            lambda x, w: a.conv(x, w, **options), a.quantize(x, ()), a.quantize(w, (3,))
        )

    yield Variant("jqx", partial(make, _jqx))
    yield Variant("qwix", partial(make, _qwix))


def _shifted(x: jax.Array, w: jax.Array) -> jax.Array:
    """A depthwise convolution as the sum of shifted images, each times one tap."""
    side, size = x.shape[1], w.shape[0]
    before = (size - 1) // 2
    spatial = (before, size - 1 - before)
    padded = jnp.pad(x, ((0, 0), spatial, spatial, (0, 0)))
    taps = [(i, j) for i in range(size) for j in range(size)]
    images = [padded[:, i : i + side, j : j + side] * w[i, j] for i, j in taps]
    return sum(images[1:], images[0])


def _attentions(p: Attention, x: jax.Array, w: jax.Array) -> Variants:
    def float32(lhs: jax.Array, rhs: jax.Array, numbers: Any) -> jax.Array:
        return lax.dot_general(lhs, rhs, numbers)

    def make(library: Callable[[], Arithmetic], quantized: bool, lay: Any = lambda q: q) -> Call:
        a = library()
        dot = partial(_dynamic_dot, a)
        products = dot if quantized else float32
        weights = [lay(a.quantize(matrix, (1,))) for matrix in w]
        return compiled(lambda x, w: _attention(x, w, p.heads, dot, products), x, weights)

    whole = partial(_attention, heads=p.heads, dot=float32, products=float32)
    yield Variant("XLA float32", partial(compiled, whole, x, list(w)))
    yield Variant("XLA, its s8 dots to int32", partial(_attention_dots, p), bare=True)
    for form, quantized in {"float products": False, "int8 products": True}.items():
        yield Variant(f"jqx, {form}", partial(make, _jqx, quantized))
        yield Variant(f"jqx, {form}, pack_for", partial(make, _jqx, quantized, _pack_for))
        yield Variant(f"qwix, {form}", partial(make, _qwix, quantized))


def _dynamic_dot(a: Arithmetic, lhs: jax.Array, rhs: Any, numbers: Any) -> jax.Array:
    """Contracts what is still in float32 with a scale for each index that the result keeps."""

    def quantize(x: Any, contracted: tuple[int, ...]) -> Any:
        own = tuple(axis for axis in range(x.ndim) if axis not in contracted)
        return a.quantize(x, own) if isinstance(x, jax.Array) else x

    (left, right), _ = numbers
    return a.dot(quantize(lhs, left), quantize(rhs, right), numbers)


def _attention(x: jax.Array, w: list[Any], heads: int, dot: Any, products: Any) -> jax.Array:
    length, width = x.shape
    q, k, v = (dot(x, m, NN).reshape(length, heads, -1).transpose(1, 0, 2) for m in w[:3])
    scores = products(q, k, QK) / np.float32(np.sqrt(width // heads))
    y = products(jax.nn.softmax(scores, axis=-1), v, PV)
    return dot(y.transpose(1, 0, 2).reshape(length, width), w[3], NN)


def _attention_dots(p: Attention) -> Call:
    x, w, depth = _int8(p.length, p.width), _int8(4, p.width, p.width), p.width // p.heads
    q, s = _int8(p.heads, p.length, depth), _int8(p.heads, p.length, p.length)

    def dots(x: jax.Array, w: list[jax.Array], q: jax.Array, s: jax.Array) -> list[jax.Array]:
        projections = [_dot(NN, jnp.int32)(x, matrix) for matrix in w]
        return [*projections, _dot(QK, jnp.int32)(q, q), _dot(PV, jnp.int32)(s, q)]

    return compiled(dots, x, list(w), q, s)
