"""Sizes at which kernels apply, for each target: traced on shapes alone, never evaluated."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import jqx

from .normal_forms import kernels_form

TARGETS = "cpu", "gpu", "tpu"


def _dense(p, step, rows):
    return step @ p["w"], rows @ p["w"], step @ p["v"].T


def _conv(p, x):
    dims = ("NHWC", "HWIO", "NHWC")
    conv = lambda w, **how: lax.conv_general_dilated(  # noqa: E731
        x, w, (1, 1), "SAME", dimension_numbers=dims, **how
    )
    return conv(p["full"]), conv(p["deep"], feature_group_count=128)


def _experts(p, x, counts):
    each = lax.ragged_dot(x, p["w"], counts)
    return each, jnp.einsum("bd,edf->ebf", x[:8], p["w"])


def _cache(p, token, keys, values):
    k, v = (x.at[:, 5].set(token @ p["w"]) for x in (keys, values))
    scores = jax.nn.softmax(jnp.einsum("bd,bsd->bs", token @ p["w"], k))
    return jnp.einsum("bs,bsd->bd", scores, v)


def _f32(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


_COUNTS = jax.ShapeDtypeStruct((8,), jnp.int32)

WIDE: dict[str, tuple[Any, Any, tuple[Any, ...]]] = {
    "dense": (
        _dense,
        {"w": _f32(512, 1024), "v": _f32(1024, 512)},
        (_f32(1, 512), _f32(256, 512)),
    ),
    "conv": (
        _conv,
        {"full": _f32(3, 3, 128, 256), "deep": _f32(3, 3, 1, 128)},
        (_f32(2, 16, 16, 128),),
    ),
    "experts": (_experts, {"w": _f32(8, 256, 512)}, (_f32(256, 256), _COUNTS)),
    "cache": (
        _cache,
        {"w": _f32(256, 256)},
        (_f32(8, 256), _f32(8, 512, 256), _f32(8, 512, 256)),
    ),
}
"""Functions, shapes of their weights, and shapes of a batch."""


def wide_form(kind: str, preset: str, target: str) -> Any:
    """The contractions and kernels of a function whose weights are laid out for a target."""
    f, params, batch = WIDE[kind]
    plan = jqx.make_plan(f, getattr(jqx.presets, preset)())(params, *batch)
    codes = jqx.quantize_params(params, plan, target=target)
    return kernels_form(jax.make_jaxpr(jqx.convert(f, plan, "dynamic"))(codes, *batch))
