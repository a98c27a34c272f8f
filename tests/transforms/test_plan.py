import io
import re

import jax.numpy as jnp
import pytest

import jqx
from jqx.presets import w8a8, w8a8_dynamic

from ..models.transforms import mlp, mlp_params, normal, plan_of

X = normal(3, 7, 16)

TABLE = """\
path  op           shapes           weight            activation       rule
---------------------------------------------------------------------------------------
w     dot_general  [7,16] x [16,24]  int8 per_axis(1)  int8 per_tensor  1
v     dot_general  [7,24] x [24,5]   -                 -                rule 0 leaves it in float
1 of 2 contractions quantized, 76.2 % of the multiply-adds"""


def test_a_plan_prints_every_contraction_and_why_it_is_left_alone():
    policy = jqx.Policy([jqx.Rule("v"), *w8a8().rules])
    lines = str(plan_of(mlp, policy, mlp_params(), X)).splitlines()
    assert [line.split() for line in lines if "---" not in line] == [
        line.split() for line in TABLE.splitlines() if "---" not in line
    ]


def test_a_plan_is_a_value():
    first, second = (plan_of(mlp, w8a8(), mlp_params(), X) for _ in range(2))
    assert first == second and len({first, second}) == 1
    assert first != plan_of(mlp, w8a8_dynamic(), mlp_params(), X)


def test_the_fingerprint_is_that_of_the_function_not_of_the_policy():
    params = mlp_params()
    plans = [plan_of(mlp, policy, params, X) for policy in (w8a8(), w8a8_dynamic())]
    assert plans[0].fingerprint == plans[1].fingerprint
    wider = {**params, "v": jnp.zeros((6, 24))}
    assert plan_of(mlp, w8a8(), wider, X).fingerprint != plans[0].fingerprint


def test_a_path_gives_its_contractions():
    policy = jqx.Policy([jqx.Rule("v"), *w8a8().rules])
    plan = plan_of(mlp, policy, mlp_params(), X)
    assert plan["w"] == plan.sites and plan["v"] == plan.skipped
    with pytest.raises(KeyError, match="no contraction has the path") as info:
        plan["ww"]
    assert "such as w" in str(info.value)


def test_rich_prints_the_same_cells_as_a_table():
    console = pytest.importorskip("rich.console")
    plan = plan_of(mlp, jqx.presets.w8a8("w"), mlp_params(), normal(0, 4, 16))
    file = io.StringIO()
    console.Console(width=200, file=file).print(plan)
    text = file.getvalue()
    assert str(plan).splitlines()[-1] in text
    for line in str(plan).splitlines()[2:-1]:
        assert all(cell in text for cell in re.split(r"  +", line))
