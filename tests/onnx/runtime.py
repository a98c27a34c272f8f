"""Runs models in onnxruntime, without its rewriting of products unless a test is about that."""

import collections

import jax
import numpy as np
import onnx
import onnxruntime

from jqx.interop import to_onnx

LEVELS = onnxruntime.GraphOptimizationLevel


def run(model, *args, level=LEVELS.ORT_DISABLE_ALL):
    """The outputs of a model, which is checked with its shapes first."""
    onnx.checker.check_model(model, full_check=True)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = level
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
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
        limit = tolerance * max(1.0, np.nanmax(np.abs(b.astype("f8")), initial=0.0))
        np.testing.assert_allclose(
            a.astype("f8"), b.astype("f8"), rtol=tolerance, atol=limit, err_msg=f"output {i}"
        )
