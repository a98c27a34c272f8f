"""Reads the stored vectors in `vectors/`: results of the real runtimes and of an independent model.

Each .npz holds a JSON manifest and one blob, without pickle. 16-bit and 8-bit floats that NumPy
lacks come back as their ml_dtypes types; rank-0 operands are stored with shape (1,).
"""

import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np

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
    for found, (case, arrays) in zip(results, cases, strict=True):
        if count := sum(_mismatches(result, arrays) for result in found):
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
