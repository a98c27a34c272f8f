"""Chooses which tensors of a file are quantized, and how: by rules, then by the policy.

A file does not describe contractions. By convention a weight is a float tensor with two or more
axes whose name ends in weight, weights, kernel, embedding or embeddings. A policy applies to these;
a rule applies to every tensor that it matches. A lookup table is a weight with two axes whose name,
without a final `.weight`, ends in embedding, embeddings, embed_tokens, wte or wpe. A policy leaves
tables in float, as presets do, unless `--tables` is passed. In the layout of torch, [out, in, ...],
each index of the first axis has its own scale; in that of flax, [..., in, out], each index of the
last axis, and for embeddings of the first.
"""

import argparse
import re
import textwrap
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import presets
from .._checks import normalize_axes
from .._errors import fail
from ..interop import Archive
from ..numerics import format_of
from ..tensor import QSpec, QTensor
from ..tensor._shared import Scheme, parse_scheme
from ._scheme import FileRule, parse_rule

_SUFFIXES = ("weight", "weights", "kernel", "embedding", "embeddings")
_TABLE = re.compile(r".*(embeddings?|embed_tokens|wte|wpe)(\.weight)?", re.DOTALL)
_PRESETS = [name for name in vars(presets) if not name.startswith("_")]

SCHEMES = """schemes: a format (a dtype of JAX, or a name of jqx.numerics), and options after colons
  float                         unchanged
  int8, float8_e4m3fn, nvfp4    one scale a channel; in a block format, one a block
  int4:group=32, nf4:block=64   one scale for each 32 or 64 weights along the axes that are summed
  int8:tensor, int8:channel     one scale in all, one a channel
  uint4:group=64:asymmetric     zero points
  int4:calibrator=mse           a calibrator, by its name in jqx.calibrators
  int8:contract=0,1             which axes are summed over, if the layout does not imply it"""
"""The description of schemes in `--help`."""


class Choice(NamedTuple):
    """What to do with a tensor.

    Attributes:
      spec: how it is quantized; `None` leaves it unchanged.
      why: the rule that applies, or why there is none.
    """

    spec: QSpec | None
    why: str


def add_choices(parser: argparse.ArgumentParser) -> None:
    """Adds the options that choose how tensors are quantized."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = textwrap.fill(parser.description or "", 79)
    parser.epilog = SCHEMES
    parser.add_argument("--policy", choices=_PRESETS, help="a preset, for all weights")
    parser.add_argument(
        "--tables",
        metavar="SCHEME",
        help="the scheme of lookup tables with --policy, such as int8; float by default",
    )
    parser.add_argument(
        "--rule",
        action="append",
        default=[],
        metavar="REGEX=SCHEME",
        help="for tensors whose whole name matches; overrides --policy; the first match wins; "
        "such as '.*mlp.*=int4:group=32', 'lm_head.*=float'",
    )
    parser.add_argument(
        "--layout",
        choices=["torch", "flax"],
        help="weights are [out, in, ...] or [..., in, out]; by default, names that end in kernel "
        "have the layout of flax",
    )


def choose(archive: Archive, args: argparse.Namespace) -> dict[str, Choice]:
    """Returns the choice for each leaf of a file.

    Raises:
      ValueError: if a rule matches nothing, a rule or the policy applies to a tensor that is
        quantized already, a spec does not fit, or a layout is passed without use.
    """
    rules = [parse_rule(text) for text in args.rule]
    if args.layout is not None and args.policy is None and not rules:
        raise fail(
            "quantize",
            "`--layout` has no use.",
            given=f"--layout {args.layout}, neither a policy nor rules",
            expected="a policy or rules, to which it applies",
            fix="pass --policy or --rule too, or leave it out.",
        )
    policy = None if args.policy is None else getattr(presets, args.policy)().rules[0].weight
    tables = _tables(args)
    choices: dict[str, Choice] = {}
    used: set[FileRule | None] = set()
    for path in archive.paths:
        leaf = archive.spec(path)
        found = next((rule for rule in rules if rule.pattern.fullmatch(path)), None)
        if isinstance(leaf, QTensor):
            covered = policy is not None and _is_weight(path, leaf)
            _check_left(path, found, args.policy if covered else None)
            used.add(found)
            choices[path] = Choice(None, "quantized already" if found is None else found.text)
        elif not jnp.issubdtype(leaf.dtype, jnp.floating):
            choices[path] = Choice(None, "no floats")
        elif found is not None:
            used.add(found)
            choices[path] = _chosen(path, leaf, found.scheme, found.text, args.layout)
        elif policy is not None and _is_weight(path, leaf):
            scheme, why = Scheme(policy), f"policy {args.policy}"
            if leaf.ndim == 2 and _TABLE.fullmatch(path):
                scheme, why = tables, f"tables {args.tables or 'float'}"
            choices[path] = _chosen(path, leaf, scheme, why, args.layout)
        else:
            choices[path] = Choice(None, "no rule")
    _check_used(rules, used)
    return choices


def _tables(args: argparse.Namespace) -> Scheme:
    """Returns the scheme of lookup tables."""
    if args.tables is not None and args.policy is None:
        raise fail(
            "quantize",
            "`--tables` has no use without a policy.",
            given=f"--tables {args.tables}",
            expected="a policy, since the option is for its tables",
            fix="pass --policy, or --rule 'regex=scheme' for the tables.",
        )
    return parse_scheme(args.tables or "float")


def quantize_leaf(x: Any, spec: QSpec) -> QTensor:
    """Quantizes an array; codes of fewer than 8 bits are packed along its last axis."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return _abstract(x, spec)
    packs = format_of(spec.qtype).bits < 8 and x.ndim > 0
    return QTensor.quantize(x, spec, pack=-1 if packs else None)


def quantize_finite(x: Any, path: str, spec: QSpec) -> QTensor:
    """Quantizes an array that is to be written; checks that codes and scales can hold it."""
    q = quantize_leaf(x, spec)
    if isinstance(x, jax.ShapeDtypeStruct):
        return q
    scale = np.asarray(q.real_scale())
    kind = jnp.finfo(getattr(spec.calibrator, "dtype", scale.dtype))  # `Rounded` clamps to its own
    scale, least = np.abs(scale.astype(np.float64)), float(kind.smallest_subnormal)  # may be signed
    wrong = {
        "numbers that are NaN or infinite": not np.isfinite(np.asarray(x)).all(),
        f"scales beyond {float(kind.max):.3g}": not (scale < float(kind.max)).all(),
        f"no scale above {least:.3g}": np.any(x) and scale.max() <= least,
    }
    found = [text for text, holds in wrong.items() if holds]
    if found:
        raise fail(
            "quantize",
            f"the tensor {path!r} cannot be quantized.",
            given=f"{x.dtype.name}{list(x.shape)} with {', '.join(found[:1])}",
            expected=f"finite numbers whose scales {kind.dtype.name} can hold",
            fix="check the tensor, or leave it in float: --rule 'name=float'.",
        )
    return q


def made(read: Callable[[str], Any], path: str, choice: Choice) -> Any:
    """Returns a leaf of a file, abstract if `read` is, quantized if the choice has a spec."""
    leaf = read(path)
    return leaf if choice.spec is None else quantize_finite(leaf, path, choice.spec)


@cache
def _abstract(x: jax.ShapeDtypeStruct, spec: QSpec) -> QTensor:
    return jax.eval_shape(partial(quantize_leaf, spec=spec), x)


def _is_weight(path: str, leaf: Any) -> bool:
    return leaf.ndim >= 2 and path.endswith(_SUFFIXES)


def _check_left(path: str, found: FileRule | None, policy: str | None) -> None:
    """Checks that a tensor that is quantized already is left unchanged."""
    if found is None and policy is None:
        return
    given = f"--policy {policy}" if found is None else f"the rule {found.text!r}"
    if not (found is not None and found.scheme.spec is None):
        raise fail(
            "quantize",
            f"the tensor {path!r} is quantized already.",
            given=given,
            expected="float tensors",
            fix="start from the float file; or leave such tensors unchanged, with a rule before "
            "all "
            "others such as --rule '.*mlp.*=float'.",
        )


def _chosen(path: str, leaf: Any, scheme: Scheme, why: str, layout: str | None) -> Choice:
    if scheme.spec is None:
        return Choice(None, why)
    if leaf.dtype == jnp.float64 and not jax.config.read("jax_enable_x64"):
        raise fail(
            "quantize",
            f"the tensor {path!r} is float64, which JAX would cut to float32.",
            given="float64, and no 64-bit numbers in JAX",
            expected="float32, bfloat16 or float16",
            fix="set JAX_ENABLE_X64=1 in the environment, or keep it with a rule '...=float'.",
        )
    spec = scheme.spec
    try:
        spec = spec.resolve(leaf.ndim, _kept_axes(path, leaf.ndim, scheme.contract, layout))
        quantize_leaf(leaf, spec)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{error}\n  at: {path!r}, by {why!r}") from None
    return Choice(spec, why)


def _kept_axes(
    path: str, rank: int, contract: tuple[int, ...] | None, layout: str | None
) -> tuple[int, ...]:
    """Returns the axes that the product of a weight keeps."""
    if contract is not None:
        summed = normalize_axes("scheme", contract, rank, argument="contract")
        return tuple(axis for axis in range(rank) if axis not in summed)
    if rank < 2:
        return ()
    flax = layout == "flax" or (layout is None and path.endswith("kernel"))
    is_table = path.endswith(("embedding", "embeddings"))
    return (rank - 1,) if flax and not is_table else (0,)


def _check_used(rules: list[FileRule], used: set[FileRule | None]) -> None:
    for rule in rules:
        if rule not in used:
            raise fail(
                "quantize",
                f"the rule {rule.text!r} matches nothing.",
                given="no tensor with such a name, or only ones that an earlier rule matches",
                expected="a regular expression that matches whole names of float tensors",
                fix="see the names with: python -m jqx quantize IN OUT --policy w8a16 --dry-run.",
            )
