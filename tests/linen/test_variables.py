"""From variables to variables: scales found, fixed and learned, of one method or of several;
modules that write collections; and checkpoints.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn

import jqx
import jqx.linen
from jqx.linen import Mode

from ..arrays import normal
from .networks import POLICIES, WAYS, Net, images, variables

W8A8 = POLICIES["w8a8"]
LSQ = jqx.presets.w8a8(
    weight={"gradient": jqx.gradients.lsq}, activation={"gradient": jqx.gradients.lsq}
)
ROUNDING = 2 * (18 + 100 + 8) * 2.0**-24
"""Between two programs: of the terms of the three float sums, relative to the largest result."""


@functools.cache
def calibrated(policy=W8A8, way="whole"):
    module = WAYS[way](policy, Mode.CALIBRATE)
    return {**variables(), **module.apply(variables(), images(), mutable=["quant_stats"])[1]}


def test_without_statistics_scales_are_fixed_at_the_values_of_the_call():
    module = WAYS["whole"](W8A8, Mode.SIMULATE)
    fixed = jqx.linen.fix_scales(module, variables(), images(), scales="dynamic")
    assert (module.apply(fixed, images()) == module.apply(calibrated(), images())).all()
    integers = module.clone(mode=Mode.CONVERT, scales="dynamic")
    converted = jqx.linen.convert(integers, variables(), images())
    scales = zip(*(jax.tree.leaves(v["quant_scales"]) for v in (converted, fixed)), strict=True)
    assert all((a == b).all() for a, b in scales)


@pytest.mark.parametrize("way", WAYS)
def test_scales_are_learned(way):
    """They are parameters with gradients, start where statistics put them, and reach the codes."""
    module, known = WAYS[way](LSQ, Mode.SIMULATE), calibrated(LSQ, way)
    learned = jqx.linen.learn_scales(module, known, images())
    assert set(learned) == {"params"}
    assert (module.apply(learned, images(3)) == module.apply(known, images(3))).all()

    def loss(variables):
        return (module.apply(variables, images(3)) ** 2).sum()

    gradient = jax.grad(loss)(learned)
    scales = {key: g for key, g in flat(gradient["params"]).items() if ":" in key}
    assert len(scales) == 6
    assert all(jnp.abs(g.scale).max() > 0 for g in scales.values())

    half = jax.tree_util.tree_map_with_path(
        lambda path, x: x / 2 if ":" in str(path) else x, learned
    )
    integers = WAYS[way](LSQ, Mode.CONVERT)
    converted = jqx.linen.convert(integers, half, images())
    assert not any(":" in key for key in flat(converted["params"]))
    kernels = {**flat(converted["params"]), **flat(converted.get("qparams", {}))}
    given = {key: x for key, x in flat(half["params"]).items() if key.endswith("kernel:weight")}
    for key, affine in given.items():
        assert (kernels[key.removesuffix(":weight")].scale == affine.scale).all()
    out = integers.apply(converted, images(3))
    assert jnp.abs(out - module.apply(half, images(3))).max() <= ROUNDING * jnp.abs(out).max()


def flat(tree, before=""):
    """Leaves of nested dicts by path, affines and QTensors whole."""
    if not isinstance(tree, dict):
        return {before[:-1]: tree}
    return {k: v for name, x in tree.items() for k, v in flat(x, f"{before}{name}/").items()}


def test_the_backward_pass_may_run_beside_integers():
    module = jqx.linen.quantize(Net(), W8A8, backward=jnp.float32)
    integers = module.clone(mode=Mode.CONVERT)
    known = jqx.linen.fix_scales(module, calibrated(), images())
    codes = jqx.linen.convert(integers, known, images())
    assert (module.apply(known, images()) == integers.apply(codes, images())).all()
    plain = module.clone(backward=None)
    gradients = [
        jax.grad(lambda p, m=m: (m.apply({**known, "params": p}, images()) ** 2).sum())(
            known["params"]
        )
        for m in (module, plain)
    ]
    for a, b in zip(*map(jax.tree.leaves, gradients), strict=True):  # there and back
        assert jnp.abs(a - b).max() <= 2 * ROUNDING * jnp.abs(b).max()


def test_random_estimators_draw_from_the_stream_quant():
    spec = {"gradient": jqx.gradients.stochastic}
    policy = jqx.presets.w8a16(weight={"qtype": jnp.int4, **spec})
    module = jqx.linen.Dense(3, policy=policy)
    x = images().reshape(4, -1)
    known = module.init(jax.random.key(0), x)
    outs = [module.apply(known, x, rngs={"quant": jax.random.key(i)}) for i in (1, 1, 2)]
    assert (outs[0] == outs[1]).all() and (outs[0] != outs[2]).any()
    with pytest.raises(ValueError, match="key"):
        module.apply(known, x)


def test_convert_gives_an_abstract_target():
    module = WAYS["whole"](W8A8, Mode.CONVERT)
    known = calibrated()
    abstract = jax.eval_shape(lambda v: jqx.linen.convert(module, v, images()), known)
    concrete = jqx.linen.convert(module, known, images())
    assert jax.tree.structure(abstract) == jax.tree.structure(concrete)
    same = jax.tree.map(lambda a, b: a.shape == b.shape and a.dtype == b.dtype, abstract, concrete)
    assert jax.tree.all(same)


def test_partitioned_parameters_are_unboxed():
    init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
    module = jqx.linen.Dense(3, kernel_init=init, policy=POLICIES["w8a8_dynamic"])
    x = images().reshape(4, -1)
    boxed = module.init(jax.random.key(0), x)
    assert isinstance(boxed["params"]["kernel"], nn.Partitioned)
    plain = nn.meta.unbox(boxed)
    assert (module.apply(boxed, x) == module.apply(plain, x)).all()


def test_a_quantized_module_is_a_value():
    """Hashable, comparable, cloned with other fields; its float module is not changed."""
    net = Net()
    one, two = (jqx.linen.quantize(net, W8A8) for _ in range(2))
    assert one == two and hash(one) == hash(two) and type(one) is type(two)
    assert isinstance(one, Net) and type(net) is Net
    assert one.clone(mode=Mode.FLOAT).mode is Mode.FLOAT
    assert dataclasses.asdict(one.clone(name=None))["mode"] is Mode.SIMULATE


def test_convert_lays_weights_out_for_a_target():
    policy, x = jqx.presets.w4a16(block=4), jnp.ones((2, 8))
    module = jqx.linen.Dense(6, policy=policy, mode=Mode.CONVERT)
    known = nn.Dense(6).init(jax.random.key(0), x)
    plain = jqx.linen.convert(module, known, x)
    packed = jqx.linen.convert(module, known, x, target="cpu")
    expected = jqx.pack_for(plain, "cpu")
    assert jax.tree.structure(packed) == jax.tree.structure(expected)
    pairs = zip(jax.tree.leaves(packed), jax.tree.leaves(expected), strict=True)
    assert all((a == b).all() for a, b in pairs)
    assert jax.tree.structure(packed) != jax.tree.structure(plain)
    module.apply(packed, x)
    with pytest.raises(ValueError, match=r"jqx\.linen\.convert: `target` is unknown"):
        jqx.linen.convert(module, known, x, target="cuda")


class Two(nn.Module):
    """Two layers, and a method that evaluates the first."""

    def setup(self):
        self.first, self.second = nn.Dense(50), nn.Dense(3)

    def __call__(self, x):
        return self.second(self.first(x))

    def half(self, x):
        return self.first(x)


def of_two(**options):
    """Rows, variables with the statistics of a method, and a module that observes."""
    x = images().reshape(4, -1)
    observe = jqx.linen.quantize(Two(), W8A8, mode=Mode.CALIBRATE)
    known = Two().init(jax.random.key(0), x)
    return x, known | observe.apply(known, x, mutable=["quant_stats"], **options)[1], observe


def test_scales_of_another_method_are_not_enough():
    x, known, observe = of_two(method="half")
    for scales in ("calibrated", "dynamic"):
        module = observe.clone(mode=Mode.SIMULATE, scales=scales)
        with pytest.raises(ValueError, match=r"(?s)have no scale.*: second/kernel:dot_general:lhs"):
            module.apply(known, x)


def test_scales_of_methods_are_fixed_one_after_another():
    x, known, observe = of_two()
    module, integers = observe.clone(mode=Mode.SIMULATE), observe.clone(mode=Mode.CONVERT)
    half = jqx.linen.fix_scales(module, known, x, method="half")
    assert set(half["quant_stats"]) == {"second"} and set(half["quant_scales"]) == {"first"}
    assert (module.apply(half, x) == module.apply(known, x)).all()
    small = jqx.linen.convert(integers, known, x)
    again = jqx.linen.convert(integers, half, x)
    assert jax.tree.structure(again) == jax.tree.structure(small)
    assert (integers.apply(again, x) == integers.apply(small, x)).all()
    part = jqx.linen.convert(integers, known, x, method="half")
    assert set(part["quant_stats"]) == {"second"}
    assert (integers.apply(part, x, method="half") == integers.apply(small, x, method="half")).all()
    with pytest.raises(ValueError, match=r"(?s)not converted.*floats for second/kernel,"):
        integers.apply(part, x)


TOKENS = normal(1, 2, 1, 8)
LEARNED_WEIGHTS = jqx.presets.w8a8(weight={"gradient": jqx.gradients.lsq})


class Decoder(nn.Module):
    """Attention with a cache, of the layer that is given."""

    attention: object = nn.MultiHeadAttention

    @nn.compact
    def __call__(self, x):
        return self.attention(num_heads=2, decode=True, name="attention")(x)


class Norm(nn.Module):
    """Running statistics, and a sown value."""

    dense: object = nn.Dense

    @nn.compact
    def __call__(self, x):
        x = self.dense(8, name="dense")(nn.BatchNorm(use_running_average=False)(x))
        self.sow("intermediates", "hidden", x)
        return x


class Counter(nn.Module):
    """A variable that is boxed, and a method that writes it."""

    def setup(self):
        box = nn.with_partitioning(jnp.zeros, ("rows",))
        self.count = self.variable("state", "count", box, (2,))
        self.dense = nn.Dense(8)

    def __call__(self, x):
        self.count.value += 1
        return self.dense(x)


def layer(name, **options):
    return lambda *args, **kwargs: getattr(jqx.linen, name)(*args, **kwargs, **options)


def whole(kind, mode):
    return jqx.linen.quantize(kind(), LEARNED_WEIGHTS, mode=mode)


def of_layers(kind, mode):
    name = "MultiHeadAttention" if kind is Decoder else "Dense"
    return kind(layer(name, policy=LEARNED_WEIGHTS, mode=mode))


CASES = [(make, kind) for make in (whole, of_layers) for kind in (Decoder, Norm)]
CASES += [(whole, Counter)]


@pytest.mark.many
@pytest.mark.parametrize(("make", "kind"), CASES)
def test_modules_that_write_collections(make, kind):
    plain = kind()
    known = jax.jit(plain.init)(jax.random.key(0), jnp.ones((2, 4, 8)))
    known.pop("intermediates", None)
    other = [name for name in known if name != "params"]

    out, stats = make(kind, Mode.CALIBRATE).apply(known, TOKENS, mutable=["quant_stats", *other])
    expected, want = plain.apply(known, TOKENS, mutable=other)
    assert (out == expected).all()
    stats, new = {"quant_stats": stats.pop("quant_stats")}, stats
    assert jax.tree.structure(new) == jax.tree.structure(want)
    assert all((a == b).all() for a, b in zip(*map(jax.tree.leaves, (new, want)), strict=True))
    known |= stats

    module = make(kind, Mode.SIMULATE)
    fixed = jqx.linen.fix_scales(module, known, TOKENS)
    assert set(fixed) == {"params", "quant_scales", *other}
    assert set(jqx.linen.learn_scales(module, known, TOKENS)) == {"params", *other}
    small = jqx.linen.convert(make(kind, Mode.CONVERT), known, TOKENS)
    assert set(small) >= {"qparams", "quant_scales", *other}
    for actual in (fixed, small):
        before, after = (jax.tree.leaves([v[name] for name in other]) for v in (known, actual))
        assert all(a is b for a, b in zip(before, after, strict=True))
    simulated, one = module.apply(fixed, TOKENS, mutable=other)
    converted, two = make(kind, Mode.CONVERT).apply(small, TOKENS, mutable=other)
    assert jnp.abs(simulated - converted).max() <= 2.0**-18 * jnp.abs(converted).max()
    for written in (one, two):
        assert jax.tree.structure(written) == jax.tree.structure(want)
    if make is whole:
        assert jqx.linen.make_plan(module, known, TOKENS).weights


@pytest.mark.many
@pytest.mark.parametrize("mutable", [True, ["quant_scales", "learned_scales", "qparams"]])
@pytest.mark.parametrize("way", WAYS)
def test_what_is_mutable_does_not_say_what_is_computed(way, mutable):
    policy = POLICIES["w8a8"]
    observe, module, integers = (
        WAYS[way](policy, mode) for mode in (Mode.CALIBRATE, Mode.SIMULATE, Mode.CONVERT)
    )
    known = {**variables(), **observe.apply(variables(), images(), mutable=["quant_stats"])[1]}
    out, new = module.apply(known, images(2), mutable=mutable)
    assert (out == module.apply(known, images(2))).all()
    assert set(new) <= set(known)
    small = jqx.linen.convert(integers, known, images())
    out, new = integers.apply(small, images(2), mutable=mutable)
    assert (out == integers.apply(small, images(2))).all()
    assert set(new) <= set(small)
    assert all(
        a is b or (a == b).all()
        for name in new
        for a, b in zip(*map(jax.tree.leaves, (new[name], small[name])), strict=True)
    )


def test_conversions_under_jit_do_not_share_a_program_with_calls():
    class Jitted(nn.Module):
        mode: Mode

        @nn.compact
        def __call__(self, x):
            dense = nn.jit(jqx.linen.Dense)
            return dense(8, policy=LEARNED_WEIGHTS, mode=self.mode, name="dense")(x)

    module = Jitted(Mode.SIMULATE)
    known = module.init(jax.random.key(0), TOKENS)
    known |= Jitted(Mode.CALIBRATE).apply(known, TOKENS, mutable=["quant_stats"])[1]
    for _ in range(2):
        out, _ = module.apply(known, TOKENS, mutable=True)
        assert "quant_scales" in jqx.linen.fix_scales(module, known, TOKENS)
        learned = jqx.linen.learn_scales(module, known, TOKENS)
        assert "kernel:weight" in learned["params"]["dense"]
        assert "qparams" in jqx.linen.convert(Jitted(Mode.CONVERT), known, TOKENS)
        again, new = module.apply(known, TOKENS, mutable=True)
        assert (again == out).all() and "quant_scales" not in new


NET = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(4)])
ROWS = normal(1, 2, 32)


@pytest.mark.many
@pytest.mark.parametrize("name", ["w8a8", "w4a16", "w4a8", "fp8", "mxfp8", "nf4"])
def test_a_converted_module_comes_back(name, tmp_path):
    policy = getattr(jqx.presets, name)()
    options = {"mode": jqx.linen.Mode.CONVERT, "scales": "dynamic"}
    module = jqx.linen.quantize(NET, policy, **options)
    variables = NET.init(jax.random.key(0), ROWS)
    converted = jqx.linen.convert(module, variables, ROWS)
    target = jax.eval_shape(lambda v: jqx.linen.convert(module, v, ROWS), variables)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", converted)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "saved", target)
    assert jax.tree.structure(restored) == jax.tree.structure(converted)
    same = jax.tree.map(lambda a, b: a.dtype == b.dtype and (a == b).all(), restored, converted)
    assert jax.tree.all(same)
    assert isinstance(restored["qparams"]["layers_0"]["kernel"], jqx.QTensor)
    assert (module.apply(restored, ROWS) == module.apply(converted, ROWS)).all()
