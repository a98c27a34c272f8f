"""`verify`: reads a written model again and compares it with the float model."""

import contextlib
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._calls import called
from .._checks import check_instance, check_pattern, shown
from .._errors import fail
from ..calibrators._shared import per_block
from ..diagnostics import Comparison, compare
from ..diagnostics._shared import scheme_of, sqnr
from ..policy import Policy, Rule
from ..tensor import QSpec, QTensor
from ..transforms import make_plan
from ..transforms._shared import with_bar
from ._archive import Archive, load
from ._named_tree import Rules, tree
from ._verification import TensorCheck, Verification

_SAME = 45.0
"""Minimum SQNR in dB of floats that are not weights of codes, relative to the float model: two
roundings to bfloat16 have 50.
"""

_CLOSE = 20.0
"""Minimum SQNR in dB of these, before the model is rounded to their dtype."""

_FEEBLE = 0.01
"""Share of the mean power of rows below which a row is not checked by itself."""

_SCALES = re.compile(r"(.*[._/])?\w*scale(_inv|_ub)?")
"""Names of separate scales in files, of key-value caches and activations."""


@called("interop.verify", 'pass for example jqx.interop.verify("folder", "float folder").')
def verify(
    file: Any,
    reference: Any,
    *,
    names: Rules | None = None,
    function: Callable[..., Any] | None = None,
    batch: Sequence[Any] | None = None,
    least: float = 3.0,
    ignore: Sequence[str] = (),
    progress: bool = True,
) -> Verification:
    """Reads a quantized model again and compares it with the float model.

    Each tensor is dequantized and compared with its float tensor, one at a time. These are
    problems: a tensor that only one model has; another shape; integers instead of floats; numbers
    that are not finite; rows that became zeros, or are further from those of the model than zeros;
    an SQNR below `least`; floats that are not those of the model in the dtype of the file; a scale
    (of key-value caches or activations) that is 0, negative or not finite. With a function and a
    batch, its contractions are also compared site by site, as by `jqx.compare`.

    Args:
      file: a path that `jqx.load` takes, such as one written by `jqx.interop.write` or `jqx.save`;
        an open `jqx.interop.Archive`; or a tree.
      reference: the float model, in the same forms; with a function, the parameters that it takes.
      names: rules that map the names of `file` to the paths of `reference`, see `jqx.interop.tree`;
        `None` if they are the same ("/" and "." are equivalent).
      function: a function of the parameters and of `batch`. For the file of a quantized function,
        the function that was quantized.
      batch: the other arguments of the function, a tuple.
      least: minimum SQNR in dB of a weight, and of a site by itself. 3.0 finds wrong layouts; 4
        bits in groups have about 20.
      ignore: regular expressions of paths that are not compared; they must match in full.
      progress: whether to show a progress bar, as in `jqx.save`.

    Returns:
      A `Verification`: rows by tensor, `problems`, `ok`. It prints as a table. `check()` raises.

    Raises:
      OSError, ValueError: if a file cannot be read, a rule or pattern matches nothing, or `batch`
        is missing.
      TypeError: if an argument has another type.

    Example:
      >>> import jqx, jax, jax.numpy as jnp
      >>> w = jax.random.normal(jax.random.key(0), (8, 64))
      >>> q = jqx.QTensor.quantize(w, jqx.QSpec("int4", jqx.per_block({0: 1, 1: 32})))
      >>> jqx.interop.verify({"up": {"weight": q}}, {"up.weight": w}).ok
      True
      >>> print(jqx.interop.verify({"up.weight": q, "k_scale": jnp.zeros(1)}, {"up.weight": w}))
      path       scheme                         wrong         SQNR dB  max error
      --------------------------------------------------------------------------
      k_scale    float32                        a scale is 0        -          -
      up.weight  int4 per_block({0: 1, 1: 32})  -                19.8      0.225
      2 tensors, 1 of them wrong
    """
    least = float(least)
    _check_arguments(function, batch, ignore)
    with contextlib.ExitStack() as opened:
        own = _opened(file, names, opened)
        wanted = _opened(reference, None, opened)
        rows = tuple(_rows(own, wanted, least, [*ignore], progress))
    problems = [f"{row.path!r}: {problem}" for row in rows for problem in row.problems]
    sites = None
    if function is not None and not problems:
        assert batch is not None
        sites = _sites(function, file, reference, names, batch)
        for site in (*sites.sites, sites.result):
            found = site.local_sqnr if site is not sites.result else site.sqnr
            if not found >= least:
                problems.append(f"the site {site.name!r}: {found:.1f} dB")
    return Verification(rows, sites, tuple(problems))


class _Leaves(NamedTuple):
    """Leaves by key, each with its path and a function that reads it."""

    paths: Mapping[str, str]
    read: Callable[[str], Any]


def _opened(given: Any, names: Rules | None, opened: contextlib.ExitStack) -> _Leaves:
    """Returns the leaves of a path, an archive or a tree."""
    if isinstance(given, (str, os.PathLike)):
        given = opened.enter_context(Archive(given))
    if isinstance(given, Archive) and names is None:
        return _leaves(given.paths, given.read)
    if names is not None:
        archive: Any = given
        check_instance("interop.verify", "file", archive, Archive, fix="pass a path, with names.")
        given = tree(archive, names)
    flat = jax.tree_util.tree_leaves_with_path(given, is_leaf=_is_coded)
    leaves = {jax.tree_util.keystr(keys, simple=True, separator="/"): x for keys, x in flat}
    fits = leaves and all(hasattr(x, "dtype") and hasattr(x, "shape") for x in leaves.values())
    if not fits:
        raise fail(
            "interop.verify",
            "there is nothing to compare.",
            given=f"an object of type {type(given).__name__}",
            expected="a path, an open Archive, or a tree of arrays and QTensors",
            fix="pass for example the folder that was written.",
            error=TypeError,
        )
    return _leaves([*leaves], leaves.__getitem__)


def _leaves(paths: Sequence[str], read: Callable[[str], Any]) -> _Leaves:
    keys = {_key(path): path for path in paths}
    twice = next((path for path in paths if keys[_key(path)] != path), None)
    if twice is not None:
        raise fail(
            "interop.verify",
            "two tensors have the same name.",
            given=f"{twice!r} and {keys.get(_key(twice or ''), '')!r}",
            expected='names that differ in more than "/" and "."',
            fix="rename one of them.",
        )
    return _Leaves(keys, read)


def _key(path: str) -> str:
    return path.replace("/", ".")


def _is_coded(x: Any) -> bool:
    return isinstance(x, QTensor)


def _rows(
    own: _Leaves, wanted: _Leaves, least: float, ignore: Sequence[str], progress: bool
) -> Iterator[TensorCheck]:
    every = dict.fromkeys((*own.paths, *wanted.paths))
    for pattern in ignore:
        check_pattern("interop.verify", "ignore", pattern)
        paths = (leaves.paths.get(key, "") for leaves in (own, wanted) for key in every)
        if not any(re.fullmatch(pattern, path) for path in paths):
            raise fail(
                "interop.verify",
                "a pattern of `ignore` matches nothing.",
                given=shown(pattern),
                expected="regular expressions of whole paths",
                fix="drop it, or look at the paths of the file.",
            )
    for key in with_bar("verify", "tensor", every, progress):
        path = own.paths.get(key) or wanted.paths[key]
        if any(re.fullmatch(pattern, path) for pattern in ignore):
            continue
        if key not in own.paths:
            yield TensorCheck(path, "-", math.nan, math.nan, ("missing in the file",))
        elif key not in wanted.paths:
            yield _alone(path, own.read(path))
        else:
            yield _compared(path, own.read(path), wanted.read(wanted.paths[key]), least)


def _alone(path: str, x: Any) -> TensorCheck:
    """Returns the problems of a tensor that the float model does not have."""
    kind = scheme_of(x) if _is_coded(x) else x.dtype.name
    is_scale = not _is_coded(x) and _SCALES.fullmatch(path)
    problems = _wrong_scales(x) if is_scale else ["not in the float model"]
    return TensorCheck(path, kind, math.nan, math.nan, tuple(problems))


def _wrong_scales(x: Any) -> list[str]:
    values = np.asarray(x).astype(np.float64)
    wrong = {
        "a scale is 0": (values == 0).any(),
        "a scale is negative": (values < 0).any(),
        "a scale is not finite": not np.isfinite(values).all(),
    }
    return [text for text, found in wrong.items() if found]


def _compared(path: str, x: Any, real: Any, least: float) -> TensorCheck:
    kind = scheme_of(x) if _is_coded(x) else x.dtype.name
    if tuple(x.shape) != tuple(real.shape):
        text = f"shape {tuple(x.shape)}, not {tuple(real.shape)}"
        return TensorCheck(path, kind, math.nan, math.nan, (text,))
    want = np.asarray(real.dequantize() if _is_coded(real) else real)
    if not jnp.issubdtype(want.dtype, jnp.floating):
        same = not _is_coded(x) and np.array_equal(np.asarray(x), want)
        error = 0.0 if same else math.nan
        return TensorCheck(
            path, kind, math.inf if same else math.nan, error, () if same else ("differs",)
        )
    if not _is_coded(x) and not jnp.issubdtype(x.dtype, jnp.floating):
        text = f"{x.dtype.name}, and {want.dtype.name} in the model"
        return TensorCheck(path, kind, math.nan, math.nan, (text,))
    real, want = want.astype(np.float32), want.astype(np.float32)
    found = np.asarray(x.dequantize() if _is_coded(x) else x).astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        if not _is_coded(x):
            want, least = want.astype(x.dtype).astype(np.float32), _CLOSE
        error = float(np.abs(found - real).max()) if found.size else 0.0
    decibel, problems = sqnr(real, found), []
    if np.isfinite(real).all() and not np.isfinite(found).all():
        problems.append("numbers that are not finite")
    elif not decibel >= least and not np.array_equal(found, real, equal_nan=True):
        problems.append(f"less than {least:g} dB")
    elif not (sqnr(want, found) >= _SAME or _is_coded(x) or np.array_equal(found, want, True)):
        problems.append(f"less than {_SAME:g} dB")
    problems += _wrong_rows(found, real, problems)
    if not _is_coded(x) and _SCALES.fullmatch(path):
        problems += _wrong_scales(x)
    return TensorCheck(path, kind, decibel, error, tuple(problems))


def _wrong_rows(found: np.ndarray, real: np.ndarray, problems: Sequence[str]) -> list[str]:
    """Returns the problems of single rows (all axes but the last are rows); if the whole tensor is
    wrong, only which rows are lost.
    """
    if found.ndim < 2 or not found.size or not np.isfinite(real).all():
        return []
    found, real = (x.reshape(-1, x.shape[-1]).astype(np.float64) for x in (found, real))
    with np.errstate(invalid="ignore"):
        power, noise = (real**2).sum(-1), ((found - real) ** 2).sum(-1)
    lost = ~found.any(-1) & real.any(-1)
    far = (noise > power) & (power > _FEEBLE * power.mean()) & (not problems)
    counts = {"are zeros": int(lost.sum()), "are worse than zeros": int(far.sum())}
    return [f"{count} rows {text}" for text, count in counts.items() if count]


def _sites(
    function: Callable[..., Any],
    file: Any,
    reference: Any,
    names: Rules | None,
    batch: Sequence[Any],
) -> Comparison:
    """Returns the error of each contraction with a quantized weight."""
    if isinstance(file, (str, os.PathLike)):
        with Archive(file) as archive:
            is_function = archive.quantized is not None
            params = None if is_function else _tree(archive, names)
        if is_function:
            whole = load(file)
            return compare(function, whole.plan, whole.affines, weights=whole.params)(
                reference, *batch
            )
    else:
        params = _tree(file, names) if isinstance(file, Archive) else file
    flat, structure = jax.tree_util.tree_flatten_with_path(reference)
    keys = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in flat]
    pairs = jax.tree_util.tree_leaves_with_path(params, is_leaf=_is_coded)
    leaves = {_key(jax.tree_util.keystr(p, simple=True, separator="/")): x for p, x in pairs}
    codes = {key: leaves[_key(key)] for key in keys if _is_coded(leaves.get(_key(key)))}
    rules = [Rule(re.escape(key), weight=_spec(q)) for key, q in codes.items()]
    plan = make_plan(function, Policy(rules))(reference, *batch)
    weights = structure.unflatten(codes.get(key, x) for key, (_, x) in zip(keys, flat, strict=True))
    return compare(function, plan, weights=weights)(reference, *batch)


def _tree(archive: Archive, names: Rules | None) -> Any:
    return archive.map(archive.read) if names is None else tree(archive, names)


def _spec(q: QTensor) -> QSpec:
    """Returns a spec with the format of a QTensor: to find which site has which codes."""
    return QSpec(q.qtype, per_block(dict(enumerate(q.groups.sizes)), tail=True))


def _check_arguments(function: Any, batch: Any, ignore: Any) -> None:
    if function is None != batch is None:
        raise fail(
            "interop.verify",
            "a function needs a batch, and a batch a function.",
            given="only one of them",
            expected="function=f, batch=(x, ...), for f(reference, x, ...)",
            fix="pass both or neither.",
        )
    fits = isinstance(ignore, (list, tuple)) and all(isinstance(x, str) for x in ignore)
    if not fits:
        raise fail(
            "interop.verify",
            "`ignore` does not hold patterns.",
            given=shown(ignore),
            expected="a list of regular expressions",
            fix="pass for example ignore=['lm_head.weight'].",
            error=TypeError,
        )
