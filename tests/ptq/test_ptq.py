"""The one call is its steps, one after another; what its batches are; another function that its
result, or a file of it, is bound to.
"""

import dataclasses
import typing
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx
from jqx._src.ptq.quantized import leaves_by_path
from jqx.algorithms import smooth_quant

from ..arrays import assert_same, normal, on_device

W, X = np.linspace(-1, 1, 64 * 8, dtype=np.float32).reshape(64, 8), jnp.ones((3, 64))
PARAMS = {"w": on_device(W), "b": jnp.zeros((1, 8))}
W8A8, W8A16 = jqx.presets.w8a8(), jqx.presets.w8a16()
NEAREST = jqx.algorithms.nearest()


def biased(params, x):
    return jnp.tanh(x @ params["w"]) + params["b"]


def test_it_is_its_steps():
    batches = [X, -3 * X, 2 * X]
    quantized = jqx.ptq(biased, W8A8, progress=False)(PARAMS, (batch for batch in batches))
    plan = jqx.make_plan(biased, W8A8)(PARAMS, X)
    affines = jqx.affines(
        plan, jqx.calibrate_batches(biased, plan, PARAMS, batches, progress=False)
    )
    assert quantized.plan == plan
    assert dataclasses.replace(quantized.report, codes="") == jqx.report(plan, PARAMS)
    assert_same(quantized.affines, affines)
    q = jqx.quantize_params(PARAMS, plan, target=jax.default_backend())
    assert_same(quantized.params, q)
    assert_same(quantized.function(quantized.params, X), jqx.convert(biased, plan, affines)(q, X))


@pytest.mark.parametrize(
    ("preset", "algorithm"),
    [
        ("w8a8", jqx.algorithms.nearest()),
        ("w4a16", jqx.algorithms.gptq()),
        ("w8a8", smooth_quant(strength=0.5)),
    ],
)
def test_it_calls_the_function_once(preset, algorithm):
    calls = []

    def f(params, x):
        calls.append(x)
        return jax.nn.relu(x @ params["up"]) @ params["down"]

    params = {"up": normal(0, 8, 32), "down": normal(1, 32, 4)}
    jqx.ptq(f, getattr(jqx.presets, preset)(), algorithm, progress=False)(
        params, [normal(2, 64, 8)]
    )
    assert len(calls) == 1


def test_without_static_scales_one_batch_is_read_and_layouts_may_stay():
    def batches():
        yield (X,)
        raise AssertionError("a second batch")

    quantized = jqx.ptq(biased, W8A16, target=False)(PARAMS, batches())
    assert quantized.affines == {} and quantized.params["w"].layout is None
    assert_same(
        jqx.pack_for(quantized.params, "tpu"),
        jqx.ptq(biased, W8A16, target="tpu")(PARAMS, [X]).params,
    )


def test_an_algorithm_chooses_codes_or_other_floats():
    def zeros(plan, params, stats):
        assert stats is None and plan.weights[0].path == "w"
        w = jqx.quantize_params(params, plan)["w"]
        return {**params, "w": jax.tree.map(jnp.zeros_like, w)}

    def halved(plan, params, stats):
        return {**params, "w": params["w"] / 2}

    def other(plan, params, stats):
        return {**params, "w": jqx.QTensor.quantize(params["w"], jqx.QSpec("int4"))}

    quantized = jqx.ptq(biased, W8A16, zeros, target=False)(PARAMS, [X])
    assert not np.any(quantized.params["w"].values)
    quantized = jqx.ptq(biased, W8A16, halved, target=False)(PARAMS, [X])
    plan = jqx.make_plan(biased, W8A16)(PARAMS, X)
    assert_same(quantized.params["w"].values, jqx.quantize_params(PARAMS, plan)["w"].values)
    with pytest.raises(ValueError, match=r"jqx\.ptq: the algorithm chose codes"):
        jqx.ptq(biased, W8A16, other)(PARAMS, [X])


def test_weights_may_stand_in_several_places():
    def g(x, w, y, v):
        return x @ w + y @ v

    w = PARAMS["w"]
    quantized = jqx.ptq(g, W8A16, params=(1, 3), target=False)((w, 2 * w), [(X, X)])
    assert [weight.path for weight in quantized.plan.weights] == ["1", "3"]
    assert quantized.function(X, quantized.params[0], X, quantized.params[1]).shape == (3, 8)


def test_a_backend_without_layouts_is_named(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "metal")
    with pytest.raises(ValueError, match="target == None, and the backend of JAX is 'metal'"):
        jqx.ptq(biased, W8A8)
    with pytest.raises(ValueError, match="target == 'rocm'\n"):
        jqx.ptq(biased, W8A8, target="rocm")


def test_parameters_of_one_path_cannot_be_saved():
    """Names tell them apart in a plan, and not in a file."""
    with pytest.raises(ValueError, match=r"several parameters have the path 'c/d'"):
        leaves_by_path({"c": {"d": jnp.ones(8)}, "c/d": jnp.ones(8)})


def test_what_does_not_fit_is_refused():
    for make, error, fact in (
        (lambda: jqx.ptq(biased, W8A8)(PARAMS, []), ValueError, "there is no batch"),
        (lambda: jqx.ptq(biased, W8A8)(PARAMS, 3), TypeError, "`batches`"),
        (lambda: jqx.ptq(biased, "w8a8"), TypeError, "`policy`"),
        (lambda: jqx.ptq(PARAMS, W8A8), TypeError, ""),
        (lambda: jqx.ptq(biased, W8A8, target="cuda"), ValueError, "`target` is unknown"),
    ):
        with pytest.raises(error, match=rf"jqx\.ptq: .*{fact}"):
            make()


class TestWeightsOfACheckpoint:
    """Some weights are QTensors already, which the policy leaves alone."""

    @staticmethod
    def apply(p, x):
        return jax.nn.relu(x @ p["old"].T) @ p["new"]

    @pytest.fixture
    def params(self):
        rng = np.random.default_rng(0)
        old = on_device(rng.normal(size=(64, 128)), jnp.float32)
        new = on_device(rng.normal(size=(64, 16)), jnp.float32)
        return {"old": jqx.QTensor.quantize(old, "int8"), "new": new}

    @pytest.fixture
    def batch(self):
        return on_device(np.random.default_rng(1).normal(size=(160, 128)), jnp.float32)

    @pytest.mark.parametrize("name", ["nearest", "gptq", "rotate", None])
    def test_they_are_what_they_were(self, params, batch, name):
        algorithm = None if name is None else getattr(jqx.algorithms, name)()
        policy = jqx.Policy({"new": "int4:group=32"})
        quantized = jqx.ptq(self.apply, policy, algorithm, target=False, progress=False)(
            params, [batch]
        )
        assert_same(quantized.params["old"], params["old"])
        assert quantized.params["new"].qtype == jnp.int4
        want = self.apply(jqx.dequantize_params(params), batch)
        noise = jnp.linalg.norm(quantized(batch) - want) / jnp.linalg.norm(want)
        assert noise < 0.2  # 4 bits: a tenth

    def test_activations_that_meet_quantized_weights_are_quantized(self, params, batch):
        rules = [
            jqx.Rule("new", weight="int8", activation="int8"),
            jqx.Rule("old", activation="int8"),
        ]
        quantized = jqx.ptq(self.apply, jqx.Policy(rules), progress=False)(params, [batch])
        assert "smooth_quant" in quantized.report.codes or "without" in quantized.report.codes
        want = self.apply(jqx.dequantize_params(params), batch)
        assert jnp.linalg.norm(quantized(batch) - want) < 0.03 * jnp.linalg.norm(want)
        assert len(quantized.affines) == 2

    def test_an_algorithm_that_changes_one_is_refused(self, params, batch):
        policy = jqx.Policy({"new": "int4:group=32"})
        quantize = jqx.ptq(self.apply, policy, jqx.algorithms.awq(), progress=False)
        with pytest.raises(NotImplementedError, match="changes a weight that is quantized already"):
            quantize(params, [batch])


class Named(typing.NamedTuple):
    x: jax.Array
    mask: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Fields:
    x: jax.Array
    mask: jax.Array


class Registered(tuple):
    x = property(lambda self: self[0])
    mask = property(lambda self: self[1])


jax.tree_util.register_pytree_node(
    Registered, lambda own: (tuple(own), None), lambda _, parts: Registered(parts)
)

SQUARE, ROWS, MASK = normal(0, 8, 8), normal(1, 16, 8), on_device(np.ones((16, 1)), jnp.float32)


def masked(w, batch):
    return batch.x @ w * batch.mask


def first(w, x, count, is_on):
    assert is_on is True
    return x[:, :count] @ w[:count]


BATCHES = {
    "a named tuple": (masked, Named(ROWS, MASK)),
    "a dataclass": (masked, Fields(ROWS, MASK)),
    "a registered tuple": (masked, Registered((ROWS, MASK))),
    "a list": (lambda w, batch: batch[0] @ w, [ROWS, MASK]),
    "static numbers": (jax.jit(first, static_argnums=(2, 3)), (ROWS, 8, True)),
}


def scales_of(algorithm, f, batches):
    quantize = jqx.ptq(f, W8A8, algorithm, progress=False, target=False)
    return jax.tree.leaves(quantize(SQUARE, batches).affines)


LOOPS = (
    lambda f, b: scales_of(NEAREST, f, [b, b]),
    lambda f, b: scales_of(jqx.algorithms.bias_correction(), f, iter([b, b])),
    lambda f, b: jqx.diagnostics.sensitivity(f, W8A8, progress=False)(SQUARE, b, b).everything,
)


@pytest.mark.parametrize("name", BATCHES)
def test_every_loop_over_batches_takes_them_alike(name):
    f, batch = BATCHES[name]
    for loop in LOOPS if name in ("a named tuple", "static numbers") else LOOPS[:1]:
        expected, result = loop(lambda w, x: x @ w, ROWS), loop(f, batch)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), expected, result)


def test_static_numbers_of_batches_may_differ():
    """1, 1.0 and True are equal, but not the same."""
    plan = jqx.make_plan(lambda w, x, n: x @ w, W8A8)(SQUARE, ROWS, 1)
    seen = []

    def f(w, x, n):
        seen.append(type(n))
        return x @ w

    jqx.calibrate_batches(
        f, plan, SQUARE, [(ROWS, 1), (ROWS, 1.0), (ROWS, True), (ROWS, 1)], progress=False
    )
    assert list(dict.fromkeys(seen)) == [int, float, bool]


def test_one_named_tuple_is_no_list_of_batches():
    with pytest.raises(TypeError, match=r"pass a list of batches: \[batch\]"):
        jqx.ptq(masked, W8A8, progress=False)(SQUARE, Named(ROWS, MASK))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gptq", "adaround", "auto_round", "awq", "rotate", "eora"])
def test_algorithms_take_static_numbers(name):
    def f(w, x, n):
        return jnp.tanh(x[:, :n] @ w["a"][:n]) @ w["b"]

    options = {"steps": 1} if name in ("adaround", "auto_round") else {}
    algorithm = getattr(jqx.algorithms, name)(**options)
    params = {"a": normal(0, 8, 16) / 4, "b": normal(1, 16, 16) / 4}
    batches = [(normal(2, 32, 8), 4), (normal(3, 32, 8), 4)]
    quantized = jqx.ptq(f, W8A8, algorithm, progress=False, target=False)(params, batches)
    whole = jqx.ptq(lambda w, x: f(w, x, 4), W8A8, algorithm, progress=False, target=False)(
        params, [x for x, _ in batches]
    )
    np.testing.assert_allclose(quantized(*batches[0]), whole(batches[0][0]), rtol=1e-6, atol=1e-6)


A = jnp.linspace(-1, 1, 16 * 32, dtype=jnp.float32).reshape(16, 32)
TWO = {"a": A, "b": -A.reshape(32, 16)}
ROWS_OF_16 = on_device(np.linspace(-3, 3, 5 * 16).reshape(5, 16) ** 3, jnp.float32)


def score(params, x):
    return jnp.sin(x @ params["a"]) @ params["b"]


def step(params, token, bias):
    return score(params, token) + bias


def test_it_is_the_function_with_what_is_kept_at_sites():
    """SmoothQuant keeps the scales of `x` at its site, as nothing comes before it."""
    quantized = jqx.ptq(score, jqx.presets.w8a8(), smooth_quant(0.85), progress=False)(
        TWO, [ROWS_OF_16]
    )
    assert quantized.maps
    bound = quantized.bind(step)
    assert bound.params is quantized.params and bound.plan == quantized.plan
    assert np.array_equal(bound(ROWS_OF_16[:1], 1.0), quantized(ROWS_OF_16[:1]) + 1.0)
    assert np.array_equal(bound.bind(score)(ROWS_OF_16), quantized(ROWS_OF_16))


def layered(params, x, around=lambda f: f, part=lambda f: f):
    """A lookup, a scan over weights and a branch, with calls around all of it and its parts."""

    def f(params, x):
        h = params["a"][jnp.arange(5)] + jnp.tile(x, (1, 2))
        h = lax.scan(part(lambda h, w: (jnp.tanh(h @ w), None)), h, params["s"])[0]
        right = part(lambda h: jnp.sin(h) @ params["b"])
        return lax.cond(x[0, 0] > 0, lambda h: h @ params["b"], right, h)

    return around(f)(params, x)


CALLS = {
    "plain": {},
    "jit": {"around": jax.jit},
    "remat": {"around": jax.checkpoint},
    "jit of jit": {"around": lambda f: jax.jit(jax.jit(f))},
    "jit of parts": {"part": jax.jit},
    "jit of remat of parts": {"around": jax.jit, "part": jax.checkpoint},
}


@pytest.mark.parametrize("planned", ["plain", "jit of remat of parts"])
def test_a_function_with_calls_elsewhere_is_the_same_function(planned, tmp_path):
    params = {**TWO, "s": jnp.stack([jnp.eye(32), -jnp.eye(32)])}
    fs = {
        name: lambda params, x, calls=calls: layered(params, x, **calls)
        for name, calls in CALLS.items()
    }
    policy = jqx.Policy([jqx.Rule(".*", weight="int8", activation="int8", tables="weight")])
    quantize = jqx.ptq(fs[planned], policy, NEAREST, progress=False)
    quantized = quantize(params, [ROWS_OF_16, -ROWS_OF_16])
    assert len(quantized.plan.sites) == 4
    jqx.save(tmp_path / "model", quantized, progress=False)
    unbound = jqx.load(tmp_path / "model", progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        every = [unbound.bind(f, check="function") for f in fs.values()]
    every += [quantized.bind(f) for f in fs.values()]
    expected, *results = jax.jit(lambda x: [q(x) for q in (quantized, *every)])(ROWS_OF_16)
    for result in results:
        np.testing.assert_array_equal(result, expected)
    mapped = [jqx.calibrate(f, quantized.plan)(params, ROWS_OF_16)[1] for f in fs.values()]
    assert all(stats.keys() == mapped[0].keys() for stats in mapped)

    def in_a_branch(params, x):
        return lax.cond(x[0, 0] > 0, fs["plain"], lambda params, x: x, params, x)

    def in_a_loop(params, x):
        return lax.fori_loop(0, 1, lambda _, h: fs["plain"](params, h), x)

    for other in (in_a_branch, in_a_loop):
        with pytest.raises(ValueError, match="the plan was made for another function"):
            quantized.bind(other)(ROWS_OF_16)


def test_a_function_of_other_contractions_is_refused():
    quantized = jqx.ptq(score, jqx.presets.w8a16(), progress=False)(TWO, [ROWS_OF_16])
    with pytest.raises(ValueError, match="the plan was made for another function"):
        quantized.bind(lambda params, x: x @ params["a"])(ROWS_OF_16)
    with pytest.raises(
        ValueError, match=r"another number of axes[\s\S]*result\.bind\(jax\.vmap\(f, in_axes"
    ):
        quantized.bind(score)(ROWS_OF_16[0])
    with pytest.raises(TypeError, match="`f` is not a function of its weights"):
        quantized.bind(3)


NORMED = {"a": normal(0, 8, 8), "b": normal(1, 8, 8), "s": normal(2, 2, 8, 8)}
ROWS_OF_8 = normal(3, 4, 8)


def normed(h):
    return h * lax.rsqrt((h**2).mean(-1, keepdims=True) + 1e-6)


def with_norm(p, x):
    h = jax.nn.relu(normed(x) @ p["a"])
    h, _ = lax.scan(lambda c, w: (jnp.tanh(c @ w), None), h, p["s"])
    return jnp.where(h > 0, h, 0.1 * h) @ p["b"]


def with_jit_around_parts(p, x):
    h = jax.jit(lambda h: jnp.maximum(h, 0.0))(jax.jit(normed)(x) @ p["a"])
    h, _ = lax.scan(lambda c, w: (jax.jit(jax.checkpoint(jnp.tanh))(c @ w), None), h, p["s"])
    return jax.jit(lambda h: jnp.where(h > 0, h, 0.1 * h))(h) @ p["b"]


def with_a_custom_derivative(p, x):
    tanh = jax.custom_jvp(jnp.tanh)
    tanh.defjvps(lambda dx, y, x: dx * (1 - y**2))
    h = jax.nn.relu(normed(x) @ p["a"])
    h, _ = lax.scan(lambda c, w: (tanh(c @ w), None), h, p["s"])
    return jnp.where(h > 0, h, 0.1 * h) @ p["b"]


def with_dead_code(p, x):
    jnp.sin(x)
    return with_norm(p, jax.lax.stop_gradient(x))


EQUAL = {
    "itself": with_norm,
    "parts": with_jit_around_parts,
    "custom derivative": with_a_custom_derivative,
    "dead code": with_dead_code,
    "other numbers": lambda p, x: with_norm(p, x).reshape(4, 8).astype(jnp.float32),
}


def other(first=normed, act=jax.nn.relu, inner=jnp.tanh, last=lambda h: h):
    def g(p, x):
        h = act(first(x) @ p["a"])
        h, _ = lax.scan(lambda c, w: (inner(c @ w), None), h, p["s"])
        return last(jnp.where(h > 0, h, 0.1 * h) @ p["b"])

    return g


OTHER = {
    "activation": (other(act=jnp.tanh), "`tanh`", "`max`"),
    "gelu": (other(act=jax.nn.gelu), "`", "`max`"),
    "no norm": (other(first=lambda x: x), "`dot_general`", "`"),
    "larger inputs": (other(first=lambda x: normed(100 * x)), "`mul`", "`"),
    "in a scan": (other(inner=jnp.sin), "`sin`", "`tanh`"),
    "at the end": (other(last=lambda h: h + 5), "`add`", "the end"),
    "integer results": (other(last=lambda h: jnp.argmax(h, -1)), "`argmax`", "the end"),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("bind") / "model.safetensors"
    policy = jqx.presets.w8a8_dynamic()
    quantize = jqx.ptq(with_norm, policy, NEAREST, target=False, progress=False)
    jqx.save(path, quantize(NORMED, [ROWS_OF_8]), progress=False)
    return path


def test_equal_functions_are_bound_without_a_word(path):
    unbound = jqx.load(path, progress=False)
    with warnings.catch_warnings(), jax.enable_x64(True):
        warnings.simplefilter("error")
        for g in EQUAL.values():
            unbound.bind(g, target=False, check="function")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for g in EQUAL.values():
            unbound.bind(g, target=False)
    assert len(unbound.plan.operations) < 400


@pytest.mark.parametrize("name", OTHER)
def test_another_function_is_a_warning_that_names_its_first_operation(path, name):
    unbound = jqx.load(path, progress=False)
    g, operation, expected = OTHER[name]
    pattern = rf"other operations(.|\n)*given: +{operation}(.|\n)*expected: {expected}"
    with pytest.warns(UserWarning, match=pattern):
        unbound.bind(g, target=False)
    with pytest.raises(ValueError, match=pattern):
        unbound.bind(g, target=False, check="function")


def test_what_cannot_be_compared_is_an_error_only_on_request(path):
    unbound = jqx.load(path, progress=False)
    _, _, names = unbound.plan.operations.partition(":")
    for plan, args in (("", "a file without operations"), (f"0.1.2:{names}", "jax 0.1.2")):
        old = dataclasses.replace(unbound, plan=dataclasses.replace(unbound.plan, operations=plan))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            old.bind(OTHER["activation"][0], target=False)
        with pytest.raises(ValueError, match=args):
            old.bind(with_norm, target=False, check="function")
    with pytest.raises(ValueError, match="without operations"):
        dataclasses.replace(unbound, inputs=None).bind(with_norm, target=False, check="function")
    for text in ("no names", "!!!", names[:10]):
        plan = dataclasses.replace(unbound.plan, operations=f"{jax.__version__}:{text}")
        with pytest.raises(ValueError, match="cannot be read"):
            dataclasses.replace(unbound, plan=plan).bind(with_norm, target=False)
    with pytest.raises(ValueError, match="`check` is unknown"):
        unbound.bind(with_norm, target=False, check="all")
