"""`verify_onnx`: where a file and the function that it was written from part."""

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest
from jax import lax

import jqx
from jqx.interop import to_onnx, verify_onnx

from ..arrays import normal
from .test_quantized import PARAMS, U8, X, quantized


def test_every_site_is_that_of_the_function():
    policies = jqx.presets.w8a8(activation=U8), jqx.presets.w8a8_dynamic(), jqx.presets.fp8()
    for policy in policies:
        q = quantized(policy)
        for options in ({}, {"products": "qdq_uint8"}):
            found = verify_onnx(to_onnx(q, **options)(X), q)(X)
            assert [x.path for x in found.sites] == ["first", "layers", "layers", "last"]
            assert [x.step for x in found.sites] == [0, 0, 1, 0]
            for site in found.sites:
                assert site.differing < 0.01 and site.sqnr > 40, found
            assert found.result.sqnr > 40 and found.optimized.sqnr > 40
    assert "layers[1]" in str(found) and "result, optimized" in str(found)


def test_a_changed_file_parts_at_its_site(tmp_path):
    q = quantized(jqx.presets.w8a8())
    model = to_onnx(q)(X)
    onnx.save(model, tmp_path / "model.onnx")
    assert verify_onnx(tmp_path / "model.onnx", q)(X).sites[1].differing < 0.01
    sums = [node for node in model.graph.node if node.op_type == "MatMulInteger"]
    # The second layer reads the weights of the third.
    sums[1].input[1] = sums[2].input[1]
    found = verify_onnx(model, q)(X)
    assert [x.sqnr > 40 for x in found.sites] == [True, False, False, False]
    assert [x.differing > 0.1 for x in found.sites] == [False, False, True, True]


def test_sites_in_branches_are_left_out_and_16_bits_are_compared():
    def f(params, x, i):
        h = (x.astype(jnp.bfloat16) @ params["first"].astype(jnp.bfloat16)).astype(jnp.float32)
        return lax.cond(i > 0, lambda h: h @ params["last"], lambda h: h[:, :32], h), h

    q = jqx.ptq(f, jqx.presets.w8a8_dynamic(), progress=False)(PARAMS, [(X, np.int32(1))])
    found = verify_onnx(to_onnx(q)(X, np.int32(1)), q)(X, np.int32(1))
    assert [x.path for x in found.sites] == ["first"]
    assert found.sites[0].sqnr > 40 and found.result.sqnr > 40


def test_weights_alone_have_no_codes_to_compare():
    q = quantized(jqx.presets.w4a16())
    found = verify_onnx(to_onnx(q)(X), q)(X)
    assert all(np.isnan(x.differing) and x.sqnr > 100 for x in found.sites)


def test_a_cache_in_codes_is_compared_as_codes_and_scales():
    def f(params, x, cache):
        cache = lax.dynamic_update_slice(cache, x[None, :3], (0, 2, 0))
        return cache[0] @ params["last"], cache

    cache = np.zeros((1, 8, 64), "f4")
    q = jqx.ptq(f, jqx.presets.w8a8(), progress=False)(PARAMS, [(X, cache)])
    cache = jqx.QTensor.zeros(cache.shape, jqx.QSpec("int8", jqx.per_axis(1)))
    found = verify_onnx(to_onnx(q)(X, cache), q)(X, cache)
    # The function multiplies the codes of the cache, and does not round it again.
    assert found.sites[0].sqnr > 100
    assert found.result.sqnr > 100 and found.optimized.sqnr > 100


def test_calls_that_make_no_sense_are_refused():
    q = quantized(jqx.presets.w8a16())
    model = to_onnx(q)(X)
    other = onnx.helper.make_model(model.graph)
    cases = [
        (lambda: verify_onnx(3, q), "pass the result of jqx.interop.to_onnx"),
        (lambda: jqx.interop.verify(model, PARAMS), "goes to jqx.interop.verify_onnx"),
        (lambda: verify_onnx(model, PARAMS), "pass what jqx.ptq returned"),
        (lambda: verify_onnx(other, q), "does not say where its sites are"),
        (lambda: verify_onnx(model, q)(X, X), "takes 1 arrays, of other dtypes"),
        (lambda: verify_onnx(model, q)(X.astype(jnp.bfloat16)), "bfloat16"),
    ]
    for call, text in cases:
        with pytest.raises((TypeError, ValueError), match=text):
            call()


def test_a_constant_activation_is_rounded():
    """It is no value of the graph, but the function rounds it."""
    table = normal(7, 8, 64)

    def f(params, x):
        return jnp.asarray(table) @ params["last"] + x

    x = jax.device_put(np.zeros((8, 32), "f4"))
    q = jqx.ptq(f, jqx.presets.w8a8_dynamic(), progress=False)(PARAMS, [x])
    assert verify_onnx(to_onnx(q)(x), q)(x).result.sqnr > 100
