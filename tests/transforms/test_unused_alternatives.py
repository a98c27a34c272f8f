"""The warning about an alternative in the path of a rule that matches nothing."""

import re
import warnings

import jax
import jax.numpy as jnp
import pytest

import jqx

X = jax.ShapeDtypeStruct((2, 4), jnp.float32)
W = jax.ShapeDtypeStruct((4, 4), jnp.float32)
PARAMS = {name: {"kernel": W, "bias": X} for name in ("embed", "head", "up")}


def model(params, x):
    for layer in params.values():
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
    with jax.named_scope("scores"):
        return x @ x.T


def planned(policy):
    return jqx.make_plan(model, policy)(PARAMS, X)


def test_a_warning_names_the_rule_the_alternative_and_the_nearest_path():
    policy = jqx.Policy({"(embed|haed)/kernel": "float", ".*": "int8"})
    with pytest.warns(UserWarning) as record:
        planned(policy)
    (warning,) = record
    assert warning.filename == __file__
    assert str(warning.message) == (
        "jqx.make_plan: rule 0 of the policy has alternatives without a match.\n"
        "  given:    'haed' in Rule('(embed|haed)/kernel')\n"
        "  fix:      did you mean 'head/kernel'? Or drop them, or pass optional=True for a policy "
        "of several models."
    )


@pytest.mark.parametrize(
    ("rules", "fact"),
    [
        (jqx.presets.w8a16(exclude="(embed|heads)/.*").rules, "'heads' in Rule('(embed|heads)/"),
        ([jqx.Rule("(?:embed|no|none)/.*", weight="int8")], "'no', 'none' in Rule"),
        ([jqx.Rule("embed/kernel|head", weight="int8")], "write 'head/.*'."),
        ([jqx.Rule("embed/kernel|.*query.*", weight="int8")], "correct the path."),
    ],
)
def test_it_warns_of_every_rule_that_has_one(rules, fact):
    with pytest.warns(UserWarning, match=re.escape(fact)) as record:
        planned(jqx.Policy(rules))
    assert len(record) == 1


SILENT = {
    "all match": [jqx.Rule("(embed|head)/kernel|up/.*", weight="int8")],
    "a path of a parameter": [jqx.Rule("(embed|up)/(kernel|bias)", weight="int8")],
    "a path without a weight": [jqx.Rule("embed/.*|scores", activation="int8")],
    "taken by an earlier rule": [
        jqx.Rule("up.*", weight="int8"),
        jqx.Rule("(up|head)/.*", weight="int8"),
    ],
    "optional": [jqx.Rule("(embed|none)/.*", weight="int8", optional=True)],
    "repeated": [jqx.Rule("(em|bed|/|kernel)+", weight="int8")],
    "empty": [jqx.Rule("embed/kernel(|_2|_3)", weight="int8")],
    "may be absent": [jqx.Rule("embed/(a|b)?kernel", weight="int8")],
    "flags": [jqx.Rule("(?i)EMBED/kernel|none", weight="int8")],
    "a lookahead": [jqx.Rule("(?=.*(embed|none)).*", weight="int8")],
    "names": [jqx.Rule("(?P<first>embed|none)/kernel", weight="int8")],
    "counts": [jqx.Rule("(embed|none){1}/kernel", weight="int8")],
    "an escape": [jqx.Rule(r"embed\|?/kernel", weight="int8")],
    "a set": [jqx.Rule("[embd|]*/kernel", weight="int8")],
}


@pytest.mark.parametrize("rules", SILENT.values(), ids=SILENT)
def test_it_raises_no_false_alarm(rules):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        planned(jqx.Policy(rules))


def test_steps_of_a_scan_are_paths():
    def scanned(params, x):
        return jax.lax.scan(lambda x, w: (x @ w, None), x, params["layers"])[0]

    params = {"layers": jax.ShapeDtypeStruct((3, 4, 4), jnp.float32)}
    rules = {"layers[0]|layers[-1]": "int8", "layers.*": "int4"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match="selects steps twice"):
            jqx.make_plan(scanned, jqx.Policy(rules))(params, X)
        jqx.make_plan(scanned, jqx.Policy({"(layers)[0]": "int8", ".*": "int4"}))(params, X)
    with pytest.warns(UserWarning, match="'blocks' in Rule"):
        jqx.make_plan(scanned, jqx.Policy({"(layers|blocks)": "int8"}))(params, X)


def test_one_call_of_ptq_warns_once():
    params = jax.tree.map(lambda x: jnp.ones(x.shape), PARAMS)
    policy = jqx.presets.w8a16("(embed|none)/.*")
    with pytest.warns(UserWarning) as record:
        jqx.ptq(model, policy, jqx.algorithms.nearest(), target=False, progress=False)(
            params, [jnp.ones(X.shape)]
        )
    assert len(record) == 1
