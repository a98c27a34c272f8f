"""IREE compiles what `jax.export` writes, and computes what JAX does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jqx

from ..models.transforms import normal

pytestmark = pytest.mark.slow

PARAMS = {"up": normal(0, 64, 128), "down": normal(1, 128, 16)}
X = normal(2, 3, 64)
GROUPS = {"granularity": jqx.per_group(32)}


def mlp(params, x):
    return jax.nn.relu(x @ params["up"]) @ params["down"]


def quantized(policy):
    """A function of rows that contains its codes."""
    q = jqx.ptq(mlp, policy, jqx.algorithms.nearest(), target=False, progress=False)(PARAMS, [X])
    return lambda x: q.function(q.params, x)


def simulated(policy):
    """A function of rows that rounds weights and activations, and multiplies floats."""
    plan = jqx.make_plan(mlp, policy)(PARAMS, X)
    affines = jqx.affines(plan, jax.jit(jqx.calibrate(mlp, plan))(PARAMS, X)[1])
    return lambda x: jqx.simulate(mlp, plan, affines)(PARAMS, x)


@pytest.mark.parametrize(
    ("make", "policy", "is_exact"),
    [
        pytest.param(quantized, jqx.Policy([]), False, id="float"),
        pytest.param(quantized, jqx.presets.w8a8_dynamic(), True, id="w8a8 dynamic"),
        pytest.param(quantized, jqx.presets.w8a8(), True, id="w8a8 static"),
        pytest.param(quantized, jqx.presets.w8a16(), False, id="w8a16"),
        pytest.param(quantized, jqx.presets.w4a16(weight=GROUPS), False, id="w4a16 in groups"),
        pytest.param(simulated, jqx.presets.w8a8(), False, id="simulated"),
    ],
)
def test_iree_computes_what_jax_does(make, policy, is_exact):
    """Sums of integers bit for bit; floats are added up in another order."""
    compiler = pytest.importorskip("iree.compiler", reason="needs: pip install iree-base-compiler")
    runtime = pytest.importorskip("iree.runtime", reason="needs: pip install iree-base-runtime")
    run = jax.jit(make(policy))
    program = compiler.compile_str(
        export.export(run, platforms=("cpu",))(X).mlir_module(),
        input_type="stablehlo",
        target_backends=["llvm-cpu"],
        extra_args=["--iree-llvmcpu-target-cpu=generic"],
    )
    module = runtime.load_vm_flatbuffer(program, driver="local-task")
    found, expected = module.main(np.asarray(X)).to_host(), np.asarray(run(X))
    assert found.dtype == expected.dtype
    tolerance = 0.0 if is_exact else 8 * jnp.finfo(jnp.float32).eps  # of the largest result
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())
