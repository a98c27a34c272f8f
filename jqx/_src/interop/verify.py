"""`verify`: reads a written model again and compares it with the float model."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ... import Policy, QSpec, QTensor, Rule, make_plan, per_block
from ..checks import called, check_instance, check_pattern, shown
from ..diagnostics.compare import Comparison, compare
from ..diagnostics.report import scheme_of, sqnr
from ..errors import fail
from ..table import Table, Tabular, decibels
from ..transforms.calibrate import with_bar
from ..transforms.trace import is_quantized
from .archive import Archive, load
from .named_tree import Rules, tree
from .tree import is_rewritten

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
      OSError, ValueError: if a file cannot be read, a rule or pattern matches nothing, `batch` is
        missing, or the file has weights that an algorithm has scaled or rotated.
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
    if (function is None) != (batch is None):
        problem = "a function needs a batch, and a batch a function."
        fix = "pass both or neither: function=f, batch=(x, ...), for f(reference, x, ...)."
        raise fail("interop.verify", problem, fix=fix)
    if not (isinstance(ignore, (list, tuple)) and all(isinstance(x, str) for x in ignore)):
        problem = f"`ignore` does not hold patterns: {shown(ignore)}."
        fix = "pass for example ignore=['lm_head.weight']."
        raise fail("interop.verify", problem, fix=fix, error=TypeError)
    with contextlib.ExitStack() as opened:
        is_path = isinstance(file, (str, os.PathLike))
        source = opened.enter_context(Archive(file)) if is_path else file
        if isinstance(source, Archive) and is_rewritten(source.quantized or "{}"):
            problem = "the weights of the file are not those of the float model: an algorithm has "
            problem += "scaled or rotated them before it chose codes."
            fix = "pass the result of ptq to jqx.compare(f, quantized), before it is saved."
            raise fail("interop.verify", problem, fix=fix)
        leaves = _opened(source, names, opened)
        reference_leaves = _opened(reference, None, opened)
        rows = tuple(_rows(leaves, reference_leaves, least, ignore, progress))
    problems = [f"{row.path!r}: {problem}" for row in rows for problem in row.problems]
    sites = None
    if function is not None and not problems:
        assert batch is not None
        sites = _sites(function, file, reference, names, batch)
        for site in (*sites.sites, sites.result):
            local = site.local_sqnr if site is not sites.result else site.sqnr
            if not local >= least:
                problems.append(f"the site {site.name!r}: {local:.1f} dB")
    return Verification(rows, sites, tuple(problems))


_Leaves = Mapping[str, tuple[str, Callable[[], Any]]]
"""Leaves by key, each with its path and a function that reads it."""


def _opened(source: Any, names: Rules | None, opened: contextlib.ExitStack) -> _Leaves:
    """Returns the leaves of a path, an archive or a tree."""
    if isinstance(source, (str, os.PathLike)):
        source = opened.enter_context(Archive(source))
    if isinstance(source, Archive) and names is None:
        leaves = [(path, functools.partial(source.read, path)) for path in source.paths]
    else:
        if names is not None:
            archive: Any = source
            fix = "pass a path, with names."
            check_instance("interop.verify", "file", archive, Archive, fix=fix)
            source = tree(archive, names)
        pairs = _by_path(source)
        if not pairs or not all(hasattr(x, "dtype") and hasattr(x, "shape") for _, x in pairs):
            problem = f"there is nothing to compare: {type(source).__name__}."
            fix = "pass a path, an open Archive, or a tree of arrays and QTensors; a model of ONNX "
            fix += "goes to jqx.interop.verify_onnx."
            raise fail("interop.verify", problem, fix=fix, error=TypeError)
        leaves = [(path, lambda x=x: x) for path, x in pairs]
    by_key = {_key(path): (path, read) for path, read in leaves}
    for path, _ in leaves:
        if by_key[_key(path)][0] != path:
            problem = f"two tensors have the same name: {path!r} and {by_key[_key(path)][0]!r}."
            raise fail("interop.verify", problem, fix="rename one of them.")
    return by_key


def _by_path(tree: Any) -> list[tuple[str, Any]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_quantized)
    return [(jax.tree_util.keystr(keys, simple=True, separator="/"), x) for keys, x in leaves]


def _key(path: str) -> str:
    return path.replace("/", ".")


def _rows(
    checked: _Leaves, reference: _Leaves, min_sqnr: float, ignore: Sequence[str], progress: bool
) -> Iterator[TensorCheck]:
    union = dict.fromkeys((*checked, *reference))
    for pattern in ignore:
        check_pattern("interop.verify", "ignore", pattern)
        paths = (path for leaves in (checked, reference) for path, _ in leaves.values())
        if not any(re.fullmatch(pattern, path) for path in paths):
            problem = f"the pattern {shown(pattern)} of `ignore` matches no whole path."
            raise fail("interop.verify", problem, fix="drop it, or look at the paths of the file.")
    for key in with_bar("verify", "tensor", union, progress):
        path, read = checked.get(key) or reference[key]
        if any(re.fullmatch(pattern, path) for pattern in ignore):
            continue
        if key not in checked:
            yield TensorCheck(path, "-", math.nan, math.nan, ("missing in the file",))
        elif key in reference:
            yield _compared(path, read(), reference[key][1](), min_sqnr)
        else:
            x = read()
            is_scale = not is_quantized(x) and _SCALES.fullmatch(path)
            problems = _wrong_scales(x) if is_scale else ["not in the float model"]
            yield TensorCheck(path, _kind(x), math.nan, math.nan, tuple(problems))


def _kind(x: Any) -> str:
    return scheme_of(x) if is_quantized(x) else x.dtype.name


def _wrong_scales(x: Any) -> list[str]:
    values = np.asarray(x).astype(np.float64)
    wrong = {
        "a scale is 0": (values == 0).any(),
        "a scale is negative": (values < 0).any(),
        "a scale is not finite": not np.isfinite(values).all(),
    }
    return [text for text, holds in wrong.items() if holds]


def _compared(path: str, x: Any, real: Any, min_sqnr: float) -> TensorCheck:
    kind, coded = _kind(x), is_quantized(x)
    if tuple(x.shape) != tuple(real.shape):
        text = f"shape {tuple(x.shape)}, not {tuple(real.shape)}"
        return TensorCheck(path, kind, math.nan, math.nan, (text,))
    want = np.asarray(real.dequantize() if is_quantized(real) else real)
    if not jnp.issubdtype(want.dtype, jnp.floating):
        if not coded and np.array_equal(np.asarray(x), want):
            return TensorCheck(path, kind, math.inf, 0.0)
        return TensorCheck(path, kind, math.nan, math.nan, ("differs",))
    if not coded and not jnp.issubdtype(x.dtype, jnp.floating):
        text = f"{x.dtype.name}, and {want.dtype.name} in the model"
        return TensorCheck(path, kind, math.nan, math.nan, (text,))
    real, want = want.astype(np.float32), want.astype(np.float32)
    values = np.asarray(x.dequantize() if coded else x).astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        if not coded:
            want, min_sqnr = want.astype(x.dtype).astype(np.float32), _CLOSE
        error = float(np.abs(values - real).max()) if values.size else 0.0
    decibel, problems = sqnr(real, values), []
    if np.isfinite(real).all() and not np.isfinite(values).all():
        problems.append("numbers that are not finite")
    elif not decibel >= min_sqnr and not np.array_equal(values, real, equal_nan=True):
        problems.append(f"less than {min_sqnr:g} dB")
    elif not (sqnr(want, values) >= _SAME or coded or np.array_equal(values, want, True)):
        problems.append(f"less than {_SAME:g} dB")
    problems += _wrong_rows(values, real, problems)
    if not coded and _SCALES.fullmatch(path):
        problems += _wrong_scales(x)
    return TensorCheck(path, kind, decibel, error, tuple(problems))


def _wrong_rows(values: np.ndarray, real: np.ndarray, problems: Sequence[str]) -> list[str]:
    """Returns the problems of single rows (all axes but the last are rows); if the whole tensor is
    wrong, only which rows are lost.
    """
    if values.ndim < 2 or not values.size or not np.isfinite(real).all():
        return []
    values, real = (x.reshape(-1, x.shape[-1]).astype(np.float64) for x in (values, real))
    with np.errstate(invalid="ignore"):
        power, noise = (real**2).sum(-1), ((values - real) ** 2).sum(-1)
    zeroed = ~values.any(-1) & real.any(-1)
    noisy = (noise > power) & (power > _FEEBLE * power.mean()) & (not problems)
    counts = {"are zeros": int(zeroed.sum()), "are worse than zeros": int(noisy.sum())}
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
            if archive.quantized is None:
                params = _tree(archive, names)
            else:
                loaded = load(file)
                compared = compare(function, loaded.plan, loaded.affines, weights=loaded.params)
                return compared(reference, *batch)
    else:
        params = _tree(file, names) if isinstance(file, Archive) else file
    flat, structure = _by_path(reference), jax.tree.structure(reference, is_leaf=is_quantized)
    coded = {_key(path): x for path, x in _by_path(params) if is_quantized(x)}
    codes = {path: coded[_key(path)] for path, _ in flat if _key(path) in coded}
    rules = [Rule(re.escape(key), weight=_spec(q)) for key, q in codes.items()]
    plan = make_plan(function, Policy(rules))(reference, *batch)
    weights = structure.unflatten(codes.get(path, x) for path, x in flat)
    return compare(function, plan, weights=weights)(reference, *batch)


def _tree(archive: Archive, names: Rules | None) -> Any:
    return archive.map(archive.read) if names is None else tree(archive, names)


def _spec(q: QTensor) -> QSpec:
    """Returns a spec with the format of a QTensor: to find which site has which codes."""
    return QSpec(q.qtype, per_block(dict(enumerate(q.groups.sizes)), tail=True))


# The result of `verify`: each tensor compared with the float model, and the problems found.


@dataclasses.dataclass(frozen=True)
class TensorCheck:
    """A tensor of a file, compared with that of the float model.

    Attributes:
      path: name of the tensor.
      scheme: format of the tensor, or its dtype if it is not quantized.
      sqnr: signal-to-noise ratio, `10 log10(sum x**2 / sum (x - q)**2)`, in dB; inf if the two are
        equal, NaN if the other tensor is missing or numbers are not finite.
      max_error: largest absolute difference.
      problems: the problems of the tensor; empty if there are none.
    """

    path: str
    scheme: str
    sqnr: float
    max_error: float
    problems: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Verification(Tabular):
    """The result of `verify`. Prints as a table; `check()` raises if there are problems.

    Attributes:
      tensors: in the order of the file; tensors missing in the file come last.
      sites: errors of the contractions of a function; `None` if no function was given.
      problems: all problems, one line each.
    """

    tensors: tuple[TensorCheck, ...]
    sites: Comparison | None
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether there are no problems."""
        return not self.problems

    def check(self) -> Verification:
        """Returns itself if there are no problems.

        Raises:
          ValueError: if there are problems; the message lists them.
        """
        if self.problems:
            raise ValueError("jqx.interop.verify: " + "; ".join(self.problems))
        return self

    def table(self) -> Table:
        """Returns the rows as text."""
        rows = tuple(
            (
                row.path,
                row.scheme,
                ", ".join(row.problems) or "-",
                decibels(row.sqnr),
                "-" if math.isnan(row.max_error) else f"{row.max_error:.3g}",
            )
            for row in self.tensors
        )
        wrong = sum(bool(row.problems) for row in self.tensors)
        footer = f"{len(rows)} tensors, {wrong} of them wrong"
        if self.sites is not None:
            footer += f"\n\n{self.sites}"
        unlisted = len(self.problems) - sum(len(row.problems) for row in self.tensors)
        footer += f"\n{unlisted} sites wrong" if unlisted else ""
        return Table(("path", "scheme", "wrong", "SQNR dB", "max error"), rows, footer, texts=3)
