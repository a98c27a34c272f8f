"""One of several processes: quantizes a model on the devices of all, and compares with one device.

python processes.py INDEX COUNT PORT
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jqx
from jqx._src import package_cpu

package_cpu.is_installed = lambda: False  # weights of one device would lie for its kernels
INDEX, COUNT, PORT = map(int, sys.argv[1:])
PRESETS = ("w8a8", "w8a8_dynamic", "w8a16", "w4a16", "w4a8", "w4a4", "nf4", "fp8", "mxfp8")
SPECS = {"up": P(None, "model"), "down": P("model", None), "b": P()}


def network(p, x):
    return jax.nn.relu(x @ p["up"]) @ p["down"] + p["b"]


def parts(x):
    return [(part.index, np.asarray(part.data)) for part in x.addressable_shards]


def assert_same(tree, one):
    """Each device of this process has its part of what one device has."""
    for x, whole in zip(jax.tree.leaves(tree), jax.tree.leaves(one), strict=True):
        for index, part in parts(x):
            expected = np.asarray(whole)[index]
            np.testing.assert_array_equal(part.astype(np.float32), expected.astype(np.float32))


def main():
    jax.config.update("jax_num_cpu_devices", 4)
    jax.distributed.initialize(f"127.0.0.1:{PORT}", COUNT, INDEX)
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    rng, device = np.random.default_rng(0), jax.local_devices()[0]
    draw = lambda *shape: rng.standard_normal(shape, np.float32)  # noqa: E731
    params = {"up": draw(256, 512) / 16, "down": draw(512, 256) / 16, "b": np.ones(256, np.float32)}
    batches = [draw(16, 256) for _ in range(3)]
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), SPECS)
    parted, one = jax.device_put(params, shardings), jax.device_put(params, device)
    rows = jax.device_put(batches, NamedSharding(mesh, P("data")))
    rows_of_one = jax.device_put(batches, device)
    for preset in PRESETS:
        policy = getattr(jqx.presets, preset)()
        plan = jqx.make_plan(network, policy)(parted, rows[0])
        results, scales = [], []
        for p, x in ((parted, rows), (one, rows_of_one)):
            affines = None
            if plan.static_specs():
                stats = jqx.calibrate_batches(network, plan, p, x, progress=False)
                affines = jqx.affines(plan, stats)
            q = jqx.quantize_params(p, plan)
            run = jax.jit(jqx.convert(network, plan, affines))
            results.append((q, run(q, x[0])))
            scales.append([np.asarray(x) for x in jax.tree.leaves(affines)])
        (q, y), (q_of_one, y_of_one) = results
        assert_same(q, q_of_one)
        for a, b in zip(*scales, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=0)  # of floats on the way
        atol = float(jnp.abs(y_of_one).max()) * 512 * 2.0**-24
        for index, part in parts(y):
            expected = np.asarray(y_of_one)[index]
            if preset == "w8a8_dynamic":
                np.testing.assert_array_equal(part, expected)
            np.testing.assert_allclose(part, expected, rtol=0, atol=atol)
    for algorithm in (None, jqx.algorithms.gptq(), jqx.algorithms.gptq(sequential=False)):
        quantize = jqx.ptq(network, jqx.presets.w4a16(), algorithm, progress=False)
        assert_same(quantize(parted, rows).params, quantize(one, rows_of_one).params)
    total = jax.shard_map(
        lambda x: jqx.parallel.all_reduce(x, ("data", "model"), "int8:group=256"),
        mesh=mesh,
        in_specs=P(("data", "model")),
        out_specs=P(),
    )
    each = draw(8, 4096)
    y = jax.jit(total)(jax.device_put(each, NamedSharding(mesh, P(("data", "model")))))
    error = np.linalg.norm(parts(y)[0][1] - each.sum(0)) / np.linalg.norm(each.sum(0))
    assert error < 1.2e-2, error
    print("done")


if __name__ == "__main__":
    main()
