"""Decoders of MaxText: the sites of its own quantization, and its kernel for experts."""

import importlib
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqx
import jqx.nnx
from jqx.extend import primitive_rules
from jqx.interop import from_qwix

from .test_qwix import recording

pytestmark = [pytest.mark.bench, pytest.mark.filterwarnings("ignore")]

SETTINGS = {
    "base_emb_dim": 64,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "head_dim": 16,
    "base_mlp_dim": 128,
    "base_num_decoder_layers": 2,
    "vocab_size": 128,
    "max_target_length": 24,
    "per_device_batch_size": 3,
    "dtype": "float32",
    "attention": "dot_product",
    "hardware": "cpu",
    "dataset_type": "synthetic",
    "enable_checkpointing": False,
    "skip_jax_distributed_system": True,
    "run_name": "jqx",
}
EXPERTS = {
    "decoder_block": "mixtral",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "base_moe_mlp_dim": 128,
}
TOKENS = jax.random.randint(jax.random.key(2), (3, 24), 0, 128)
POSITIONS = jnp.broadcast_to(jnp.arange(24), (3, 24))


@pytest.fixture
def make(tmp_path, monkeypatch):
    package = pytest.importorskip("maxtext")
    monkeypatch.chdir(tmp_path)
    names = "configs.pyconfig", "utils.maxtext_utils", "utils.model_creation_utils"
    pyconfig, utils, creation = (importlib.import_module(f"maxtext.{name}") for name in names)

    def made(**settings):
        base = pathlib.Path(package.__file__).parent / "configs" / "base.yml"
        config = pyconfig.initialize(["", str(base)], **SETTINGS, **settings)
        mesh = jax.sharding.Mesh(utils.create_device_mesh(config), config.mesh_axes)
        rngs = nnx.Rngs(params=0, dropout=1)
        return creation.from_config(config, mesh=mesh, rngs=rngs)

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield made


def function_of(model):
    """The model without what its router of experts writes."""
    f, params = jqx.nnx.pure(model, enable_dropout=False, mutable=True)
    return (lambda *args: f(*args)[0]), params


def quantized_by_maxtext(make, monkeypatch, name, **settings):
    """A decoder that MaxText quantizes, and the modules whose products it quantizes."""
    quantizations = importlib.import_module("maxtext.layers.quantizations")
    rules_of = quantizations.get_quantization_rule
    modules = []

    def provider(config):
        recorder, found = recording(importlib.import_module("qwix"), rules_of(config))
        modules.append(found)
        return recorder

    with monkeypatch.context() as patched:
        patched.setattr(quantizations, "get_qt_provider", provider)
        model = make(quantization=name, use_qwix_quantization=True, **settings)
    return model, {*modules[0]}


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("name", ["int4", "int8", "fp8", "fp8_e5m2", "fp8_full", "fp8_gpu"])
def test_the_sites_of_a_quantization_are_those_of_maxtext(make, monkeypatch, name, scan):
    theirs, modules = quantized_by_maxtext(make, monkeypatch, name, scan_layers=scan)
    policy = from_qwix(name, merge_einsum=True)
    f, params = function_of(make(scan_layers=scan))
    plan = jqx.make_plan(f, policy)(params, TOKENS, POSITIONS)
    assert {site.path.rpartition("/")[0] for site in plan.sites} == modules
    assert len(plan.sites) == (7 if scan else 14)
    if name in ("int4", "fp8_gpu"):  # XLA on CPU stops at the first, and the second is of Flax
        return
    recipe = jqx.recipes.Recipe(name, {rule.path: rule.products for rule in policy.rules})
    y = jqx.train(f, plan, recipe)(params, {}, TOKENS, POSITIONS)
    expected = theirs(TOKENS, POSITIONS, enable_dropout=False)
    if name == "int8" and not scan:
        np.testing.assert_array_equal(y, expected)
    else:  # XLA rearranges how Qwix rounds, and a code may be the next one
        assert float(jnp.linalg.norm(y - expected) / jnp.linalg.norm(expected)) < 0.02


def test_experts_are_left_in_float_as_by_maxtext(make, monkeypatch):
    settings = {"megablox": False, **EXPERTS}
    _, modules = quantized_by_maxtext(make, monkeypatch, "int8", **settings)
    f, params = function_of(make(**settings))
    policy = from_qwix("int8", merge_einsum=True)
    plan = jqx.make_plan(f, policy)(params, TOKENS, POSITIONS)
    assert {site.path.rpartition("/")[0] for site in plan.sites} == modules
    assert len(plan.sites) == 5 and all(site.op == "dot_general" for site in plan.sites)


def grouped(lhs, rhs, sizes, *offset):
    return jax.lax.ragged_dot(lhs, rhs, sizes, preferred_element_type=lhs.dtype)


@pytest.mark.parametrize("scheme", ["int8", "int4:group=32", "w8a8_dynamic"])
def test_experts_are_quantized_through_its_own_megablox(make, scheme):
    policy = jqx.Policy({".*layers.*": getattr(jqx.presets, scheme, lambda: scheme)()})
    nearest = jqx.algorithms.nearest()
    results = []
    with primitive_rules({"gmm": grouped}):
        for megablox in (True, False):
            f, params = function_of(make(megablox=megablox, **EXPERTS))
            quantized = jqx.ptq(f, policy, nearest)(params, [(TOKENS, POSITIONS)])
            sites = [(site.path, site.op) for site in quantized.plan.sites]
            y = jax.jit(quantized.function)(quantized.params, TOKENS, POSITIONS)
            results.append((sites, y))
    (sites, y), (same_sites, same) = results
    assert sites == same_sites and [op for _, op in sites].count("ragged_dot") == 3
    np.testing.assert_array_equal(y, same)
    expected = f(params, TOKENS, POSITIONS)
    assert float((y * expected).sum() / jnp.linalg.norm(y) / jnp.linalg.norm(expected)) > 0.99
