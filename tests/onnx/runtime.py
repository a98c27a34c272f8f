"""Runs models in onnxruntime, without its rewriting of products unless a test is about that."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnxruntime

from jqx.interop import to_onnx

LEVELS = onnxruntime.GraphOptimizationLevel


def run(model, *args, level=LEVELS.ORT_DISABLE_ALL, options=None):
    """The outputs of a model, which is checked with its shapes first."""
    onnx.checker.check_model(model, full_check=True)
    settings = onnxruntime.SessionOptions()
    settings.graph_optimization_level = level
    for name, value in (options or {}).items():
        settings.add_session_config_entry(name, value)
    session = onnxruntime.InferenceSession(model.SerializeToString(), settings)
    arrays = map(np.asarray, jax.tree.leaves(args))
    return session.run(None, dict(zip([x.name for x in session.get_inputs()], arrays, strict=True)))


def exported(f, *args):
    """The outputs of a function without parameters, as a model."""
    return run(to_onnx(lambda _, *args: f(*args), {})(*args), *args)


def operations(model):
    """How many nodes of each kind a model has."""
    return collections.Counter(node.op_type for node in model.graph.node)


def assert_close(found, expected, tolerance=1e-5):
    """Compares outputs with a tree of arrays, also their dtypes; NaN equals NaN."""
    expected = list(map(np.asarray, jax.tree.leaves(expected)))
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in expected]
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        sizes = np.abs(b.astype("f8"))
        limit = tolerance * np.max(sizes, initial=1.0, where=np.isfinite(sizes))
        np.testing.assert_allclose(
            a.astype("f8"), b.astype("f8"), rtol=tolerance, atol=limit, err_msg=f"output {i}"
        )


def assert_equal(found, expected, tolerance=0.0):
    """Compares outputs with a tree of arrays, in values and, but for bfloat16, dtypes: each element
    to the tolerance. NaN equals NaN, and a subnormal number equals zero, as XLA has it on CPU.
    """
    expected = jax.tree.leaves(expected)
    assert len(found) == len(expected)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        is_bfloat = b.dtype.name == "bfloat16"
        assert (a.shape, a.dtype) == (b.shape, np.float32 if is_bfloat else b.dtype), f"output {i}"
        if b.dtype.kind in "iub":
            np.testing.assert_array_equal(a, b, err_msg=f"output {i}")
            continue
        tiny = 1.01 * float(jnp.finfo(b.dtype).tiny)
        a, b = (np.where(np.abs(x.astype("f8")) <= tiny, 0, x.astype("f8")) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=0, err_msg=f"output {i}")
