"""From variables to variables: scales found, fixed and learned; and what is refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

import jqx
import jqx.linen
from jqx._src.modules.quantized_function import flatten
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


@pytest.mark.parametrize("way", WAYS)
def test_fixed_scales_are_those_of_statistics(way):
    module, known = WAYS[way](W8A8, Mode.SIMULATE), calibrated(way=way)
    fixed = jqx.linen.fix_scales(module, known, images(2))
    assert set(fixed) == {"params", "quant_scales"}
    assert (module.apply(fixed, images(3)) == module.apply(known, images(3))).all()


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
        path = key.removesuffix(":weight").replace("DotGeneral_0/", "")
        q = kernels[path.replace("ConvGeneralDilated_0/", "")]
        assert (q.scale == affine.scale).all()
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


def test_every_public_method_is_quantized():
    class Coder(nn.Module):
        def setup(self):
            self.inner = nn.Dense(4)
            self.outer = nn.Dense(6)

        def encode(self, x):
            return self.inner(x)

        def decode(self, x, *, scale=1.0):
            return self.outer(x) * scale

        def __call__(self, x):
            return self.decode(self.encode(x))

    x = normal(0, 2, 6)
    coder, policy = Coder(), POLICIES["w8a8_dynamic"]
    known = coder.init(jax.random.key(1), x)
    module = jqx.linen.quantize(coder, policy, mode=Mode.CONVERT)
    converted = jqx.linen.convert(module, known, x)
    y = module.apply(converted, x, method="encode")
    assert (y != coder.apply(known, x, method="encode")).any()
    z = module.apply(converted, y, scale=2.0, method=Coder.decode.__name__)
    assert (z == 2.0 * module.apply(converted, y, method="decode")).all()
    assert (module.apply(converted, x) * 2.0 == z).all()
    plan = jqx.linen.make_plan(module, known, x, method="encode")
    assert [site.path for site in plan.sites] == ["inner/kernel"]


def test_scales_of_statistics_by_key():
    """Entries stand beside the weight: the keys of the transforms, as nested dicts."""
    keys = set(flatten(calibrated()["quant_stats"]))
    assert keys == {
        "conv/kernel:conv_general_dilated:lhs",
        "hidden/kernel:dot_general:lhs",
        "out/kernel:dot_general:lhs",
    }


def test_convert_lays_weights_out_for_a_target():
    policy, x = jqx.presets.w4a16(block=4), jnp.ones((2, 8))
    dot = functools.partial(jqx.linen.DotGeneral, policy=policy, mode=Mode.CONVERT)
    for module in (
        jqx.linen.Dense(6, policy=policy, mode=Mode.CONVERT),
        nn.Dense(6, dot_general_cls=dot, promote_dtype=jqx.linen.promote_dtype),
    ):
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
