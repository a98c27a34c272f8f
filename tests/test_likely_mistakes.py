"""What a first user gets wrong: each an error in four parts that names the mend.

Nothing is compiled.
"""

import re
import typing
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx

PARTS = r"jqx\.[\w., ()]+: .+\n(  given:    .+\n)?(  expected: .+\n)?  fix:      .+"


def f(params, x):
    return jax.nn.relu(x @ params["w"]) @ params["v"].T


def dense(w, x):
    return x @ w


def g(x, params):
    return f(params, x)


def h(params, x):
    return f(params["a"], x)


class Pair(typing.NamedTuple):
    x: np.ndarray
    mask: np.ndarray


P = {"w": np.ones((64, 128), np.float32), "v": np.ones((10, 128), np.float32)}
X = np.ones((4, 64), np.float32)
RULES = [jqx.Rule("a")]
W8A8, W8A16 = jqx.presets.w8a8(), jqx.presets.w8a16()
PLAN = jqx.make_plan(f, W8A8)(P, X)
STATS = {key: jqx.calibrators.absmax.empty((1, 1)) for key in PLAN.static_specs()}
SCALE = jqx.calibrators.Affine(np.ones((1, 1), np.float32), None)
AFFINES = dict.fromkeys(PLAN.static_specs(), SCALE)
CLOSED = jnp.ones((64, 10))
QUANTIZED = jqx.QTensor.quantize(CLOSED, "int8")
CODES = jqx.QTensor.quantize(P["w"], jqx.QSpec("int8", jqx.per_axis(1)))
CONVERTED = jqx.convert(f, jqx.make_plan(f, W8A16)(P, X))


def traced(function, *args):
    """Evaluates without computing anything."""
    return jax.eval_shape(function, *args)


MISTAKES = {
    # policies
    "a preset that is not called": (lambda: jqx.make_plan(f, jqx.presets.w8a8), "presets.w8a8()"),
    "a preset by name": (lambda: jqx.make_plan(f, "w8a8"), "call the preset: jqx.presets.w8a8()"),
    "a scheme as policy": (lambda: jqx.make_plan(f, "int8"), "jqx.Policy({'.*': ...})"),
    "a list of rules": (lambda: jqx.make_plan(f, [jqx.Rule("w")]), "jqx.Policy([rule, ...])"),
    "a rule": (lambda: jqx.make_plan(f, jqx.Rule("w")), "jqx.Policy([rule])"),
    "a dict": (lambda: jqx.make_plan(f, {".*": "int8"}), "jqx.Policy({regex: scheme, ...})"),
    "a dict for ptq": (lambda: jqx.ptq(f, {".*": "int8"}), "jqx.Policy({regex: scheme, ...})"),
    "a preset for ptq": (lambda: jqx.ptq(f, jqx.presets.w8a8), "jqx.presets.w8a8()"),
    "a spec as policy": (lambda: jqx.make_plan(f, jqx.QSpec("int8")), "jqx.Policy({'.*': ...})"),
    "a policy of a name": (lambda: jqx.Policy("w8a8"), "jqx.presets.w8a8()"),
    "no rules": (lambda: jqx.Policy(), "one list, jqx.Policy([rule, ...])"),
    "rules one by one": (lambda: jqx.Policy(jqx.Rule("a"), jqx.Rule("b")), "one list"),
    "a preset in a dict": (lambda: jqx.Policy({"a": jqx.presets.nf4}), "jqx.presets.nf4()"),
    "a preset's name in a dict": (lambda: jqx.Policy({"a": "w4a16"}), "jqx.presets.w4a16()"),
    "a dtype in a dict": (lambda: jqx.Policy({"a": jnp.int8}), 'the scheme "int8"'),
    "a key that is no regex": (lambda: jqx.Policy({"(": "int8"}), "escape special characters"),
    "a number for a key": (lambda: jqx.Policy({0: "int8"}), "pass a regular expression"),
    "a list added": (lambda: W8A8 + RULES, "jqx.Policy([rule, ...])"),
    "added to a list": (lambda: RULES + W8A8, "jqx.Policy([rule, ...])"),
    "a preset added": (lambda: W8A8 + jqx.presets.w8a16, "jqx.presets.w8a16()"),
    "a sum of policies": (lambda: sum([W8A8, W8A16]), "jqx.Policy([])"),
    "a wrong regex": (lambda: jqx.make_plan(f, jqx.presets.w8a8("l.*"))(P, X), "correct its path"),
    "an invalid regex": (lambda: jqx.presets.w8a8("(w"), "escape special characters"),
    "excluded in vain": (
        lambda: jqx.make_plan(f, jqx.presets.w8a8(exclude="head"))(P, X),
        "correct its path",
    ),
    "excluded by a dict": (lambda: jqx.presets.w8a8(exclude={"w": 1}), 'exclude="head/.*"'),
    # rules, specs, presets
    "a spec by position": (lambda: jqx.Rule("w", jqx.QSpec("int8")), "specs have names: weight="),
    "specs by position": (lambda: jqx.Rule("w", None, jqx.QSpec("int8")), "name the specs"),
    "another field": (lambda: jqx.Rule("w", weights="int8"), "weights= is called weight="),
    "a dtype for a spec": (lambda: jqx.Rule("w", weight=jnp.int4), 'the scheme "int4"'),
    "fields for a spec": (lambda: jqx.Rule("w", weight={"qtype": "int4"}), "jqx.QSpec("),
    "no such format": (lambda: jqx.Rule("w", weight="int9"), "write 'int8'"),
    "no such option": (lambda: jqx.Rule("w", weight="int8:per_channel"), "write 'channel'"),
    "a misspelt option": (lambda: jqx.Rule("w", weight="int4:gruop=64"), "write 'group=64'"),
    "an option of nothing": (lambda: jqx.Rule("w", weight="int4:x"), "int4:group=32"),
    "no number": (lambda: jqx.Rule("w", weight="int8:group"), "write 'group=32'"),
    "a size twice": (lambda: jqx.Rule("w", weight="int8:group=8:group=4"), "give group once"),
    "symmetric": (lambda: jqx.Rule("w", weight="int8:symmetric"), "unless it says asymmetric"),
    "a misspelt calibrator": (
        lambda: jqx.Rule("w", weight="int8:calibrator=mes"),
        "write 'calibrator=mse'",
    ),
    "a dynamic weight": (lambda: jqx.Rule("w", weight="int8:dynamic"), "format and its options"),
    "axes of a file": (lambda: jqx.Rule("w", weight="int8:contract=0"), "format and its options"),
    "a field of a preset": (lambda: jqx.presets.w8a8(weight={"bits": 4}), "sets the number of"),
    "bits of a spec": (lambda: jqx.QSpec("int8", bits=4), 'jqx.QSpec("int4"'),
    "no format": (lambda: jqx.QSpec(), "granularity=..., symmetric=..."),
    "a format": (lambda: jqx.presets.w8a8(weight={"qtype": "int9"}), "pass 'int8'"),
    "a scheme as format": (lambda: jqx.QSpec("int4:group=32"), "weight='int4:group=32'"),
    "a granularity": (
        lambda: jqx.presets.w8a8(weight={"granularity": "channel"}),
        "pass jqx.per_channel()",
    ),
    "per_tensor by name": (lambda: jqx.QSpec("int8", "per_tensor"), "pass jqx.per_tensor()"),
    "not called": (lambda: jqx.QSpec("int8", jqx.per_token), "pass jqx.per_token()"),
    "a size": (lambda: jqx.QSpec("int8", 32), "pass jqx.per_group(32)"),
    "a calibrator": (lambda: jqx.QSpec("int8", calibrator="mse"), "pass jqx.calibrators.mse"),
    "a runtime": (lambda: jqx.QSpec("int8", numerics="onnx"), "pass jqx.numerics.onnx"),
    "an estimator": (lambda: jqx.QSpec("int8", gradient="lsq"), "a value of jqx.gradients"),
    "a round mode": (lambda: jqx.QSpec("int8", round_mode="up"), "jqx.RoundMode.NEAREST"),
    "unsigned": (lambda: jqx.QSpec("uint4"), "symmetric=False"),
    "activations of w8a16": (lambda: jqx.presets.w8a16(activation={}), "w8a8_dynamic()"),
    "a group of a preset": (lambda: jqx.presets.w4a16(group=32), "group= is called block="),
    "a group of channels": (lambda: jqx.presets.w4a8(group_size=64), 'weight="int4:group=32"'),
    "a group of MX": (lambda: jqx.presets.mxfp8(block=64), "mxfp8_e4m3 has blocks of 32"),
    "bits of a preset": (lambda: jqx.presets.w8a16(bits=4), 'weight={"qtype": "int4"}'),
    "a spec's field": (lambda: jqx.presets.w8a8(symmetric=False), 'weight={"symmetric": ...}'),
    "a preset that is float": (lambda: jqx.presets.w8a8(weight="float"), 'pass for example "int8"'),
    "a block twice": (lambda: jqx.presets.w4a16(block=64, weight="int4"), "drop block"),
    "axes of a channel": (lambda: jqx.per_channel(0), "that a contraction keeps"),
    "no group": (lambda: jqx.per_group(), "jqx.per_group(32)"),
    "no axes": (lambda: jqx.per_axis(), "jqx.per_tensor()"),
    "a block of no axis": (lambda: jqx.per_block(32), "{0: 32}"),
    # habits from PyTorch, Qwix, AQT and others
    "an algorithm by name": (
        lambda: jqx.ptq(f, W8A16, "gptq"),
        "call it: jqx.algorithms.gptq()",
    ),
    "SmoothQuant by name": (
        lambda: jqx.ptq(f, W8A8, "SmoothQuant"),
        "call it: jqx.algorithms.smooth_quant()",
    ),
    "rounding by name": (lambda: jqx.ptq(f, W8A8, "rtn"), "jqx.algorithms.nearest()"),
    "an algorithm that is not called": (
        lambda: jqx.ptq(f, W8A8, jqx.algorithms.awq),
        "call it: jqx.algorithms.awq()",
    ),
    "several algorithms": (
        lambda: jqx.ptq(f, W8A8, [jqx.algorithms.awq(), jqx.algorithms.gptq()]),
        "jqx.algorithms.chain(first, second)",
    ),
    "bits for an algorithm": (
        lambda: jqx.ptq(f, W8A8, 4),
        "pass jqx.algorithms.nearest() to round to nearest",
    ),
    "a group of gptq": (lambda: jqx.algorithms.gptq(group_size=32), "'int4:group=32'"),
    "groups of gptq": (lambda: jqx.algorithms.gptq(groups=32), "'int4:group=32'"),
    "a group of awq": (lambda: jqx.algorithms.awq(group_size=128), "jqx.presets.w4a16(block=32)"),
    "bits of gptq": (lambda: jqx.algorithms.gptq(bits=4), "the policy sets the format"),
    "damping of gptq": (lambda: jqx.algorithms.gptq(percdamp=0.01), "write damping="),
    "order of gptq": (lambda: jqx.algorithms.gptq(desc_act=True), "write order='activation'"),
    "data of gptq": (lambda: jqx.algorithms.gptq(dataset=[X]), "(params, batches)"),
    "alpha": (lambda: jqx.algorithms.smooth_quant(alpha=0.5), "write strength="),
    "iterations": (lambda: jqx.algorithms.adaround(iters=10), "write steps="),
    "a rate": (lambda: jqx.algorithms.auto_round(lr=0.1), "write learning_rate="),
    "a rank": (lambda: jqx.algorithms.loftq(r=8), "write rank="),
    "a scheme for an op": (lambda: jqx.Rule("up", "int8"), "write jqx.Rule('up', weight='int8')"),
    "a group for an op": (lambda: jqx.Rule("up", "int4:group=32"), "weight='int4:group=32'"),
    "a preset for an op": (lambda: jqx.Rule("up", "w8a8"), "jqx.presets.w8a8()"),
    "matmul": (
        lambda: jqx.make_plan(f, jqx.Policy([jqx.Rule("w", "matmul", weight="int8")]))(P, X),
        "write op='dot_general'",
    ),
    "a glob": (lambda: jqx.Policy({"*": "int8"}), "write '.*'"),
    "a glob of a suffix": (lambda: jqx.Policy({"*.up": "int8"}), "write '.*.up'"),
    "a glob that is a regex": (
        lambda: jqx.make_plan(dense, jqx.Policy({"e*": "int8"}), names={"": "exp"})(P["w"], X),
        "write 'e.*'",
    ),
    "all": (lambda: jqx.make_plan(f, jqx.Policy({"all": "int8"}))(P, X), "write '.*'"),
    "a path of PyTorch": (
        lambda: jqx.make_plan(h, jqx.Policy({"a.w.weight": "int8"}))({"a": P}, X),
        "did you mean 'a/w'",
    ),
    "a path of JAX": (
        lambda: jqx.make_plan(h, jqx.Policy({"['a']['w']": "int8"}))({"a": P}, X),
        "did you mean 'a/w'",
    ),
    "a path with params": (
        lambda: jqx.make_plan(f, jqx.Policy({"params/w": "int8"}))(P, X),
        "did you mean 'w'",
    ),
    "bits in a dict": (lambda: jqx.Policy({".*": 8}), 'pass the scheme "int8"'),
    "fields in a dict": (
        lambda: jqx.Policy({".*": {"weight": "int8"}}),
        "write {'.*': jqx.Rule(weight=...)}",
    ),
    "a pair in a dict": (lambda: jqx.Policy({".*": ("int8", "int8")}), "weight=..., activation="),
    "a policy twice": (lambda: jqx.Policy(W8A8), "it is a policy already"),
    "a preset in a policy": (lambda: jqx.Policy(jqx.presets.w8a8), "jqx.presets.w8a8()"),
    "a preset that does not exist": (
        lambda: jqx.Policy("w3a7"),
        "jqx.Policy([jqx.Rule(\".*\", weight='int3', activation='int7')])",
    ),
    "bits that do not exist": (lambda: jqx.Policy("w9a99"), "there are fp8, mxfp8, nf4, w4a16"),
    "an algorithm for a policy": (lambda: jqx.make_plan(f, "gptq"), "jqx.presets.w8a8()"),
    "axis=": (lambda: jqx.per_axis(axis=0), "jqx.per_axis(0)"),
    "the axis of a spec": (lambda: jqx.QSpec("int8", axis=0), "jqx.per_axis(0)"),
    "the group of a spec": (lambda: jqx.QSpec("int4", group_size=32), "jqx.per_group(32)"),
    "a wrong axis of a weight": (
        lambda: jqx.make_plan(f, jqx.Policy({".*": jqx.QSpec("int8", jqx.per_axis(0))}))(P, X),
        "jqx.per_axis(1)",
    ),
    "no such axis of a weight": (
        lambda: jqx.make_plan(f, jqx.Policy({".*": jqx.QSpec("int8", jqx.per_axis(5))}))(P, X),
        "jqx.per_channel()",
    ),
    "a wrong axis of a product": (
        lambda: X @ jqx.QTensor.quantize(P["w"], jqx.QSpec("int8", jqx.per_axis(0))),
        "quantize with jqx.per_axis(1)",
    ),
    "parameters forgotten": (lambda: CONVERTED(X), "quantized.function(quantized.params, x)"),
    "ptq under jit": (
        lambda: traced(jqx.ptq(f, W8A16, progress=False), P, [X]),
        "jax.jit(quantized.function)(quantized.params, x)",
    ),
    "a report under jit": (
        lambda: traced(lambda p: jqx.report(PLAN, p).table().footer, P),
        "call jqx.report outside",
    ),
    "CUDA": (lambda: jqx.ptq(f, W8A16, target="cuda"), "pass 'gpu'"),
    "a batch as a list": (
        lambda: jqx.ptq(lambda p, x, y: f(p, x) + y, W8A16)(P, [[X, X]]),
        "several are a tuple",
    ),
    "labels in a batch": (
        lambda: jqx.ptq(f, W8A16)(P, [(X, np.ones(4))]),
        "Leave out what f does not take, such as labels",
    ),
    "batches of a named tuple": (lambda: jqx.ptq(f, W8A16)(P, Pair(X, X)), "batches: [batch]"),
    "a model for quantize": (lambda: jqx.quantize(f, W8A8), "jqx.nnx.quantize"),
    "a call of convert": (lambda: jqx.convert(f, X), "jqx.convert(f, plan)(params, x)"),
    "a metric of arrays": (
        lambda: jqx.diagnostics.sensitivity(f, W8A16, lambda a, b: a - b, progress=False)(P, X),
        "return one number",
    ),
    "a metric of NumPy": (
        lambda: jqx.diagnostics.sensitivity(
            f, W8A16, lambda a, b: np.mean(np.asarray(a) != b), progress=False
        )(P, X),
        "write it with jax.numpy",
    ),
    "the sensitivity of classes": (
        lambda: jqx.diagnostics.sensitivity(lambda p, x: f(p, x).argmax(-1), W8A16, progress=False)(
            P, X
        ),
        "metric=lambda y, exact: jnp.mean(y != exact)",
    ),
    # what is no array
    "a sum": (lambda: QUANTIZED + 1, "q.dequantize()"),
    "a sum with an array": (lambda: CLOSED + QUANTIZED, "q.dequantize()"),
    "a product with a number": (lambda: 2.0 * QUANTIZED, "q.scaled(factor)"),
    "an order": (lambda: QUANTIZED < 1, "compare q.dequantize()"),
    "an array of it": (lambda: jnp.asarray(QUANTIZED), "q.values for the codes"),
    "scale= of a QTensor": (
        lambda: jqx.QTensor.quantize(X, "int8", scale=1.0),
        "affine=jqx.calibrators.Affine(scale, zero_point)",
    ),
    "a scale of a QTensor": (
        lambda: jqx.QTensor.quantize(X, "int8", np.float32(1)),
        "affine=jqx.calibrators.Affine(scale, zero_point)",
    ),
    "bits= of a QTensor": (
        lambda: jqx.QTensor.quantize(X, bits=8),
        'jqx.QTensor.quantize(x, "int8")',
    ),
    "bits of a QTensor": (lambda: jqx.QTensor.quantize(X, 8), "with one scale for all values"),
    "an einsum of nothing": (lambda: jqx.einsum("ij,jk"), "one term for each operand"),
    # operators and tensors
    "no scale": (lambda: jqx.quantize(X, qtype=jnp.int8), "jqx.QTensor.quantize(x"),
    "a format for a scale": (lambda: jqx.quantize(X, jnp.int8, qtype="int8"), "jax.Array"),
    "no qtype": (lambda: jqx.quantize(X, 1.0), "qtype="),
    "no scale again": (lambda: jqx.dequantize(X), "q.dequantize()"),
    "a QTensor of a dtype": (lambda: jqx.QTensor.quantize(X, jnp.int8), 'the scheme "int8"'),
    "a QTensor of nothing": (lambda: jqx.QTensor.quantize(X), "jqx.QSpec("),
    "a QTensor without qtype": (lambda: jqx.QTensor(X, X), "jqx.QTensor.quantize"),
    "a QTensor in float": (lambda: jqx.QTensor.quantize(X, "float"), 'for example "int8"'),
    "a relative QTensor": (lambda: jqx.QTensor.quantize(X, "int8:channel"), "per_axis"),
    "a target": (lambda: jqx.pack_for(P, "cuda"), "jax.default_backend()"),
    "no target": (lambda: jqx.pack_for(P), 'jqx.pack_for(params, "cpu")'),
    "target first": (lambda: jqx.pack_for("cpu", P), "jax.default_backend()"),
    "no mode": (lambda: jqx.round(X), "jqx.RoundMode"),
    "a state of floats": (lambda: jqx.quantize_state(P, {"w": "float"}), 'for example "int8"'),
    "a state of dtypes": (lambda: jqx.quantize_state(P, {"w": jnp.int8}), "jqx.QSpec("),
    "a state of a spec": (lambda: jqx.quantize_state(P, jqx.QSpec("int8")), "jqx.QSpec("),
    # two steps
    "all at once": (lambda: jqx.make_plan(f, W8A8, P, X), "jqx.make_plan(f, policy)(params, x)"),
    "calibrated at once": (lambda: jqx.calibrate(f, PLAN, P, X), "in two steps"),
    "converted at once": (lambda: jqx.convert(f, PLAN, AFFINES, P, X), "in two steps"),
    "converted with x": (lambda: jqx.convert(f, PLAN, X)(P, X), "jqx.convert(f, plan, affines)"),
    "simulated at once": (lambda: jqx.simulate(f, PLAN, AFFINES, P, X), "in two steps"),
    "compared at once": (lambda: jqx.compare(f, PLAN, AFFINES, P, X), "in two steps"),
    "param=": (lambda: jqx.make_plan(g, W8A8, param=1), "param= is called params="),
    "policy first": (lambda: jqx.make_plan(W8A8, f), "pass the function first"),
    "plan first": (lambda: jqx.convert(PLAN, f), "pass the function first"),
    "a result for f": (lambda: jqx.make_plan(X, W8A8), "pass the function itself"),
    "parameters for f": (lambda: jqx.make_plan(P, W8A8), "in two steps"),
    "a plan for a policy": (lambda: jqx.make_plan(f, PLAN), "jqx.presets.w8a8()"),
    "a plan that is not made": (
        lambda: jqx.convert(f, jqx.make_plan(f, W8A8)),
        "make_plan returns",
    ),
    "a preset for a plan": (lambda: jqx.convert(f, jqx.presets.w8a8), "jqx.presets.w8a8()"),
    "parameters for a plan": (lambda: jqx.simulate(f, P), "jqx.make_plan(f, policy)"),
    "params= of no number": (lambda: jqx.make_plan(f, W8A8, params="w"), "params"),
    "params= too far": (lambda: jqx.make_plan(f, W8A8, params=2)(P, X), "params="),
    # plans and what belongs to them
    "quantized by a policy": (lambda: jqx.quantize_params(P, W8A8), "plan first"),
    "quantized plan": (lambda: jqx.quantize_params(PLAN, P), "jqx.quantize_params(params, plan)"),
    "quantized by statistics": (
        lambda: jqx.quantize_params(P, PLAN, STATS),
        "affines(plan, stats)",
    ),
    "affines of a policy": (lambda: jqx.affines(W8A8, STATS), "plan first"),
    "affines swapped": (lambda: jqx.affines(STATS, PLAN), "jqx.affines(plan, stats)"),
    "affines of a pair": (lambda: jqx.affines(PLAN, (X, STATS)), "out, stats = jqx.calibrate"),
    "affines of a function": (
        lambda: jqx.affines(PLAN, jqx.calibrate(f, PLAN)),
        "call it: out, stats = jqx.calibrate",
    ),
    "affines of affines": (lambda: jqx.affines(PLAN, AFFINES), "what jqx.calibrate returned"),
    "affines of a list": (lambda: jqx.affines(PLAN, [STATS]), "jqx.merge_stats(plan, a, b)"),
    "affines of nothing": (lambda: jqx.affines(PLAN, {}), "jqx.calibrate with the same plan"),
    "no statistics": (lambda: jqx.affines(PLAN), "jqx.affines(plan, stats)"),
    "merged without plan": (lambda: jqx.merge_stats(STATS, STATS), "jqx.merge_stats(plan, a, b)"),
    "merged, plan last": (lambda: jqx.merge_stats(STATS, STATS, PLAN), "merge_stats(plan, a, b)"),
    "merged by a policy": (lambda: jqx.merge_stats(W8A8, STATS, STATS), "plan first"),
    "merged pairs": (lambda: jqx.merge_stats(PLAN, (X, STATS), STATS), "take the second"),
    "statistics for scales": (
        lambda: jqx.convert(f, PLAN, STATS)(P, X),
        "these are statistics: pass jqx.affines(plan, stats)",
    ),
    "a pair for scales": (lambda: jqx.simulate(f, PLAN, (X, STATS))(P, X), "out, stats ="),
    "no scales": (lambda: jqx.convert(f, PLAN)(P, X), 'affines="dynamic"'),
    "empty scales": (lambda: jqx.convert(f, PLAN, {})(P, X), "jqx.affines(plan, stats)"),
    "a word for scales": (lambda: jqx.convert(f, PLAN, "auto")(P, X), "jqx.affines(plan, stats)"),
    "batches swapped": (
        lambda: jqx.calibrate_batches(f, P, PLAN, [X]),
        "calibrate_batches(f, plan, params, batches)",
    ),
    "batches of a policy": (lambda: jqx.calibrate_batches(f, W8A8, P, [X]), "plan first"),
    "batches of a dict": (lambda: jqx.calibrate_batches(f, PLAN, P, {"x": X}), "[batch]"),
    "no batches": (lambda: jqx.calibrate_batches(f, PLAN, P, []), "create the generator again"),
    "missing batches": (lambda: jqx.calibrate_batches(f, PLAN, P), "params, batches)"),
    "a batch of words": (
        lambda: jqx.calibrate_batches(f, PLAN, P, [("text",)], progress=False),
        "jnp.asarray",
    ),
    "a number for batches": (lambda: jqx.calibrate_batches(f, PLAN, P, 3), "pass a list"),
    "an array for batches": (lambda: jqx.calibrate_batches(f, PLAN, P, X), "batches: [x]"),
    "an array for ptq": (lambda: jqx.ptq(f, W8A8)(P, jnp.asarray(X)), "batches: [x]"),
    "batches alone": (lambda: jqx.ptq(f, W8A8)([X]), "pass the parameters, and a list"),
    "batches apart": (lambda: jqx.ptq(f, W8A8)(P, X, X), "pass the parameters, and a list"),
    "reported, swapped": (lambda: jqx.report(P, PLAN), "jqx.report(plan, params)"),
    "reported policy": (lambda: jqx.report(W8A8, P), "plan first"),
    "explained by a preset": (
        lambda: jqx.explain(f, P, X, plan=jqx.presets.w8a16),
        "jqx.presets.w8a16()",
    ),
    "searched presets": (
        lambda: jqx.diagnostics.search(f, PLAN, {"a": jqx.presets.w8a16}, None),
        "jqx.presets.w8a16()",
    ),
    "saved, swapped": (lambda: jqx.save(P, "model.safetensors"), "jqx.save(path, tree)"),
    "saved nothing": (lambda: jqx.save("model.safetensors"), "jqx.save("),
    "loaded tree": (lambda: jqx.load(P), "path"),
    # arguments of f
    "x of another shape": (
        lambda: traced(jqx.simulate(f, PLAN, AFFINES), P, X[:, 1:]),
        "call f itself",
    ),
    "x of another rank": (
        lambda: traced(jqx.convert(f, PLAN, AFFINES), P, X[None]),
        "give it the axes that it had",
    ),
    "mapped over the batch": (
        lambda: traced(jax.vmap(jqx.convert(f, PLAN, AFFINES), (None, 0)), P, X),
        "map inside: result.bind(jax.vmap(f, in_axes=(None, 0)))(x)",
    ),
    "mapped over weights": (
        lambda: traced(
            jax.vmap(jqx.convert(f, PLAN, AFFINES)), {"w": X.T, "v": P["v"][:1].repeat(64, 0)}, X.T
        ),
        "in_axes=(None, 0)",
    ),
    "mapped over all": (
        lambda: traced(
            jax.vmap(
                jqx.convert(lambda w, x: x @ w, jqx.make_plan(lambda w, x: x @ w, W8A16)(X, X.T))
            ),
            X,
            X,
        ),
        "in_axes=(None, 0)",
    ),
    "x forgotten": (lambda: jqx.make_plan(f, W8A8)(P), "pass the arguments of f"),
    "x twice": (lambda: jqx.make_plan(f, W8A8)(P, X, X), "pass the arguments of f"),
    "no arguments": (lambda: jqx.make_plan(f, W8A8)(), "positional argument"),
    "x first": (lambda: jqx.make_plan(f, W8A8)(X, P), "call f itself"),
    "x first, planned": (
        lambda: traced(jqx.simulate(f, PLAN, AFFINES), X, P),
        "argument 1 has them: pass the arguments in the order of f",
    ),
    "parameters in a dict": (
        lambda: traced(jqx.convert(f, PLAN, AFFINES), {"params": P}, X),
        "make the plan again",
    ),
    "other parameters": (lambda: jqx.make_plan(f, W8A8)({"kernel": P["w"]}, X), "call f itself"),
    "other weights": (
        lambda: jqx.quantize_params({"w": P["w"][:, 1:], "v": P["v"]}, PLAN),
        "make the plan again",
    ),
    "another function": (
        lambda: traced(jqx.convert(lambda p, x: f(p, x) @ p["v"], PLAN, AFFINES), P, X),
        "make the plan again",
    ),
    "numpy inside": (
        lambda: jqx.make_plan(lambda p, x: np.dot(np.asarray(x), p["w"]), W8A16)(P, X),
        "write f with jax.numpy",
    ),
    "a branch on a value": (
        lambda: jqx.make_plan(lambda p, x: x @ p["w"] if x.sum() > 0 else x, W8A16)(P, X),
        "write f with jax.numpy",
    ),
    # weights where jqx does not look for them
    "x, params": (lambda: jqx.make_plan(g, W8A16)(X, P), "pass params=1"),
    "x, a list": (lambda: jqx.make_plan(lambda x, p: x @ p[0], W8A16)(X, [P["w"]]), "params=1"),
    "x, params by name": (lambda: jqx.make_plan(g, W8A16)(X, params=P), "by position"),
    "tokens, params": (
        lambda: jqx.make_plan(lambda t, p: p["w"][t] @ p["v"].T, W8A16)(np.zeros((2, 3), int), P),
        "its position as params=",
    ),
    "a closure": (lambda: jqx.make_plan(lambda x: x @ CLOSED, W8A16)(X), "f(params, x)"),
    "a jitted closure": (
        lambda: jqx.make_plan(jax.jit(lambda x: jnp.tanh(x @ CLOSED)), W8A16)(X),
        "f(params, x)",
    ),
    "a closure, with a policy": (
        lambda: traced(jqx.convert(lambda x: x @ CLOSED, W8A16), X),
        "f(params, x)",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_likely_mistake_is_an_error_that_names_the_mend(name):
    mistake, mend = MISTAKES[name]
    with pytest.raises(Exception, match=r"^jqx\.") as refusal:
        mistake()
    text = str(refusal.value)
    assert issubclass(refusal.type, (TypeError, ValueError, OSError)), text
    assert re.fullmatch(PARTS, text), text
    assert mend in text, text
    assert not re.search(r"Traced<|Array\(|<function|<locals>", text), text


def decayed(params, x):
    return f(params, x) + jnp.sin(params["w"]).sum()


def returned(params, x):
    return f(params, x), params["w"].T


def updated(params, x, cache):
    return f(params, x) + jnp.sin(cache).sum()


MAKE = (
    "use jqx.hoist, or ptq(hoist='all'); leave it in float with jqx.Rule('w') first in the policy; "
    'or pass unsupported="dequantize" to both jqx.make_plan and jqx.convert.'
)
CONVERT = 'or convert with jqx.convert(f, plan, affines, unsupported="dequantize").'
LEFT = jqx.Policy([jqx.Rule("w")]) + W8A16
NEAREST = jqx.algorithms.nearest()
ODD = {"a+b": P["w"], "v": P["v"]}


def odd(params, x):
    return decayed({"w": params["a+b"], "v": params["v"]}, x)


def in_steps(function, policy, *args):
    plan = jqx.make_plan(function, policy, unsupported="dequantize")(*args)
    return traced(jqx.convert(function, plan, unsupported="dequantize"), *args)


def hoisted():
    g, computed = jqx.hoist(decayed)(P, X)
    return jqx.make_plan(g, W8A16)(computed, X)


NO_QUANTIZED_FORM = {
    "planned": (
        lambda: jqx.make_plan(decayed, W8A16)(P, X),
        MAKE,
        [
            hoisted,
            lambda: jqx.make_plan(decayed, LEFT)(P, X),
            lambda: in_steps(decayed, W8A16, P, X),
        ],
    ),
    "in ptq": (
        lambda: jqx.ptq(decayed, W8A16, progress=False)(P, [X]),
        MAKE,
        [
            lambda: jqx.ptq(decayed, W8A16, NEAREST, hoist="all", progress=False)(P, [X]),
            lambda: jqx.ptq(decayed, LEFT, NEAREST, progress=False)(P, [X]),
        ],
    ),
    "with a path that is no pattern of itself": (
        lambda: jqx.make_plan(odd, W8A16)(ODD, X),
        MAKE.replace("'w'", "'a\\\\+b'"),
        [lambda: jqx.make_plan(odd, jqx.Policy([jqx.Rule("a\\+b")]) + W8A16)(ODD, X)],
    ),
    "in the result of ptq, bound": (
        lambda: jqx.ptq(f, W8A16, NEAREST, progress=False)(P, [X]).bind(decayed)(X),
        f"leave it in float with jqx.Rule('w') first in the policy, {CONVERT}",
        [
            lambda: jqx.ptq(f, LEFT, NEAREST, progress=False)(P, [X]).bind(decayed)(X),
            lambda: in_steps(decayed, W8A16, P, X),
        ],
    ),
    "of an argument": (
        lambda: traced(jqx.convert(updated, W8A16), P, X, QUANTIZED),
        f"pass it as an array, x.dequantize(), {CONVERT}",
        [
            lambda: traced(jqx.convert(updated, W8A16), P, X, QUANTIZED.dequantize()),
            lambda: in_steps(updated, W8A16, P, X, QUANTIZED),
        ],
    ),
    "of parameters that the policy leaves out": (
        lambda: traced(jqx.convert(decayed, jqx.Policy({"v": "int8"})), {**P, "w": CODES}, X),
        f"pass it as an array, x.dequantize(), {CONVERT}",
        [lambda: in_steps(decayed, jqx.Policy({"v": "int8"}), {**P, "w": CODES}, X)],
    ),
    "returned": (
        lambda: traced(jqx.convert(returned, W8A16), P, X),
        "pass jqx.quantize_params(params, plan), or leave the weight out of the result.",
        [lambda: traced(jqx.convert(returned, W8A16), {**P, "w": CODES}, X)],
    ),
}


@pytest.mark.parametrize("name", NO_QUANTIZED_FORM)
def test_a_weight_without_a_quantized_form_is_an_error_whose_mends_work(name):
    mistake, mend, mends = NO_QUANTIZED_FORM[name]
    with pytest.raises(NotImplementedError) as refusal:
        mistake()
    text = str(refusal.value)
    assert re.fullmatch(PARTS, text), text
    assert text.partition("fix:      ")[2] == mend
    for follow in mends:
        follow()


UNKNOWN = {
    "an algorithm": (lambda: jqx.gptq, "jqx.algorithms.gptq"),
    "a diagnostic": (lambda: jqx.sensitivity, "jqx.diagnostics.sensitivity"),
    "an estimator": (lambda: jqx.lsq, "jqx.gradients.lsq"),
    "a preset": (lambda: jqx.w8a8, "jqx.presets.w8a8"),
    "a preset that does not exist": (lambda: jqx.presets.w8a8_dyn, "w8a8_dynamic"),
    "an estimator among calibrators": (lambda: jqx.calibrators.lsq, "jqx.gradients.lsq"),
    "a calibrator": (lambda: jqx.calibrators.max, "absmax"),
    "Qwix's array": (lambda: jqx.QArray, "it is called jqx.QTensor"),
    "Qwix's rule": (lambda: jqx.QuantizationRule, "it is called jqx.Rule"),
    "a model": (lambda: jqx.quantize_model, "it is called jqx.ptq"),
    "training": (lambda: jqx.qat, "it is called jqx.simulate"),
    "rounding": (lambda: jqx.algorithms.rtn, "it is called jqx.algorithms.nearest"),
    "at": (lambda: QUANTIZED.at, "jqx.dynamic_update_slice(q, update, starts)"),
    "dot": (lambda: QUANTIZED.dot, "write q @ x"),
    "sum": (lambda: QUANTIZED.sum, "q.dequantize().sum"),
    "flatten": (lambda: QUANTIZED.flatten, "q.reshape(-1)"),
    "int_repr": (lambda: QUANTIZED.int_repr, "q.values"),
    "numpy": (lambda: QUANTIZED.numpy, "numpy.asarray(q.dequantize())"),
    "scales": (lambda: QUANTIZED.scales, "did you mean q.scale?"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_name_says_where_it_is(name):
    mistake, mend = UNKNOWN[name]
    with pytest.raises(AttributeError) as refusal:
        mistake()
    assert mend in str(refusal.value)


OF_JAX = {
    "dot": lambda: jnp.dot(CLOSED.T, QUANTIZED),
    "x.dot": lambda: CLOSED.T.dot(QUANTIZED),
    "einsum": lambda: jnp.einsum("ij,jk", CLOSED.T, QUANTIZED),
    "sum": lambda: jnp.sum(QUANTIZED),
    "relu": lambda: jax.nn.relu(QUANTIZED),
    "take": lambda: jnp.take(QUANTIZED, 0, axis=0),
    "dot_general": lambda: jax.lax.dot(CLOSED.T, QUANTIZED),
}


@pytest.mark.parametrize("name", OF_JAX)
def test_errors_of_jax_for_a_quantized_array_name_what_to_write(name):
    with pytest.raises(TypeError, match=r"jqx\.QTensor.*x @ q, jqx\.matmul.*q\.dequantize\(\)"):
        OF_JAX[name]()


def test_names_of_algorithms_and_presets_in_messages_exist():
    from jqx._src.tensor.spec import PRESETS
    from jqx._src.transforms.algorithm import NAMES

    assert sorted(PRESETS) == sorted(x for x in dir(jqx.presets) if not x.startswith("_"))
    kinds = {name: getattr(jqx.algorithms, name) for name in NAMES}
    assert all(isinstance(kind, type) for kind in kinds.values())


@pytest.mark.parametrize("function", ["make_plan", "ptq"])
def test_parameters_of_integers_are_named(function):
    p, x = {"up": jnp.ones((8, 8), jnp.int32), "down": jnp.ones((8, 4))}, jnp.ones((2, 8))

    def f(p, x):
        return (x @ p["up"].astype(x.dtype)) @ p["down"]

    def call(policy):
        if function == "make_plan":
            return jqx.make_plan(f, policy)(p, x)
        return jqx.ptq(f, policy, jqx.algorithms.nearest(), progress=False)(p, [x]).plan

    with pytest.warns(UserWarning, match=r"(?s)parameters of integers.*'up' of int32.*fix:"):
        plan = call(jqx.presets.w8a16())
    assert [weight.path for weight in plan.weights] == ["down"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(jqx.Policy({"up": None, "down": "int8"}))
