"""Attention of one query over caches, plain and by kernels step by step, against NumPy."""

import functools
import itertools
import math
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import jqx
from jqx._src.caches import decode_attention
from jqx._src.caches.decode_attention import cached
from jqx._src.diagnostics import lowering as targets

from ..arrays import on_device

RNG = np.random.default_rng(0)
KERNELS = ("tpu", "gpu")
SPREAD = 2.0**-9
"""How far a probability of bfloat16 may be off."""

TOKEN, TOKENS, CHANNEL, HEAD, ONE = (0, 1, 2), (0, 1), (0, 2, 3), (2,), ()
"""Axes that have scales: of each token and head, of tokens, of channels, of heads, of all."""


class Case(NamedTuple):
    """A cache, its queries and what is asked of it."""

    dtype: str = "int8"
    axes: tuple[int, ...] = TOKEN
    length: int = 150
    heads: int = 8
    groups: int = 1
    width: int = 128
    lengths: tuple[int, ...] = (0, 1, 77, 128, 150)
    window: int | None = None
    floats: str = "float32"
    value_width: int = 0
    symmetric: bool = True

    def __str__(self):
        changed = {k: v for k, v in self._asdict().items() if v != Case._field_defaults[k]}
        return "-".join(f"{k}={v}" for k, v in changed.items()) or "default"


def normal(*shape, dtype=jnp.float32):
    return on_device(RNG.normal(size=shape), dtype)


def quantized(x, case):
    granularity = jqx.per_axis(*case.axes) if case.axes else jqx.per_tensor()
    calibrator = jqx.calibrators.absmax if case.symmetric else jqx.calibrators.minmax
    spec = jqx.QSpec(getattr(jnp, case.dtype), granularity, case.symmetric, calibrator)
    return jqx.QTensor.quantize(x, spec)


def made(case):
    batch, wide = len(case.lengths), case.value_width or case.width
    shape = batch, case.length, case.heads
    keys, values = normal(*shape, case.width), normal(*shape, wide)
    if case.dtype != "float32":
        keys, values = quantized(keys + 0.25, case), quantized(values, case)
    q = normal(batch, case.heads * case.groups, case.width, dtype=getattr(jnp, case.floats)) * 2
    return q, keys, values, on_device(case.lengths, jnp.int32)


def real(x):
    return np.asarray(x.dequantize() if isinstance(x, jqx.QTensor) else x, np.float64)


def oracle(q, keys, values, lengths, window=None, scale=None):
    q, k, v = np.asarray(q, np.float64), real(keys), real(values)
    factor = q.shape[2] ** -0.5 if scale is None else scale
    result = np.zeros((*q.shape[:2], v.shape[3]))
    group = q.shape[1] // k.shape[2]
    for b, h in itertools.product(*map(range, q.shape[:2])):
        stop = min(int(lengths[b]), k.shape[1])
        tokens = slice(0 if window is None else max(stop - window, 0), stop)
        products = k[b, tokens, h // group] @ q[b, h] * factor
        if stop:
            parts = np.exp(products - products.max())
            result[b, h] = parts / parts.sum() @ v[b, tokens, h // group]
    return result


def close(result, expected, floats="float32", largest=2.0):
    """Sums of float32 differ by how they are ordered: a few hundred roundings; queries of 16 bits
    have results of 16 bits, from probabilities of as many. Each is rounded to 2**-8 of itself in
    bfloat16, so both are off by 2**-7 of the largest value at most.
    """
    allowed = 2.0**-15 if floats == "float32" else 2.0**-7 * largest
    difference = np.abs(np.asarray(result, np.float64) - np.asarray(expected, np.float64))
    assert difference.max() < allowed, difference.max()


def by_kernel(kernel, q, keys, values, lengths, window=None):
    """A kernel on any platform, or `None` where it does not take such a cache."""
    caches = [cached("test", "cache", x, jnp.float32) for x in (keys, values)]
    if not decode_attention.is_taken(kernel, *caches):
        return None
    stops = jnp.clip(lengths, 0, caches[0].codes.shape[1])
    starts = jnp.zeros_like(stops) if window is None else jnp.maximum(stops - window, 0)
    run = functools.partial(
        decode_attention.kernel_attention,
        decode_attention.KERNELS[kernel],
        scale=q.shape[2] ** -0.5,
        window=window,
        interpret=True,
    )
    return jax.jit(run)(q, *caches, starts, stops)


PLAIN = [
    Case("float32", groups=2, width=16, heads=2),
    Case(width=16, heads=2, groups=2),
    Case("int4", CHANNEL, width=16, heads=2, value_width=24),
    Case("int8", ONE, width=16, heads=1, groups=4, symmetric=False),
    Case("int8", TOKENS, width=16, heads=2, symmetric=False, window=9),
    Case("int4", CHANNEL, width=16, heads=2, symmetric=False),
    Case("float8_e4m3fn", HEAD, width=16, heads=2, floats="bfloat16"),
    Case(width=8, heads=2, length=2500, lengths=(2500, 1024, 1025, 3), window=1100),
]


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_attention_is_that_of_numpy(case):
    args = made(case)
    result = jax.jit(functools.partial(jqx.decode_attention, window=case.window))(*args)
    assert result.dtype == args[0].dtype
    close(result, oracle(*args, case.window), case.floats)


FEW = [
    Case(length=1100, lengths=(1100, 513, 0, 5), groups=4),
    Case("int4", length=700, lengths=(700, 600, 2), window=30, groups=2),
    Case("float8_e4m3fn", CHANNEL, heads=1, groups=8, width=64),
    Case("float8_e5m2", TOKENS, heads=4, width=128, floats="bfloat16"),
    Case("int8", CHANNEL, heads=2, groups=3, width=80, symmetric=False, value_width=64),
    Case("int4", symmetric=False, heads=8, groups=2),
]
DTYPES = ("int8", "int4", "float8_e4m3fn", "float8_e5m2")
HEADS = ((8, 1), (8, 4), (1, 8), (4, 2), (16, 1), (32, 1), (2, 8))
SHAPES = ((8, 4, 128), (4, 2, 128), (1, 8, 128), (8, 1, 64))


def alternately(*parts):
    """Half of the combinations of values: those whose places have an even sum."""
    numbered = itertools.product(*map(enumerate, parts))
    return [[x for _, x in values] for values in numbered if sum(i for i, _ in values) % 2 == 0]


WIDE = [
    *(
        Case(heads=heads, groups=groups, width=width)
        for (heads, groups), width in alternately(HEADS, (64, 80, 128, 256))
    ),
    *(
        Case(dtype, axes, heads=heads, groups=groups, width=width)
        for dtype, axes, (heads, groups, width) in alternately(DTYPES, (TOKEN, CHANNEL), SHAPES)
    ),
    *(
        Case(dtype, axes, length, window=window, lengths=(length, 600, 129, 0), floats=floats)
        for (dtype, floats), (axes, length, window) in alternately(
            tuple(zip(DTYPES, ("bfloat16", "float16", "float32", "bfloat16"), strict=True)),
            ((TOKENS, 1100, None), (ONE, 1100, 520), (TOKENS, 640, 1)),
        )
    ),
    Case(width=192, value_width=128, heads=8),
    Case(width=128, value_width=256, heads=8),
    Case(length=1, lengths=(1, 0)),
    *(
        Case(dtype, axes, heads=heads, groups=4, width=width, floats=floats, symmetric=False)
        for dtype, (axes, heads, width), floats in alternately(
            ("int8", "uint8", "int4", "uint4"),
            ((TOKEN, 8, 128), (TOKENS, 1, 128), (ONE, 4, 64)),
            ("float32", "bfloat16"),
        )
    ),
]


def check_kernel(kernel, case):
    args = made(case)
    result = by_kernel(kernel, *args, case.window)
    if result is not None:
        assert result.dtype == args[0].dtype
        largest = np.abs(real(args[2])).max()
        close(result, oracle(*args, case.window), case.floats, largest)
    return result is not None


@pytest.mark.many("kernel")
@pytest.mark.parametrize("case", FEW, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_is_attention_of_numpy(kernel, case):
    assert check_kernel(kernel, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", WIDE, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_is_attention_of_numpy_for_any_shape(kernel, case):
    check_kernel(kernel, case)


@pytest.mark.parametrize("kernel", ["", *KERNELS])
def test_what_is_not_looked_at_changes_nothing_not_even_nan(kernel):
    case = Case("float8_e4m3fn", length=600, lengths=(520, 3), window=7)
    q, keys, values, lengths = made(case)
    outside = np.arange(600) >= np.array(case.lengths)[:, None]
    outside |= np.arange(600) < np.array(case.lengths)[:, None] - 7
    outside = on_device(outside[:, :, None, None])

    def spoiled(x):
        return jax.tree.map(lambda leaf: jnp.where(outside, jnp.nan, leaf).astype(leaf.dtype), x)

    args = q, spoiled(keys), spoiled(values), lengths
    run = functools.partial(by_kernel, kernel) if kernel else jqx.decode_attention
    close(run(*args, window=7), oracle(q, keys, values, lengths, 7))


def test_the_gradient_is_that_of_floats_and_does_not_see_what_is_behind():
    case = Case(heads=2, groups=2, width=16, lengths=(0, 20, 150))
    q, keys, values, lengths = made(case)
    spoiled = keys.scale.at[1, 20:].set(jnp.nan)
    is_held = jnp.arange(150)[None, :, None, None] < lengths[:, None, None, None]

    def of(q, scale, k=keys):
        k = jqx.QTensor(k.values, scale, qtype=k.qtype)
        return jnp.sum(jnp.sin(jqx.decode_attention(q, k, values, lengths)))

    def by_hand(q, scale):
        k = keys.values.astype(jnp.float32) * scale
        k, v = (jnp.repeat(x, 2, axis=2) for x in (k, values.dequantize()))
        products = jnp.einsum("bhw,blhw->blh", q, k)[..., None] / 4
        weights = jnp.where(is_held, jnp.exp(products), 0)
        total = weights.sum(1)
        mean = (weights * v).sum(1) / jnp.where(total == 0, 1, total)
        return jnp.sum(jnp.sin(mean))

    gradients = jax.jit(jax.grad(of, (0, 1)))(q, spoiled)
    for gradient, expected in zip(
        gradients, jax.jit(jax.grad(by_hand, (0, 1)))(q, keys.scale), strict=True
    ):
        np.testing.assert_allclose(gradient, expected, rtol=2e-4, atol=1e-5)


@pytest.fixture(params=KERNELS)
def kernel_layout(request, monkeypatch):
    """Caches that are laid out for a kernel; on this platform the other form is what runs."""
    monkeypatch.setattr(decode_attention, "kernel_of", lambda *cache: request.param)
    return request.param


SMALL = Case(heads=2, groups=2, width=64, lengths=(150, 7))


def test_an_array_that_is_laid_out_for_a_kernel_gives_the_same_with_its_gradient(kernel_layout):
    q, keys, values, lengths = made(SMALL)
    caches = [cached("test", "cache", x, jnp.float32) for x in (keys, values)]
    forms = [
        lambda q: jqx.decode_attention(q, keys, values, lengths),
        lambda q: decode_attention.plain_attention(
            q, *caches, jnp.zeros_like(lengths), lengths, scale=0.125
        ),
    ]
    text = str(jax.make_jaxpr(forms[0])(q))
    assert "jqx_decode_attention" in text
    results = [jax.jit(jax.value_and_grad(lambda q, f=f: jnp.sum(jnp.sin(f(q)))))(q) for f in forms]
    for result, expected in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-6)


def test_vmap_makes_more_sequences_of_it_and_scan_steps_over_them(kernel_layout):
    q, keys, values, lengths = made(SMALL)
    expected = jqx.decode_attention(q, keys, values, lengths)
    args = jax.tree.map(lambda x: jnp.stack([x, x]), (q, keys, values, lengths))
    run = jax.jit(jax.vmap(jqx.decode_attention))
    np.testing.assert_allclose(run(*args), jnp.stack([expected] * 2), atol=1e-6)
    over_one_cache = jax.vmap(jqx.decode_attention, (0, None, None, None))
    result = jax.jit(over_one_cache)(args[0], keys, values, lengths)
    np.testing.assert_allclose(result, jnp.stack([expected] * 2), atol=1e-6)
    _, result = jax.lax.scan(lambda n, x: (n, jqx.decode_attention(*x)), 0, args)
    np.testing.assert_allclose(result, jnp.stack([expected] * 2), atol=1e-6)


def test_devices_take_sequences_and_heads_each(kernel_layout):
    q, keys, values, lengths = made(SMALL)
    mesh = jax.make_mesh((2, 2), ("b", "h"), axis_types=(AxisType.Auto,) * 2)
    cache = jax.tree.map(lambda x: PartitionSpec("b", None, "h"), keys)
    of_queries, of_lengths = PartitionSpec("b", "h"), PartitionSpec("b")
    run = jax.shard_map(
        jqx.decode_attention,
        mesh=mesh,
        in_specs=(of_queries, cache, cache, of_lengths),
        out_specs=of_queries,
    )
    result = jax.jit(run)(q, keys, values, lengths)
    np.testing.assert_allclose(result, jqx.decode_attention(q, keys, values, lengths), atol=1e-6)


OTHER_SCALES = [
    jqx.QSpec(jnp.int8, jqx.per_block({0: 1, 1: 16, 2: 1, 3: 1})),
    jqx.QSpec(jnp.int8, jqx.per_block({0: 1, 1: 16, 2: 1, 3: 16})),
    jqx.QSpec(jqx.numerics.nf4, jqx.per_block({3: 32})),
    jqx.QSpec(jnp.int4, jqx.per_block({1: 16})),
    jqx.QSpec(jnp.int8, jqx.per_block({0: 2, 1: 1, 2: 1}), symmetric=False),
    jqx.QSpec(jnp.int8, jqx.per_block({0: 2, 3: 1}), symmetric=False),
]
"""In blocks of tokens, of channels or of sequences."""


def test_other_scales_are_multiplied_first():
    keys, values = (normal(4, 64, 2, 32) for _ in range(2))
    q, lengths = normal(4, 4, 32), on_device([64, 10, 3, 1], jnp.int32)
    for spec in OTHER_SCALES:
        cache = [jqx.QTensor.quantize(x, spec) for x in (keys, values)]
        result = jqx.decode_attention(q, *cache, lengths)
        close(result, oracle(q, *cache, lengths))
        real = jqx.decode_attention(q, *(x.dequantize() for x in cache), lengths)
        np.testing.assert_allclose(result, real, rtol=1e-5, atol=1e-5, err_msg=str(spec))


def test_a_cache_is_written_and_read_token_by_token():
    spec = jqx.QSpec(jnp.int8, jqx.per_axis(0, 1, 2))
    tokens = normal(8, 2, 1, 2, 16)

    def step(cache, x):
        cache, length = cache
        cache = jqx.dynamic_update_slice(cache, x, (0, length, 0, 0))
        y = jqx.decode_attention(x[:, 0], cache, cache, jnp.full(2, length + 1))
        return (cache, length + 1), y

    empty = jqx.QTensor.zeros((2, 20, 2, 16), spec)
    (cache, _), results = jax.lax.scan(step, (empty, jnp.int32(0)), tokens)
    for i in range(8):
        close(results[i], oracle(tokens[i, :, 0], cache, cache, [i + 1] * 2))


def test_a_scale_of_products_is_taken_and_no_tokens_give_zeros():
    q, keys, values, lengths = made(Case("float32", width=16, heads=2, lengths=(0, 9)))
    result = jqx.decode_attention(q, keys, values, lengths, scale=0.5)
    close(result, oracle(q, keys, values, lengths, scale=0.5))
    empty = jqx.decode_attention(q, keys[:, :0], values[:, :0], lengths)
    assert empty.shape == q.shape and not empty.any()


GOOD = (jnp.zeros((2, 4, 8)), jnp.zeros((2, 6, 2, 8)), jnp.zeros((2, 6, 2, 8)), np.ones(2, int))


REFUSED = [
    ({0: jnp.zeros((2, 4, 8), int)}, {}, TypeError, "`q` element type"),
    ({1: jnp.zeros((2, 6, 2, 8), jnp.int8)}, {}, TypeError, "`keys` element type"),
    ({0: jnp.zeros((2, 3, 8))}, {}, ValueError, "do not fit each other"),
    ({0: jnp.zeros((2, 1, 4, 8))}, {}, ValueError, "do not fit each other"),
    ({2: jnp.zeros((2, 5, 2, 8))}, {}, ValueError, "do not fit each other"),
    ({3: jnp.ones(2)}, {}, TypeError, "`lengths` are not integers"),
    ({3: np.ones((2, 1), int)}, {}, ValueError, "`lengths` of shape .* do not fit the batch"),
    ({}, {"window": 0}, ValueError, "`window` == 0 is not positive"),
    ({}, {"window": 1.5}, TypeError, "`window` must be an integer"),
    ({}, {"scale": "1"}, TypeError, "`scale` is not a number"),
    ({}, {"size": 1}, TypeError, "unexpected keyword argument 'size'"),
]


def test_what_does_not_fit_is_reported():
    for change, options, error, problem in REFUSED:
        args = [change.get(i, x) for i, x in enumerate(GOOD)]
        with pytest.raises(error, match=rf"^jqx.decode_attention: .*{problem}[^$]*fix:"):
            jqx.decode_attention(*args, **options)


def test_a_permuted_cache_is_refused():
    keys = quantized(GOOD[1], Case(axes=ONE))
    order = jnp.arange(8, dtype=jnp.int32).reshape(1, 1, 1, 8)
    turned = jqx.QTensor(keys.values, keys.scale, qtype=jnp.int8, order=order)
    with pytest.raises(ValueError, match="`values` have a float offset or a permuted axis"):
        jqx.decode_attention(GOOD[0], keys, turned, GOOD[3])


TARGETS = {"tpu-v5e": "tpu", "tpu-v6e": "tpu", "tpu7x": "tpu", "h200": "gpu"}
COMPILED = [
    *(
        Case(dtype, length=length, lengths=(1,) * batch, groups=4, floats="bfloat16")
        for dtype in DTYPES
        for batch, length in ((1, 8192), (8, 2048), (64, 8192))
    ),
    Case("int8", length=2000, groups=4, width=64),
    Case("int8", CHANNEL, length=2000, heads=4, groups=8, window=1024, floats="bfloat16"),
    Case("int4", TOKENS, length=2048, heads=1, groups=32, floats="bfloat16"),
    Case("int4", length=2048, heads=2, groups=8, width=256),
    Case("float8_e4m3fn", length=2000, heads=8, width=80, floats="bfloat16"),
    *(
        Case(dtype, length=2048, groups=4, floats="bfloat16", symmetric=False)
        for dtype in ("int8", "uint8", "int4", "uint4")
    ),
]
STAY = ("parameter", "bitcast", "custom-call", "get-tuple-element", "tuple")


def written(hlo, nbytes):
    """The instructions outside of kernels that write as many bytes or more."""
    for line in hlo[hlo.index("\nENTRY") :].splitlines():
        instruction = re.match(r"\s*(?:ROOT )?\S+ = \(?(\w+)\[([\d,]*)\].*? ([\w-]+)\(", line)
        if instruction and instruction[3] not in STAY:
            bits = int(re.sub(r"\D", "", instruction[1][1:].split("e")[0]) or 8)
            if math.prod(int(n) for n in instruction[2].split(",") if n) * bits // 8 >= nbytes:
                yield line.strip()[:120]


@pytest.mark.aot
@pytest.mark.parametrize("case", COMPILED, ids=str)
@pytest.mark.parametrize("target", TARGETS)
def test_a_cache_is_read_as_it_lies(target, case, monkeypatch):
    compiler = targets.TARGETS[target]
    if not any(map(targets._is_installed, compiler.modules)):
        pytest.skip(f"no compiler for {target}: the extra {compiler.extra} is not installed")
    monkeypatch.setattr(decode_attention, "kernel_of", lambda *cache: TARGETS[target])
    shape = len(case.lengths), case.length, case.heads, case.width
    keys = jax.eval_shape(
        functools.partial(quantized, case=case), jax.ShapeDtypeStruct(shape, jnp.float32)
    )
    q = jax.ShapeDtypeStruct(
        (shape[0], case.heads * case.groups, case.width), getattr(jnp, case.floats)
    )
    lengths = jax.ShapeDtypeStruct(shape[:1], jnp.int32)
    run = functools.partial(jqx.decode_attention, window=case.window)
    low = jqx.lowering(run, q, keys, keys, lengths, target=target)
    assert "jqx_decode_attention" in low.hlo
    assert len(re.findall("custom-call", low.hlo)) > 0
    nbytes = math.prod(shape) // (2 if case.dtype == "int4" else 1)
    assert list(written(low.hlo, nbytes // 2)) == []
    assert low.temp_bytes < max(nbytes // 2, 16 << 20)


@pytest.mark.parametrize("target, name", [("tpu", "tpu"), ("tpu-v6e", "tpu"), ("gpu", "gpu")])
def test_a_cache_that_is_made_for_a_target_is_written_and_read_there(target, name):
    spec = jqx.QSpec(jnp.int8, jqx.per_axis(*TOKEN))
    shape = (2, 32, 8, 128)
    caches = [jqx.QTensor.zeros(shape, spec, target=where) for where in (target, None)]
    state = jqx.quantize_state({"k": jnp.zeros(shape)}, {"k": spec}, target=target)["k"]
    assert caches[0].layout == state.layout and state.layout.kernel == name
    new, q = normal(2, 5, 8, 128), normal(2, 16, 128)

    def step(cache, new, q):
        cache = jqx.dynamic_update_slice(cache, new, (0, jnp.int32(3), 0, 0))
        return cache, jqx.decode_attention(q, cache, cache, jnp.array([8, 4]))

    written, result = jax.jit(step)(caches[0], new, q)
    plain, expected = jax.jit(step)(caches[1], new, q)
    assert written.layout == caches[0].layout
    np.testing.assert_array_equal(written.values, plain.values)
    np.testing.assert_array_equal(result, expected)  # on CPU both are the plain form
    traced = str(jax.make_jaxpr(step)(caches[0], new, q))
    assert "pallas_call" in traced
    assert "pallas_call" not in str(jax.make_jaxpr(step)(caches[1], new, q))


@pytest.mark.parametrize("platform, target", [("tpu", "tpu"), ("cuda", "gpu")])
def test_its_kernel_is_not_exported(platform, target):
    cache = jqx.QTensor.zeros(
        (2, 32, 8, 128), jqx.QSpec("int8", jqx.per_axis(*TOKEN)), target=target
    )
    attend = jax.jit(lambda q, c: jqx.decode_attention(q, c, c, jnp.array([8, 4])))
    q = jax.ShapeDtypeStruct((2, 16, 128), jnp.float32)
    with pytest.raises(ValueError, match="a kernel of jqx cannot be exported"):
        jax.export.export(attend, platforms=[platform])(q, cache)
    jax.export.export(attend, platforms=["cpu"])(q, cache)


def test_a_cache_that_no_kernel_reads_is_refused():
    spec = jqx.QSpec(jqx.numerics.nf4, jqx.per_axis(*TOKEN))
    with pytest.raises(ValueError, match=r"QTensor\.zeros: no kernel reads a cache of nf4"):
        jqx.QTensor.zeros((2, 32, 8, 128), spec, target="tpu")
    with pytest.raises(ValueError, match=r"quantize_state: no kernel reads a cache of nf4"):
        jqx.quantize_state({"k": jnp.zeros((2, 3))}, {"k": "nf4:token"}, target="gpu")
    with pytest.raises(ValueError, match="`target` is unknown"):
        jqx.QTensor.zeros((2, 32, 8, 128), "int8", target="cuda")
    assert jqx.QTensor.zeros((2, 32, 8, 128), "int8", target="cpu").layout is None


def decoder(params, x, cache, lengths, window=None):
    batch, width = len(x), x.shape[1]
    q, k, v = (x @ params[name] for name in "qkv")
    put = jax.vmap(lambda c, new, i: jax.lax.dynamic_update_slice_in_dim(c, new, i, 0))
    cache = [
        put(c, new.reshape(batch, 1, 2, -1), lengths) for c, new in zip(cache, (k, v), strict=True)
    ]
    y = jqx.decode_attention(q.reshape(batch, 4, -1), *cache, lengths + 1, window=window)
    return x + y.reshape(batch, width), cache


@pytest.mark.parametrize("target", ["tpu", "gpu"])
@pytest.mark.parametrize("window", [None, 6])
def test_convert_passes_the_cache_unchanged(window, target):
    params = {"q": normal(64, 64) / 8, "k": normal(64, 32) / 8, "v": normal(64, 32) / 8}
    x, lengths = normal(2, 64), jnp.array([3, 17])
    floats = [normal(2, 32, 2, 16), normal(2, 32, 2, 16)]
    f = functools.partial(decoder, window=window)
    plan = jqx.make_plan(f, jqx.presets.w8a16())(params, x, floats, lengths)
    run, q = jqx.convert(f, plan), jqx.quantize_params(params, plan)
    laid_out = jqx.quantize_state(floats, {".*": "int8:token"}, target=target)
    assert all(c.layout.kernel == target for c in laid_out)
    jaxpr = str(jax.make_jaxpr(run)(q, x, laid_out, lengths))
    assert "jqx_decode_attention" in jaxpr and "pallas_call" in jaxpr
    (y, cache), (expected, plain) = (
        jax.jit(run)(q, x, c, lengths)
        for c in (laid_out, jqx.quantize_state(floats, {".*": "int8:token"}))
    )
    np.testing.assert_array_equal(y, expected)
    assert all((a.values == b.values).all() for a, b in zip(cache, plain, strict=True))
    exact, _ = jax.jit(f)(params, x, floats, lengths)
    assert 0 < float(jnp.abs(y - exact).max()) < 0.1


def test_convert_of_what_vmap_or_a_derivative_made_of_it_has_the_same_numbers():
    floats = [normal(2, 32, 2, 16), normal(2, 32, 2, 16)]
    q, lengths = normal(3, 2, 4, 16), jnp.array([3, 17])

    def mapped(params, q, keys, values):
        attend = lambda q: jqx.decode_attention(q * params["s"], keys, values, lengths)  # noqa: E731
        return jax.vmap(attend)(q)

    def slope(params, q, keys, values):
        attend = lambda q: jqx.decode_attention(q * params["s"], keys, values, lengths).sum()  # noqa: E731
        return jax.grad(attend)(q[0])

    params = {"s": jnp.float32(0.5)}
    state = jqx.quantize_state(floats, {".*": "int8:token"}, target="tpu")
    for f in (mapped, slope):
        plan = jqx.make_plan(f, jqx.Policy([jqx.Rule(".*", weight="int8", optional=True)]))(
            params, q, *floats
        )
        y = jax.jit(jqx.convert(f, plan, unsupported="dequantize"))(params, q, *state)
        expected = jax.jit(f)(params, q, *(c.dequantize() for c in state))
        np.testing.assert_allclose(y, expected, rtol=0, atol=1e-5)


def test_lengths_of_any_dtype_count_what_the_cache_holds():
    q, k = on_device(np.ones((2, 2, 8)), jnp.float32), on_device(np.ones((2, 4, 2, 8)), jnp.float32)
    v = on_device(np.ones((2, 4, 2, 8)) * np.arange(4)[:, None, None], jnp.float32)
    for lengths, expected in [
        (on_device([2**32 - 1, 2], np.uint32), (1.5, 0.5)),
        (np.array([2**32, 2**40 + 1]), (1.5, 1.5)),
        (np.array([2**63, 1], np.uint64), (1.5, 0.0)),
        ([-(2**40), 3], (0.0, 1.0)),
        (on_device([-100, 127], np.int8), (0.0, 1.5)),
    ]:
        y = jqx.decode_attention(q, k, v, lengths)
        np.testing.assert_allclose(y[:, 0, 0], expected, rtol=1e-6, err_msg=str(lengths))
