"""What compilers for eight TPUs and eight GPUs, which need not be there, make of collectives."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jqx
from jqx import parallel
from jqx._src import compat
from jqx._src.diagnostics import lowering as targets

pytestmark = pytest.mark.aot

COUNT, SIZE = 8, 1 << 18
RING = [(i, (i + 1) % COUNT) for i in range(COUNT)]
BITS = {"f32": 32, "s32": 32, "bf16": 16, "s8": 8, "u8": 8, "s4": 4}
BITS |= dict.fromkeys(("f8e4m3fn", "f8e5m2", "f8e8m0fnu"), 8)
both = pytest.mark.parametrize("target", ["tpu-v5e", "h200"])

COLLECTIVES = {
    "sum": lambda x, **o: parallel.all_reduce(x, "i", **o),
    "sum in a ring": lambda x, **o: parallel.all_reduce(x, "i", form="ring", **o),
    "scattered": lambda x, **o: parallel.reduce_scatter(x, "i", tiled=True, **o),
    "scattered in a ring": lambda x, **o: parallel.reduce_scatter(
        x, "i", tiled=True, form="ring", **o
    ),
    "gathered": lambda x, **o: parallel.all_gather(x, "i", **o),
    "gathered in a ring": lambda x, **o: parallel.all_gather(x, "i", form="ring", **o),
    "to all": lambda x, **o: parallel.all_to_all(x, "i", 0, 0, tiled=True, **o),
    "to some": lambda x, **o: parallel.ppermute(x, "i", RING, **o),
}
FORMATS = {
    "int8:group=256": ({"s8"}, 0.27),
    "int4:group=256": ({"s4", "s8", "u8"}, 0.15),
    "float8_e4m3fn:group=256": ({"f8e4m3fn"}, 0.27),
    "int2:group=256": ({"u8"}, 0.08),
}


@functools.cache
def devices(target):
    kind = targets.TARGETS[target]
    modules = list(filter(targets._is_installed, kind.modules))
    if not modules:
        pytest.skip(f"no compiler for {target}: the extra {kind.extra} is not installed")
    with targets._present(kind.environment):
        if kind.platform == "tpu":
            return compat.devices_of_topology("tpu", "v5e:2x4")
        config = targets.resources.files("jqx._src.diagnostics").joinpath(f"{target}.textproto")
        return compat.devices_of_topology(
            "cuda", "", plugin=modules[0], target_config=config.read_text(), topology="1x1x8"
        )


def mesh_of(target):
    return Mesh(np.array(devices(target)), ("i",))


def compiled_for(target, f, *args):
    """The program for eight devices of a target, of abstract arguments with shardings."""
    options = targets.TARGETS[target].options or None
    return jax.jit(f).lower(*args).compile(compiler_options=options)


def bytes_sent(compiled):
    """Bytes that each device sends in collectives, by their kind and the type of the elements."""
    sizes = {}
    for line in compiled.as_text().splitlines():
        match = re.search(
            r" = (.+?) (all-to-all|all-gather|collective-permute|all-reduce|reduce-scatter)"
            r"(-start)?\(",
            line,
        )
        if not match:
            continue
        types, kind, start = match.groups()
        # What is started has the types of operands and results; a sum goes round twice.
        part = {"collective-permute": 1, "all-reduce": 2 * (1 - 1 / COUNT)}.get(kind, 1 - 1 / COUNT)
        if start and kind != "all-reduce":
            part *= COUNT / (COUNT + 1) if kind == "all-gather" else 1 / 2
        types = types.replace("u32[]", "")  # handles of a TPU
        for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", types):
            size = math.prod(map(int, filter(None, dims.split(","))))
            sizes[kind, dtype] = sizes.get((kind, dtype), 0) + size * BITS[dtype] / 8 * part
    return sizes


def sent(f, target):
    """Bytes that each device sends in `f` inside shard_map, by the type of the elements."""
    mesh = mesh_of(target)
    x = jax.ShapeDtypeStruct((COUNT * SIZE,), jnp.float32, sharding=NamedSharding(mesh, P("i")))
    mapped = jax.shard_map(f, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    sizes = {}
    for (kind, dtype), size in bytes_sent(compiled_for(target, mapped, x)).items():
        assert kind not in ("all-reduce", "reduce-scatter")
        sizes[dtype] = sizes.get(dtype, 0) + size
    return sizes


@both
@pytest.mark.parametrize("spec", FORMATS)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_codes_are_sent_and_floats_are_not(name, spec, target):
    """Beside scales, of which there is one in 256. Measured against what floats would take."""
    types, most = FORMATS[spec]
    sizes = sent(functools.partial(COLLECTIVES[name], spec=spec), target)
    once = SIZE * 4 * (1 - 1 / COUNT)  # each device sends all others a part
    if name.startswith("sum"):
        once *= 2
    elif name.startswith("gathered"):
        once *= COUNT
    elif name == "to some":
        once = SIZE * 4
    assert "f32" in sizes and sizes.keys() - {"f32"} <= types and len(sizes) > 1
    assert sizes["f32"] <= 1.01 * once / 256
    ratio = sum(sizes.values()) / once
    print(f"{target} {spec} {name}: {ratio:.3f} of float32")
    assert ratio <= most


@both
def test_gradients_and_keys_send_codes_too(target):
    """A gathered weight, whose gradient is scattered: each in codes, with its own format."""

    def f(x):
        gather = functools.partial(
            parallel.all_gather,
            axis_name="i",
            spec="int8:group=256",
            backward="int4:group=256",
            hadamard=True,
            key=jax.random.key(0),
        )
        return jax.grad(lambda x: jnp.sin(gather(x)).sum())(x)

    sizes = sent(f, target)
    once = SIZE * 4 * (COUNT - 1)
    assert sum(sizes.values()) <= (0.27 + 0.15) * once and sizes["f32"] <= 2.01 * once / 256


ROWS, DEPTH, WIDTH = 64, 1024, 512
GATHERED = {  # how many bits a code takes; nf4 is packed
    "w8a8_dynamic": ("s8", 8),
    "w8a16": ("s8", 8),
    "w4a16": ("s4", 4),
    "w4a8": ("s4", 4),
    "nf4": ("u8", 4),
    "fp8": ("f8e4m3fn", 8),
    "mxfp8": ("f8e4m3fn", 8),
}
PARTITIONS = {"contracted": P("i", None), "kept": P(None, "i")}


def converted(f, preset, target, weight, rows, change=lambda q: q, **options):
    """Bytes that are sent by a converted product, its weight and rows with these partitions, and
    how many scales the weight has. `change` is what becomes of the quantized one, such as packing.
    """
    mesh = mesh_of(target)
    w = jax.ShapeDtypeStruct((DEPTH, WIDTH), jnp.float32)
    x = jax.ShapeDtypeStruct((ROWS, DEPTH), jnp.float32, sharding=NamedSharding(mesh, rows))
    plan = jqx.make_plan(f, getattr(jqx.presets, preset)())(w, x)
    q = jax.eval_shape(lambda w: change(jqx.quantize_params(w, plan)), w)
    shardings = parallel.shardings(NamedSharding(mesh, weight), q)
    abstract_codes = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        q,
        shardings,
    )
    if options:
        options["shardings"] = NamedSharding(mesh, weight)
    scales = "dynamic" if plan.static_specs() else None
    run = jqx.convert(f, plan, scales, **options)
    out = NamedSharding(mesh, P(*rows[:1]))
    compiled = compiled_for(target, jax.jit(run, out_shardings=out), abstract_codes, x)
    return bytes_sent(compiled), sum(x.size for x in jax.tree.leaves(q)[1:])


def product(w, x):
    return x @ w


@both
@pytest.mark.parametrize("axis", PARTITIONS)
@pytest.mark.parametrize("preset", GATHERED)
def test_a_weight_on_all_devices_is_gathered_in_codes(preset, axis, target):
    """Rows are on all devices too."""
    check_gathered(product, preset, axis, target, gather_axes="i")


@both
def test_a_constraint_of_the_function_gathers_codes_too(target):
    whole = NamedSharding(mesh_of(target), P())
    f = lambda w, x: x @ jax.lax.with_sharding_constraint(w, whole)  # noqa: E731
    check_gathered(f, "w4a16", "contracted", target)


def check_gathered(f, preset, axis, target, **options):
    dtype, bits = GATHERED[preset]
    pack = (lambda q: q.pack(1 if axis == "contracted" else 0)) if preset == "nf4" else lambda q: q
    args = preset, target, PARTITIONS[axis], P("i")
    sizes, scales = converted(f, *args, change=pack, **options)
    element = "s8" if dtype == "s4" and target == "h200" else dtype  # two to a byte
    codes = DEPTH * WIDTH * bits / 8 * (1 - 1 / COUNT)
    assert sizes.pop(("all-gather", element)) == pytest.approx(codes, rel=1e-3)
    # Scales beside, and the largest of an activation; TPUs add up scales with zeros of the others.
    assert sum(sizes.values()) <= 2 * 4 * (scales + 1)


@pytest.mark.parametrize(
    "preset, target, sent_as",
    [
        ("w4a16", "tpu-v5e", "bf16"),
        ("w4a16", "h200", "f32"),
        ("mxfp8", "tpu-v5e", "bf16"),
        ("mxfp8", "h200", "f32"),
    ],
)
def test_compilers_multiply_by_scales_of_blocks_before_they_gather(preset, target, sent_as):
    """Unless they are told where to gather: a compiler that needs it no more fails this test."""
    sizes, _ = converted(product, preset, target, P("i", None), P("i"))
    size = DEPTH * WIDTH * BITS[sent_as] / 8 * (1 - 1 / COUNT)
    assert sizes["all-gather", sent_as] == pytest.approx(size, rel=1e-3)


@both
@pytest.mark.parametrize("preset, sums", [("w8a8_dynamic", "s32"), ("w4a16", "f32")])
def test_parts_of_sums_are_added_in_the_dtype_of_the_user(preset, sums, target):
    """Beside the largest values of each row, up to 64 integers, which all devices find together."""
    twice = 2 * (1 - 1 / COUNT)
    for options, dtype in (({}, sums), ({"partial_dtype": jnp.bfloat16}, "bf16")):
        sizes, _ = converted(product, preset, target, P("i", None), P(None, "i"), **options)
        maxima = 0 if preset == "w4a16" else ROWS * 64 * 4 * twice
        size = ROWS * WIDTH * BITS[dtype] / 8 * twice
        assert {dtype} <= {kind for _, kind in sizes} <= {dtype, "s32"}
        assert {op for op, _ in sizes} == {"all-reduce"}
        assert sizes["all-reduce", dtype] >= size
        assert sum(sizes.values()) <= size + maxima
