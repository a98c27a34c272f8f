"""The stored vectors in `vectors/`, results of real runtimes and of an independent model.

Each case is evaluated in several ways, which must give the same bits. Each .npz holds a JSON
manifest and one blob, without pickle. 16-bit and 8-bit floats that NumPy lacks come back as their
ml_dtypes types; rank-0 operands are stored with shape (1,).
"""

import json
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from ..arrays import on_device

VECTORS = pathlib.Path(__file__).parent / "vectors"
DTYPES = {
    "f32": np.float32,
    "f64": np.float64,
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "i8": np.int8,
    "s8": np.int8,
    "u8": np.uint8,
    "i32": np.int32,
    "s32": np.int32,
    "s4": np.int8,  # one value per byte
    "u4": np.uint8,
    "f8_e4m3": ml_dtypes.float8_e4m3fn,
    "f8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "f8_e5m2": ml_dtypes.float8_e5m2,
}


def load(name: str) -> Iterator[tuple[dict[str, Any], dict[str, np.ndarray]]]:
    """Yields each case of `vectors/<name>.npz` as (case, arrays)."""
    with np.load(VECTORS / f"{name}.npz", allow_pickle=False) as archive:
        manifest = json.loads(archive["manifest"].tobytes())
        blob = archive["blob"].tobytes()
    for case in manifest["cases"]:
        arrays = {}
        for key, (dtype, shape, offset, nbytes) in case["arrays"].items():
            raw = np.frombuffer(blob[offset : offset + nbytes], DTYPES[dtype])
            arrays[key] = raw.reshape(shape)
        yield case, arrays


def compared(arrays: dict[str, np.ndarray]) -> np.ndarray:
    """Which elements have a specified result that does not hinge on subnormals."""
    care = arrays.get("care", np.ones(arrays["expected"].shape, np.uint8)) == 1
    if "ftz" in arrays:
        care &= arrays["ftz"] != 1
    return care


def differing(
    results: Sequence[list[Any]], cases: Sequence[tuple[dict[str, Any], dict[str, np.ndarray]]]
) -> dict[str, int]:
    """Counts the compared elements that differ, of the cases where any does.

    Dtype and shape must be equal, and NaN equals NaN. A case may have several results.
    """
    wrong = {}
    for actual, (case, arrays) in zip(results, cases, strict=True):
        if count := sum(_mismatches(result, arrays) for result in actual):
            wrong[case["id"]] = count
    return wrong


def _mismatches(result: Any, arrays: dict[str, np.ndarray]) -> int:
    got, expected = np.asarray(result), arrays["expected"]
    assert got.dtype == expected.dtype, (got.dtype, expected.dtype)
    assert got.shape == expected.shape, (got.shape, expected.shape)
    if got.dtype.kind in "iu":
        equal = got == expected
    else:
        wide, want = got.astype(np.float64), expected.astype(np.float64)
        equal = (wide == want) | (np.isnan(wide) & np.isnan(want))
    return int(np.sum(~equal & compared(arrays)))


FORMS = (
    pytest.param("eager", marks=pytest.mark.slow),
    "jit",
    pytest.param("jit_constants", marks=pytest.mark.slow),
    pytest.param("vmap", marks=pytest.mark.slow),
)
X64 = os.environ.get("JAX_ENABLE_X64") == "1"
TOGETHER = 24
"""Cases of one compiled program: a program costs far more than what it computes."""
Operands = Sequence[Any]


def evaluate(
    form: str,
    op: Callable[[dict[str, Any]], Callable[..., Any]],
    cases: Sequence[tuple[dict[str, Any], dict[str, np.ndarray]]],
    operands: Sequence[Operands],
) -> list[list[Any]]:
    """Evaluates the function of each case's attributes in one form; `vmap` maps two copies of each.

    Cases that differ in values alone share a compiled function, except where values are constants.
    """
    operands = [[None if a is None else on_device(a) for a in arrays] for arrays in operands]
    alike: dict[Any, list[int]] = {}
    for i, (case, _) in enumerate(cases):
        signature = repr((case["attrs"], jax.tree.map(jax.typeof, operands[i])))
        alike.setdefault(signature if form in ("jit", "vmap") else i, []).append(i)
    groups, actual = sorted(alike.values(), key=len), [[] for _ in cases]
    for start in range(0, len(groups), TOGETHER):
        part = groups[start : start + TOGETHER]
        run = _together(form, [op(cases[group[0]][0]["attrs"]) for group in part])
        for turn in range(len(part[-1])):
            chosen = [group[min(turn, len(group) - 1)] for group in part]
            for i, result in zip(chosen, run([operands[i] for i in chosen]), strict=True):
                actual[i] = result
    return actual


def _together(
    form: str, functions: Sequence[Callable[..., Any]]
) -> Callable[[Sequence[Operands]], list[list[Any]]]:
    """Returns what evaluates functions of their operands, as one program unless it is eager."""

    def each(operands: Sequence[Operands]) -> list[Any]:
        return [f(*arrays) for f, arrays in zip(functions, operands, strict=True)]

    def mapped(operands: Sequence[Operands]) -> list[list[Any]]:
        stacked = jax.tree.map(lambda a: np.stack([a, a]), operands)
        return [list(result) for result in of_two(stacked)]

    def constant(operands: Sequence[Operands]) -> list[Any]:
        return jax.jit(lambda: each(operands))()

    of_two = jax.jit(jax.vmap(each))
    if form == "vmap":
        return mapped
    forms = {"eager": each, "jit": jax.jit(each), "jit_constants": constant}
    return lambda operands: [[result] for result in forms[form](operands)]


def selected(cases: list, is_float64: Callable[[dict], bool]) -> list:
    """Keeps the float64 cases where x64 is on, and all others where it is off."""
    kept = [(case, arrays) for case, arrays in cases if is_float64(case) == X64]
    assert kept
    return kept
