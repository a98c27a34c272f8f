"""Adapters that `apply_lora` adds to any nnx model: values, gradients, places, and errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jqx
import jqx.nnx
from jqx.algorithms import eora, loftq
from jqx.nnx import LoRA, Mode, QParam, apply_lora, merge_lora

from ..arrays import normal
from ..oracles.refusals import assert_error

WIDTH, HEADS, SIZE = 16, 2, 8
X = normal(1, 3, WIDTH)
RULES = {".*": LoRA(3, 6.0)}
ADAPTERS = nnx.DiffState(0, nnx.LoRAParam)


class Product(nnx.Module):
    """A module that is not of Flax, with a weight of three axes."""

    def __init__(self, equation, shape, seed):
        self.equation = equation
        self.w = nnx.Param(normal(seed, *shape) / 4)

    def __call__(self, x):
        return jnp.einsum(self.equation, x, self.w[...])


class Block(nnx.Module):
    """Products of several forms, a lookup, and a weight that is also an output layer."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(7, WIDTH, rngs=rngs)
        self.query = Product("btd,ndh->btnh", (HEADS, WIDTH, SIZE), 2)
        self.out = Product("btnh,nhd->btd", (HEADS, SIZE, WIDTH), 3)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.heads = nnx.LinearGeneral(2 * WIDTH, (HEADS, SIZE), rngs=rngs)
        self.mix = nnx.Einsum("btnh,nhd->btd", (HEADS, SIZE, WIDTH), rngs=rngs)
        self.conv = nnx.Conv(WIDTH, WIDTH, (1,), rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        x = x + self.out(jnp.tanh(self.query(x)))
        x = x + self.mix(self.heads(nnx.relu(self.up(x))))
        return self.embed.attend(self.conv(x))


TOKENS = jax.random.randint(jax.random.key(4), (2, 5), 0, 7)

EQUATIONS = {  # of what an adapter adds to a weight
    "query/w": "dr,rnh->ndh",
    "out/w": "nhr,rd->nhd",
    "up/kernel": "dr,rf->df",
    "heads/kernel": "fr,rnh->fnh",
    "mix/kernel": "nhr,rd->nhd",
    "embed/embedding": "dr,rv->vd",
}


def flat(model, kind):
    state = nnx.to_flat_state(nnx.state(model, kind))
    return {"/".join(map(str, path)): variable.get_value() for path, variable in state}


def randomized(model):
    """The model, with factors `b` that are not 0."""
    for i, (path, x) in enumerate(nnx.to_flat_state(nnx.state(model, nnx.LoRAParam))):
        if path[-1].endswith("_b"):
            jqx.nnx.update(model, _nested(path, normal(i, *x.shape) / 8))
    return model


def _nested(path, value):
    return functools.reduce(lambda tree, name: {str(name): tree}, reversed(path), value)


def test_a_model_with_adapters_is_the_model_with_their_sums():
    """In float, to the rounding of sums of at most 34 terms. The sums are NumPy's."""
    model = randomized(apply_lora(Block(nnx.Rngs(0)), RULES, TOKENS))
    factors = flat(model, nnx.LoRAParam)
    assert {name.rpartition("_lora_")[0] for name in factors} == set(EQUATIONS)
    dense = Block(nnx.Rngs(0))
    for path, equation in EQUATIONS.items():
        a, b = (np.asarray(factors[f"{path}_lora_{side}"], np.float64) for side in "ab")
        weight = flat(dense, nnx.Param)[path] + 2.0 * np.einsum(equation, a, b)
        jqx.nnx.update(dense, _nested(path.split("/"), jnp.asarray(weight, jnp.float32)))
    # The lookup has no adapter: only the output layer changes.
    tokens_of = Block(nnx.Rngs(0)).embed
    x = tokens_of(TOKENS)
    x = x + dense.out(jnp.tanh(dense.query(x)))
    x = x + dense.mix(dense.heads(nnx.relu(dense.up(x))))
    expected = dense.embed.attend(dense.conv(x))
    assert jnp.abs(model(TOKENS) - expected).max() <= 2.0**-18 * jnp.abs(expected).max()
    merged = merge_lora(model)
    assert type(merged) is Block and type(merged.up) is nnx.Linear and type(merged.out) is Product
    assert not flat(merged, nnx.LoRAParam)
    for path in EQUATIONS:
        error = jnp.abs(flat(merged, nnx.Param)[path] - flat(dense, nnx.Param)[path]).max()
        assert error <= 2.0**-21
    assert type(model.up) is not nnx.Linear


class Either(nnx.Module):
    """An einsum with a weight on either side."""

    def __init__(self, equation, is_left):
        sizes = {"a": 2, "b": 3, "c": 4, "d": 5, "k": 3, "l": 2}
        self.equation, self.is_left = equation, is_left
        axes = equation.split("->")[0].split(",")[0 if is_left else 1]
        self.w = nnx.Param(normal(7, *(sizes[axis] for axis in axes)))

    def __call__(self, x):
        pair = (self.w[...], x) if self.is_left else (x, self.w[...])
        return jnp.einsum(self.equation, *pair)


@pytest.mark.parametrize(
    ("equation", "is_left", "shape"),
    [
        ("xc,kc->xk", False, (6, 4)),
        ("dc,xcdy->xy", True, (6, 4, 5, 2)),
        ("cda,kadlc->lka", False, (4, 5, 2)),
        ("bckd,axdbc->kabx", True, (2, 6, 5, 3, 4)),
        ("axc,cka->kax", False, (2, 6, 4)),
    ],
)
def test_axes_may_be_in_any_order_and_on_either_side(equation, is_left, shape):
    x, model = normal(8, *shape), Either(equation, is_left)
    randomized(apply_lora(model, RULES, x, base="int8:channel"))
    expected = merge_lora(model)(x)
    for mode in (Mode.SIMULATE, Mode.CONVERT):
        model.set_attributes(mode=mode)
        assert jnp.abs(model(x) - expected).max() <= 2.0**-18 * jnp.abs(expected).max()


def test_a_base_in_codes_trains_only_adapters():
    rules = {"query": LoRA(2, 4.0), "up|mix": LoRA(4, 4.0)}
    model = Block(nnx.Rngs(0))
    x = nnx.clone(model)
    result = apply_lora(model, rules, TOKENS, base="nf4:group=8", rngs=nnx.Rngs(1))
    assert result is model and isinstance(model.up, nnx.Linear) and isinstance(model.out, Product)
    assert flat(model, QParam).keys() == {"query/w", "up/kernel", "mix/kernel"}
    assert model.query.w_lora_a.shape == (WIDTH, 2)
    assert model.mix.kernel_lora_b.shape == (4, WIDTH)
    for path, q in flat(model, QParam).items():
        assert q.qtype.name == "nf4"
        jqx.nnx.update(x, _nested(path.split("/"), q.dequantize()))
    assert jnp.abs(model(TOKENS) - x(TOKENS)).max() <= 2.0**-18 * jnp.abs(x(TOKENS)).max()

    randomized(model)
    optimizer = nnx.Optimizer(model, optax.sgd(1e-2), wrt=nnx.LoRAParam)

    @nnx.jit
    def step(model, optimizer):
        def loss(model):
            return jnp.square(model(TOKENS) - 1.0).mean()

        value, gradients = nnx.value_and_grad(loss, argnums=ADAPTERS)(model)
        optimizer.update(model, gradients)
        return value, gradients

    before = nnx.clone(model)
    losses = [step(model, optimizer) for _ in range(3)]
    assert losses[-1][0] < losses[0][0]
    assert all(bool((x != 0).any()) for x in jax.tree.leaves(losses[0][1]))
    for kind in (QParam, nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam))):
        same = jax.tree.map(
            lambda x, y: (x == y).all(), *(nnx.state(m, kind) for m in (before, model))
        )
        assert all(map(bool, jax.tree.leaves(same)))

    simulated = model(TOKENS)
    merged = merge_lora(model)(TOKENS)
    model.set_attributes(mode=Mode.CONVERT)
    graphdef, state = nnx.split(model)
    converted = jax.jit(lambda state: nnx.merge(graphdef, state)(TOKENS))(state)
    for out in (converted, merged):
        assert jnp.abs(out - simulated).max() <= 2.0**-17 * jnp.abs(simulated).max()


class Scanned(nnx.Module):
    """Stacked layers, one after another by a scan with remat, each with two experts by vmap."""

    def __init__(self, axes=0):
        self.axes = axes

        @nnx.split_rngs(splits=3)
        @nnx.vmap
        def make(rngs):
            return nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        @nnx.split_rngs(splits=2)
        @nnx.vmap
        def experts(rngs):
            return nnx.Linear(WIDTH, SIZE, use_bias=False, rngs=rngs)

        self.layers, self.experts = make(nnx.Rngs(0)), experts(nnx.Rngs(1))

    def __call__(self, x):
        @nnx.scan(in_axes=(self.axes, nnx.Carry), out_axes=nnx.Carry)
        def steps(layer, x):
            return jnp.tanh(nnx.remat(lambda layer, x: layer(x))(layer, x))

        return nnx.vmap(lambda expert, x: expert(x), in_axes=(0, None))(
            self.experts, steps(self.layers, x)
        )


@pytest.mark.parametrize("base", [None, "int4:channel"])
def test_stacked_layers_have_stacked_adapters(base):
    model = randomized(apply_lora(Scanned(), RULES, X, base=base))
    assert model.layers.kernel_lora_a.shape == (3, WIDTH, 3)
    assert model.experts.kernel_lora_b.shape == (2, 3, SIZE)
    a = flat(model, nnx.LoRAParam)["layers/kernel_lora_a"]
    limit = (6 / WIDTH) ** 0.5  # of He's uniform, for the inputs of one layer
    assert 0.8 * limit < jnp.abs(a).max() <= limit
    expected = merge_lora(model)(X)
    assert jnp.abs(model(X) - expected).max() <= 2.0**-18 * jnp.abs(expected).max()
    grads = nnx.grad(lambda model: jnp.square(model(X)).sum(), argnums=ADAPTERS)(model)
    assert all(bool((x != 0).any(axis=(-2, -1)).all()) for x in jax.tree.leaves(grads))


def test_a_scan_over_parameters_alone_needs_the_axis_of_codes():
    """A whole model that is quantized does not: its codes are parameters inside."""
    axes = nnx.StateAxes({nnx.Param: 0, ...: None})
    quantized = jqx.nnx.quantize(Scanned(axes), jqx.presets.w8a16())
    simulated = quantized(X)
    jqx.nnx.convert(quantized, X)
    assert jnp.abs(quantized(X) - simulated).max() <= 2.0**-18 * jnp.abs(simulated).max()
    assert apply_lora(Scanned(axes), RULES, X)(X).shape == (2, 3, SIZE)
    model = apply_lora(Scanned(axes), RULES, X, base="int4:channel")
    assert_error(lambda: model(X), "not over its codes", "jqx.nnx.QParam: 0")
    axes = nnx.StateAxes({nnx.Param: 0, QParam: 0, ...: None})
    assert apply_lora(Scanned(axes), RULES, X, base="int4:channel")(X).shape == (2, 3, SIZE)


@pytest.mark.parametrize("algorithm", [loftq(rank=3), eora(rank=3)])
def test_adapters_start_as_the_compensation_of_an_algorithm(algorithm):
    policy = jqx.Policy({"query.*|heads.*|mix.*": "int2:channel"})
    own = jqx.nnx.ptq(Block(nnx.Rngs(0)), policy, algorithm, progress=False)([TOKENS])
    rules = {"query|heads|mix": LoRA(3, 1.5)}
    model = apply_lora(Block(nnx.Rngs(0)), rules, TOKENS, base="int2:channel")
    jqx.nnx.init_lora(model, own)
    expected = own(TOKENS)
    for mode in (Mode.SIMULATE, Mode.CONVERT):
        model.set_attributes(mode=mode)
        assert jnp.abs(model(TOKENS) - expected).max() <= 2.0**-17 * jnp.abs(expected).max()


def test_layers_of_flax_need_no_inputs():
    model = Block(nnx.Rngs(0))
    apply_lora(model, {"up|heads|mix": LoRA(2, 2.0)}, base="nf4:group=8")
    traced = apply_lora(
        Block(nnx.Rngs(0)), {"up|heads|mix": LoRA(2, 2.0)}, TOKENS, base="nf4:group=8"
    )
    assert nnx.graphdef(model) == nnx.graphdef(traced)
    names = {path: x.shape for path, x in flat(model, nnx.LoRAParam).items()}
    assert names == {path: x.shape for path, x in flat(traced, nnx.LoRAParam).items()}
    assert_error(
        lambda: apply_lora(Block(nnx.Rngs(0)), {"query": LoRA(2, 2.0)}),
        *("jqx.nnx.apply_lora: the rule 'query' matches no weight", "'heads/kernel'"),
    )


def test_adapters_and_codes_are_sharded_as_their_weights(tmp_path):
    """And codes of 4 bits return from orbax on another mesh."""
    mesh, other = (
        jax.make_mesh(shape, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
        for shape in ((2, 4), (4, 2))
    )

    def make(mesh):
        model = Block(nnx.Rngs(0))
        model.up.kernel.set_value(
            jax.device_put(model.up.kernel[...], NamedSharding(mesh, P("data", "model")))
        )
        model.query.w = nnx.Param(
            model.query.w[...], out_sharding=("model", None, None), eager_sharding=False
        )
        return apply_lora(model, {"up|query": LoRA(4, 4.0)}, TOKENS, base="int4:group=4")

    model = make(mesh)
    assert model.up.kernel_lora_a.sharding.spec == P("data", None)
    assert model.up.kernel_lora_b.sharding.spec == P(None, "model")
    codes = model.up.kernel.get_value()
    assert all(x.sharding.spec == P("data", "model") for x in jax.tree.leaves(codes))
    names = [x.get_metadata()["out_sharding"] for x in (model.query.w_lora_a, model.query.w_lora_b)]
    assert names == [(None, None), (None, "model", None)]
    randomized(model)
    path = (tmp_path / "state").absolute()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, nnx.state(model))
    graphdef, target = nnx.split(make(other))
    with ocp.StandardCheckpointer() as checkpointer:
        again = nnx.merge(graphdef, checkpointer.restore(path, target))
    assert again.up.kernel.get_value().codes.sharding.mesh.shape == {"data": 4, "model": 2}
    same = jax.tree.map(lambda x, y: (x == y).all(), nnx.state(again), nnx.state(model))
    assert all(map(bool, jax.tree.leaves(same)))


class Outside(nnx.Module):
    """Multiplies by the weight of a layer without calling the layer, and by halves of its own."""

    def __init__(self):
        self.layer = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
        self.halves = nnx.Param(normal(1, WIDTH, 2 * WIDTH))
        self.flags = nnx.Param(jnp.ones(WIDTH))

    def __call__(self, x):
        left, right = jnp.split(self.halves[...], 2, axis=1)
        return x @ self.layer.kernel[...] + (x @ left) * (x @ right)


@pytest.mark.parametrize(
    ("make", "rules", "words"),
    [
        (Outside, {"layer": LoRA(2, 2.0)}, "weights outside of the modules|'layer/kernel'"),
        (Outside, {"halves": LoRA(2, 2.0)}, "a part or a reordered view|'halves'"),
        (
            Outside,
            {"flags": LoRA(2, 2.0)},
            "'flags' matches no weight of a product|it matches nothing",
        ),
        (Scanned, {"layer": LoRA(2, 2.0)}, "'layer' matches no weight|'experts/kernel'"),
        (Scanned, {".*": LoRA(2, 2.0), "layers": LoRA(3, 2.0)}, "'layers' matches|an earlier rule"),
        (Scanned, {}, "`rules` is empty"),
        (Scanned, {"(": LoRA(2, 2.0)}, "no regular expression"),
        (Scanned, {".*": LoRA(0, 2.0)}, "the rank of '.*' is 0"),
    ],
)
def test_rules_that_do_not_fit_are_refused(make, rules, words):
    model = make()
    before = nnx.graphdef(model)
    assert_error(
        functools.partial(apply_lora, model, rules, X), "jqx.nnx.apply_lora: ", *words.split("|")
    )
    assert nnx.graphdef(model) == before


def test_arguments_of_other_types_are_refused():
    model = Scanned()
    for args, options, name in (
        ((jqx, RULES, X), {}, "`model`"),
        ((model, [LoRA(2, 2.0)], X), {}, "`rules`"),
        ((model, {".*": 2}, X), {}, "rules['.*']"),
        ((model, RULES, X), {"base": 4}, "`base`"),
    ):
        assert_error(functools.partial(apply_lora, *args, **options), name, error=TypeError)
    adapted = apply_lora(model, RULES, X)
    assert_error(functools.partial(apply_lora, adapted, RULES, X), "is quantized already")
    table = nnx.Embed(3, 4, rngs=nnx.Rngs(0))
    assert_error(
        functools.partial(apply_lora, table, {".*": LoRA(1, 1.0)}, jnp.array([0])),
        *("'embedding', in a lookup",),
    )
