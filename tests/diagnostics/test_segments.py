"""What diagnostics say of scans that rules split by their steps."""

import jax
import jax.numpy as jnp
import numpy as np

import jqx

L, K = 3, 8
POLICY = jqx.Policy(
    [
        jqx.Rule("layers[0]", weight="int8", activation="int8:dynamic"),
        jqx.Rule("layers/.*", weight="int4", activation="int8:dynamic"),
        jqx.Rule(activation="int8:dynamic"),
    ]
)


def f(p, x):
    def layer(h, w):
        with jax.named_scope("scores"):
            scores = h @ h.T
        return jnp.tanh(jax.nn.softmax(scores) @ h @ w["a"]), None

    return jax.lax.scan(layer, x, p["layers"])[0] @ p["head"]


def test_every_part_has_a_row():
    rng = np.random.default_rng(0)
    p = {"layers": {"a": rng.normal(size=(L, K, K))}, "head": rng.normal(size=(K, 2))}
    p = jax.tree.map(lambda w: jnp.asarray(w, jnp.float32), p)
    x = jnp.asarray(rng.normal(size=(4, K)), jnp.float32)
    plan = jqx.make_plan(f, POLICY)(p, x)
    parts = ["layers/a[0:1]", "layers/a[1:3]"]
    assert {"[0:1]/scores", "[1:3]/scores", *parts} <= {site.path for site in plan.sites}
    assert len({site.name for site in plan.sites}) == len(plan.sites)
    names = [site.path for site in plan.sites]
    assert [row.path for row in jqx.report(plan, p).weights] == parts
    quantized = jqx.quantize_params(p, plan)
    found = jqx.explain(f, quantized, x, plan=plan)
    assert [site.path for site in found.sites][: len(names)] == names
    assert "gone" not in {site.really for site in found.sites}
    assert {row.path for row in jqx.compare(f, plan)(p, x).sites} == set(names)
    assert jqx.diagnostics.ranges(f, plan)(quantized, x) is not None
    made = jqx.ptq(f, POLICY, progress=False)(p, [x])
    wanted = jax.jit(jqx.convert(f, plan))(quantized, x)
    np.testing.assert_array_equal(jax.jit(made.function)(made.params, x), wanted)
