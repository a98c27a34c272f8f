"""GPTQ of batches with padding is that of the same batches without."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx.algorithms import gptq

from ..observers.test_custom_observer import integers
from ..observers.test_weighted import D, attention, experts

LENGTHS = [5, 2, 4]


def model(p, tokens):
    """Layers in a scan, experts whose rows are sorted, a branch and a head."""
    x = p["table"][tokens]
    x, _ = jax.lax.scan(lambda x, own: (attention(own, x) % 5, None), x, p["layers"])
    x = experts(p, x) % 5
    return jax.lax.cond(tokens[0, 0] >= 0, lambda: x @ p["head"], lambda: x[..., :3])


def given():
    def small(seed, *shape):
        return jnp.asarray(integers(seed, *shape)) + 0.25

    p = {
        "table": jnp.asarray(integers(9, 7, D)),
        "layers": {name: small(i, 2, D, D) for i, name in enumerate("qkvo")},
        "up": small(5, 3, D, 4),
        "down": small(6, 3, 4, D),
        "router": jnp.asarray(integers(7, D, 3)),
        "head": small(8, D, 3),
    }
    tokens = np.random.default_rng(0).integers(1, 7, (3, 5))
    padded = np.where(np.arange(5)[None] < np.asarray(LENGTHS)[:, None], tokens, 0)
    cut = [jnp.asarray(tokens[i : i + 1, :n]) for i, n in enumerate(LENGTHS)]
    return p, [jnp.asarray(padded[:2]), jnp.asarray(padded[2:])], cut


POLICY = jqx.Policy({"router|table": "float", ".*": "int3"})


@pytest.mark.slow
@pytest.mark.many
@pytest.mark.parametrize("sequential", [False, True])
def test_padding_has_no_part_in_the_codes(sequential):
    p, padded, cut = given()
    with_weight = gptq(sequential=sequential, weight=lambda tokens: tokens > 0)
    found = jqx.ptq(model, POLICY, with_weight, progress=False)(p, padded)
    want = jqx.ptq(model, POLICY, gptq(sequential=sequential), progress=False)(p, cut)
    blind = jqx.ptq(model, POLICY, gptq(sequential=sequential), progress=False)(p, padded)
    assert [x.inputs for x in found.details] == [x.inputs for x in want.details]
    assert [x.inputs for x in found.details] != [x.inputs for x in blind.details]
    jax.tree.map(np.testing.assert_array_equal, found.params, want.params)


@pytest.mark.parametrize("sequential", [True, False])
def test_rows_that_cannot_be_followed_are_an_error_that_names_the_site(sequential):
    f = lambda p, x: jnp.fft.fft(x, axis=0).real @ p["w"]  # noqa: E731
    algorithm = gptq(sequential=sequential, weight=lambda x: x[:, 0] > 0)
    quantize = jqx.ptq(f, jqx.Policy({".*": "int4"}), algorithm, progress=False)
    with pytest.raises(ValueError, match=r"rows of 'w(.|\n)*`fft`"):
        quantize({"w": jnp.eye(2)}, [jnp.ones((3, 2))])


def test_a_weight_is_a_function():
    with pytest.raises(TypeError, match="`weight` is not a function"):
        gptq(weight=np.ones(3))  # pyright: ignore
