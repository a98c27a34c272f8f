"""The comparisons see one changed code, scale, field of a plan, contraction or result."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx

from .cases import Learned
from .comparisons import check_form, check_learned
from .normal_forms import codes_form, kernels_form, plan_form
from .record import recorded


def plan():
    f = lambda p, x: (x @ p["w"]) @ p["v"]  # noqa: E731
    params = {"w": jnp.ones((4, 3)), "v": jnp.ones((3, 2))}
    return jqx.make_plan(f, jqx.presets.w8a8("w"))(params, jnp.ones((2, 4)))


def with_first(plan, field, **changes):
    first, *rest = getattr(plan, field)
    return dataclasses.replace(plan, **{field: (dataclasses.replace(first, **changes), *rest)})


def with_next_code(values):
    x = np.array(values)
    x.view(np.int8)[2, 1] += 1
    return jnp.asarray(x)


INT4 = jqx.QSpec("int4", jqx.per_axis(1))


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("sites", {"address": (7,)}),
        ("sites", {"rule": 1}),
        ("sites", {"output": INT4}),
        ("sites", {"macs": 25}),
        ("weights", {"spec": INT4}),
        ("weights", {"sites": 2}),
        ("weights", {"contracted": -1}),
        ("skipped", {"reason": "an operand is drawn at random in f"}),
        ("skipped", {"shapes": ((2, 3), (3, 3))}),
    ],
)
def test_one_field_of_a_plan_is_seen(field, changes):
    check = partial(check_form, "plan", plan_form(plan()))
    check(plan_form(plan()))
    with pytest.raises(AssertionError, match="plan differs"):
        check(plan_form(with_first(plan(), field, **changes)))


def test_the_text_of_a_reason_is_no_difference():
    skipped = with_first(plan(), "skipped", reason="no rule matches it at all")
    check_form("plan", plan_form(plan()), plan_form(skipped))


@pytest.mark.parametrize(
    "change",
    [
        lambda q: dataclasses.replace(q, values=with_next_code(q.values)),
        lambda q: dataclasses.replace(q, scale=q.scale.at[0, 1].multiply(1 + 2.0**-22)),
        lambda q: dataclasses.replace(q, dtype=jnp.bfloat16),
        lambda q: q.transpose(),
    ],
)
@pytest.mark.parametrize("qtype", ["int8", "float8_e4m3fn"])
def test_one_bit_of_rounded_weights_is_seen(change, qtype):
    x = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    q = jqx.QTensor.quantize(x, jqx.QSpec(qtype, jqx.per_axis(1)))
    check_form("codes", codes_form({"w": q}), codes_form({"w": dataclasses.replace(q)}))
    with pytest.raises(AssertionError, match="codes differs"):
        check_form("codes", codes_form({"w": q}), codes_form({"w": change(q)}))


A, B = jnp.ones((4, 6), jnp.int8), jnp.ones((6, 3), jnp.int8)


def product(a, b, out=jnp.int32):
    return lax.dot(a, b, preferred_element_type=out)


def form_of(f, *args):
    return kernels_form(jax.make_jaxpr(f)(*args))


PRODUCT = form_of(product, A, B)


@pytest.mark.parametrize(
    "form",
    [
        form_of(partial(product, out=jnp.float32), A, B),
        form_of(product, A.astype(jnp.int16), B.astype(jnp.int16)),
        form_of(product, A[:2], B),
        form_of(product, A[:, :5], B[:5]),
        form_of(product, A, B[:, :2]),
        form_of(jax.vmap(product), A.reshape(2, 2, 6), jnp.stack([B, B])),
        form_of(lambda a, b: product(a, b) + product(a + a, b), A, B),
        form_of(lambda a, b: a @ b.astype(jnp.int8), A, B),
        form_of(lambda a, b: a, A, B),
        form_of(lambda a, b: lax.map(lambda x: product(x, b), a[:, None]), A, B),
    ],
)
def test_one_contraction_is_seen(form):
    with pytest.raises(AssertionError, match="kernels differs"):
        check_form("kernels", PRODUCT, form)


def test_the_same_contractions_written_otherwise_are_no_difference():
    otherwise = [
        lambda a, b: product(b.T, a.T).T,
        lambda a, b: jax.jit(product)(a + 0, b) * 2,
        lambda a, b: (product(a, b), product(a * 2, b))[0],
        lambda a, b: lax.cond(
            a[0, 0] > 0, product, lambda a, b: jnp.zeros((4, 3), jnp.int32), a, b
        ),
    ]
    for f in otherwise:
        check_form("kernels", PRODUCT, form_of(f, A, B))
    scanned = form_of(lambda a, b: lax.map(lambda x: product(x, b), a[:, None]), A, B)
    assert list(scanned.values()) == [[4, 4, 4]]


def of_platforms(a, b):
    wide = lambda a, b: product(a.astype(jnp.int16), b.astype(jnp.int16))  # noqa: E731
    return lax.platform_dependent(a, b, cpu=product, default=wide)


def test_platforms_are_told_apart():
    counts = {"int16" in name: each for name, each in form_of(of_platforms, A, B).items()}
    assert counts == {False: [1, 0, 0], True: [0, 1, 1]}


@pytest.fixture
def gptq():
    """What is recorded of GPTQ on the largest weights of 4 bits."""
    return recorded("gptq")["decoder/w4a16"]


def changed(learned, field, change):
    x = np.array(getattr(learned, field))
    change(x)
    return learned._replace(**{field: x})


def add(count, value):
    def change(x):
        x[:count] += np.asarray(value, x.dtype)

    return change


@pytest.mark.parametrize(
    ("field", "change", "words"),
    [
        ("codes", add(2, 1), "codes differ"),
        ("codes", add(1, 2), "2 steps away"),
        ("floats", lambda x: np.multiply(x, 1 + 2.0**-15, out=x), "floats"),
        ("results", add(1, 2.0**-7), "results differ"),
        ("results", add(1, 100), "results differ by"),
    ],
)
def test_what_is_learned_may_not_differ_by_more(gptq, field, change, words):
    check_learned([("decoder/w4a16/gptq", [gptq], Learned(*map(np.array, gptq)))])
    other = changed(gptq, field, change)
    with pytest.raises(AssertionError, match=words):
        check_learned([("decoder/w4a16/gptq", [gptq], other)])
    check_learned([("decoder/w4a16/gptq", [gptq, other], other)])  # on another processor


@pytest.mark.parametrize(("field", "value"), [("codes", 1), ("results", 2.0**-16)])
def test_what_is_learned_may_differ_as_rounding_does(gptq, field, value):
    check_learned([("decoder/w4a16/gptq", [gptq], changed(gptq, field, add(1, value)))])


def test_a_case_that_is_missing_is_seen(gptq):
    for pair in [([gptq], None), ([], gptq)]:
        with pytest.raises(AssertionError, match="case"):
            check_learned([("case", *pair)])
    with pytest.raises(AssertionError, match="codes, not"):
        check_learned([("case", [gptq], gptq._replace(codes=gptq.codes[1:]))])
