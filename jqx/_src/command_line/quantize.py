"""`python -m jqx quantize`: quantizes a file of floats to a file of QTensors; `convert`: writes a
checkpoint in another format.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import textwrap
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ... import QSpec, QTensor, presets
from ...calibrators import Rounded
from ...numerics import Block, format_of
from ..checks import normalize_axes
from ..diagnostics.report import scheme_of
from ..errors import fail
from ..interop.archive import INDEX, Archive
from ..interop.codec import quantization_of, read_json
from ..interop.named_tree import Leaf
from ..interop.save import save_leaves, save_tree
from ..interop.write import GGUF, TARGETS, TOKENIZERS, write
from ..table import Table, finite
from ..tensor.segments import Lazy
from ..tensor.serialize import NONE, to_json
from ..tensor.spec import Scheme, parse_scheme


def add_quantize(commands: Any) -> None:
    """Adds the sub-command."""
    parser = commands.add_parser(
        "quantize",
        help="quantize the weights of a file",
        description="Quantizes weights of a safetensors file, one at a time. Writes a file that "
        "jqx.load reads.",
    )
    parser.add_argument("input", help="a file or folder that jqx.load reads")
    parser.add_argument("output", help="the file to write")
    add_choices(parser)
    add_force(parser)
    parser.add_argument(
        "--resume",
        action="store_true",
        help="if the process ends early, keep what is written and continue there when it is run "
        "again; the data is next to the output, as .part",
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be done")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=_run_quantize)


def _run_quantize(args: argparse.Namespace) -> int:
    """Runs the sub-command and returns the exit code."""
    check_absent("quantize", args.output, args.force or args.dry_run)
    with Archive(args.input) as archive:
        choices = choose(archive, args)
        if not any(choice.spec for choice in choices.values()):
            fix = "pass --policy, or --rule 'regex=scheme' for names that are not those of weights."
            raise fail("quantize", "nothing would be quantized.", fix=fix)
        specs = {path: made(archive.spec, path, choices[path]) for path in archive.paths}
        if not args.dry_run:
            tree = archive.map(lambda path: _leaf(archive, path, choices[path].spec))
            save_tree(args.output, tree, texts(archive), resume=args.resume)
        _show_quantized(args, archive, choices, specs)
    return 0


def _leaf(archive: Archive, path: str, spec: QSpec | None) -> Lazy:
    """Returns a lazy leaf of a file, which is read and quantized when it is written."""
    leaf = archive.lazy(path)
    if spec is None:
        return leaf
    source = str(to_json("quantize", spec, QSpec, NONE))
    return leaf.then(partial(quantize_finite, path=path, spec=spec), source)


def _show_quantized(
    args: argparse.Namespace,
    archive: Archive,
    choices: Mapping[str, Choice],
    specs: Mapping[str, Any],
) -> None:
    tensors = [
        {
            "path": path,
            "shape": list(specs[path].shape),
            "dtype": specs[path].dtype.name,
            "scheme": None if choice.spec is None else scheme_of(specs[path]),
            "why": choice.why,
            "bytes_before": size_of(archive.spec(path)),
            "bytes_after": size_of(specs[path]),
        }
        for path, choice in choices.items()
    ]
    old_bytes, new_bytes = (sum(t[key] for t in tensors) for key in ("bytes_before", "bytes_after"))
    count = sum(t["scheme"] is not None for t in tensors)
    losses = left_out(archive, args.input, OWN)
    if args.json:
        totals = {"quantized": count, "bytes_before": old_bytes, "bytes_after": new_bytes}
        written = {"written": None if args.dry_run else args.output, "left_out": losses}
        print_json({**written, **totals, "tensors": tensors})
        return
    footer = f"{count} of {len(tensors)} tensors quantized; {savings(old_bytes, new_bytes)}"
    if not args.dry_run:
        print(f"{args.output}: {footer}")
        print_left_out(losses)
        return
    rows = [
        (
            t["path"],
            f"{t['dtype']}{t['shape']}",
            t["scheme"] or "-",
            t["why"],
            f"{t['bytes_before']:,}",
            f"{t['bytes_after']:,}",
        )
        for t in tensors
    ]
    head = ("path", "tensor", "scheme", "decided by", "bytes", "quantized")
    print(Table(head, tuple(rows), footer, texts=4))


# `python -m jqx convert`: converts a checkpoint to another format, tensor by tensor.


_IN_HALF = ("gptq", "awq", GGUF)
"""Formats with float16 scales: weights quantized here get such scales."""


def add_convert(commands: Any) -> None:
    """Adds the sub-command."""
    parser = commands.add_parser(
        "convert",
        help="write a checkpoint in the format of another library",
        description="Reads a checkpoint of any format that jqx.load reads and writes another, "
        "tensor by tensor. Codes and scales do not change; with --policy or --rule, float "
        "weights are quantized on the way. A tensor that a format cannot hold is an error that "
        "names it; other data that is left out is printed. Files of jqx keep non-text metadata "
        "as JSON.",
    )
    parser.add_argument("input", help="a folder in the layout of Hugging Face, or a file")
    parser.add_argument("output", help="the folder to write; for jqx and gguf, the file")
    parser.add_argument(
        "--format", required=True, choices=[OWN, *TARGETS, GGUF], help="the output format"
    )
    parser.add_argument(
        "--config", metavar="PATH", help="config.json of the model; by default, that of the input"
    )
    parser.add_argument(
        "--metadata", metavar="PATH", help="for gguf: a JSON file; by default, that of the input"
    )
    parser.add_argument(
        "--activation", metavar="SCHEME", help="for compressed-tensors, such as int8:token:dynamic"
    )
    add_choices(parser)
    add_force(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a line")
    parser.set_defaults(run=_run_convert)


def _run_convert(args: argparse.Namespace) -> int:
    """Runs the sub-command and returns the exit code."""
    check_absent("convert", args.output, args.force)
    with Archive(args.input) as archive:
        choices = choose(archive, args)
        if args.format in _IN_HALF:
            choices = {path: _in_half(choice) for path, choice in choices.items()}
        specs = {path: made(archive.spec, path, choice) for path, choice in choices.items()}
        read: dict[str, Callable[[], Any]] = {
            path: partial(made, archive.read, path, choice) for path, choice in choices.items()
        }
        if args.format == OWN:
            _check_unused(args, "config", "metadata", "activation")
            tree, leaves = archive.map(specs.get), (make() for make in read.values())
            save_leaves(args.output, tree, leaves, metadata=texts(archive))
        else:
            named = {path.replace("/", "."): Leaf(specs[path], read[path]) for path in specs}
            if len(named) != len(specs):
                problem = 'two tensors have the same name, if "/" and "." are equal.'
                fix = "rename one of them, with jqx.interop.tree and named."
                raise fail("convert", problem, fix=fix)
            write(args.output, named, args.format, **_arguments(args, archive))
        _show_converted(args, archive, specs)
    return 0


def _in_half(choice: Choice) -> Choice:
    """Returns a choice with scales that float16 can hold."""
    spec = choice.spec
    if spec is None or isinstance(format_of(spec.qtype), Block):
        return choice
    return choice._replace(spec=dataclasses.replace(spec, calibrator=Rounded(spec.calibrator)))


def _arguments(args: argparse.Namespace, archive: Archive) -> dict[str, Any]:
    """Returns the arguments of `write` other than the leaves."""
    if args.format == GGUF:
        _check_unused(args, "config", "activation")
        gguf_metadata = archive.metadata if archive.format == GGUF else None
        metadata = gguf_metadata if args.metadata is None else read_json(args.metadata)
        return {"metadata": metadata, "overwrite": args.force}
    _check_unused(args, "metadata")
    has_tokenizer = any(os.path.isfile(os.path.join(args.input, name)) for name in TOKENIZERS)
    return {
        "config": archive.config or {} if args.config is None else args.config,
        "tokenizer": args.input if has_tokenizer else None,
        "activation": args.activation,
        "overwrite": args.force,
    }


def _check_unused(args: argparse.Namespace, *names: str) -> None:
    for name in names:
        if getattr(args, name) is not None:
            raise fail("convert", f"`--{name}` has no use for {args.format}.", fix="leave it out.")


def _show_converted(args: argparse.Namespace, archive: Archive, specs: dict[str, Any]) -> None:
    old_bytes = sum(size_of(archive.spec(path)) for path in archive.paths)
    new_bytes = sum(map(size_of, specs.values()))
    losses = left_out(archive, args.input, args.format, args.activation)
    if args.json:
        written = {"written": args.output, "from": archive.format, "format": args.format}
        sizes = {"bytes_before": old_bytes, "bytes_after": new_bytes, "left_out": losses}
        print_json({**written, "tensors": len(specs), **sizes})
        return
    kinds = f"{archive.format} to {args.format}"
    print(f"{args.output}: {len(specs)} tensors, {kinds}; {savings(old_bytes, new_bytes)}")
    print_left_out(losses)


# The parts of a checkpoint other than its tensors: which are kept, and which are left out.


OWN = "jqx"
"""The format of `jqx.save`."""

_WRITTEN = ("config.json", "quantize_config.json", "quant_config.json", *TOKENIZERS)
"""Files that the output folder gets too, copied or written again."""


def texts(archive: Archive) -> dict[str, str]:
    """Returns the metadata of a file for safetensors files, with values other than text as JSON."""
    return {
        key: value if isinstance(value, str) else json.dumps(value, default=_plain)
        for key, value in archive.metadata.items()
    }


def _plain(x: Any) -> Any:
    assert isinstance(x, (np.ndarray, np.generic)), type(x)
    return x.tolist()


def left_out(
    archive: Archive, source: str, format: str, activation: str | None = None
) -> list[str]:
    """Returns what a checkpoint of another format does not keep, in words.

    Args:
      archive: the input.
      source: its path.
      format: the output format.
      activation: how activations are to be quantized, if this is passed again.
    """
    losses = []
    if archive.quantized is not None:
        losses.append("the plan and the scales of activations of a quantized function")
    keeps_metadata = format == OWN or (format == GGUF and archive.format == GGUF)
    names = [] if keeps_metadata else [key for key in archive.metadata if key != "format"]
    if names:
        losses.append(f"{len(names)} entries of metadata: {_shortly(names)}")
    written = {INDEX} if format in (OWN, GGUF) else {INDEX, *_WRITTEN}
    is_folder = os.path.isdir(source) and archive.format not in ("gemma", "orbax")
    files = sorted({*os.listdir(source)} - written) if is_folder else []
    other_files = [name for name in files if not name.endswith(".safetensors")]
    if other_files:
        losses.append(f"the files {_shortly(other_files)}")
    if format not in (OWN, GGUF):
        losses += _of_config(archive, activation)
    return losses


def _of_config(archive: Archive, activation: str | None) -> list[str]:
    """Returns the parts of a config, other than those of weights, that are not written again."""
    config = quantization_of(archive.config)
    data = {} if config is None else config.data
    groups = (data.get("config_groups") or {}).values()
    fields = [f"{kind}_activations" for kind in ("input", "output")]
    lost_fields = []
    if activation is None:
        lost_fields += [field for field in fields if any(group.get(field) for group in groups)]
    if data.get("kv_cache_scheme"):
        lost_fields.append("kv_cache_scheme")
    if data.get("activation_scheme") == "static":
        lost_fields.append("activation_scheme: static")
    return [f"{field} of the config" for field in lost_fields]


def _shortly(names: list[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


def print_left_out(losses: list[str]) -> None:
    """Prints the list, one entry per line."""
    for text in losses:
        print(f"left out: {text}")


# Chooses which tensors of a file are quantized, and how: by rules, then by the policy.
#
# A file does not describe contractions. By convention a weight is a float tensor with two or more
# axes whose name ends in weight, weights, kernel, embedding or embeddings. A policy applies to
# these; a rule applies to every tensor that it matches. A lookup table is a weight with two axes
# whose name, without a final `.weight`, ends in embedding, embeddings, embed_tokens, wte or wpe.
# A policy leaves tables in float, as presets do, unless `--tables` is passed. In the layout of
# torch, [out, in, ...], each index of the first axis has its own scale; in that of flax, [...,
# in, out], each index of the last axis, and for embeddings of the first.


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
        problem = f"`--layout` {args.layout} has no use without a policy or rules."
        raise fail("quantize", problem, fix="pass --policy or --rule too, or leave it out.")
    policy = None if args.policy is None else getattr(presets, args.policy)().rules[0].weight
    if args.tables is not None and args.policy is None:
        problem = f"`--tables` {args.tables} has no use without a policy."
        fix = "pass --policy, or --rule 'regex=scheme' for the tables."
        raise fail("quantize", problem, fix=fix)
    tables = parse_scheme(args.tables or "float")
    choices: dict[str, Choice] = {}
    used: set[FileRule | None] = set()
    for path in archive.paths:
        leaf = archive.spec(path)
        rule_of_path = next((rule for rule in rules if rule.pattern.fullmatch(path)), None)
        if isinstance(leaf, QTensor):
            covered = policy is not None and _is_weight(path, leaf)
            detail = f"--policy {args.policy}" if covered else ""
            if rule_of_path is not None:
                quantizes = rule_of_path.scheme.spec is not None
                detail = f"the rule {rule_of_path.text!r}" if quantizes else ""
            if detail:
                problem = f"the tensor {path!r} is quantized already: {detail}."
                fix = "start from the float file, or keep it with an earlier rule: --rule "
                fix += "'.*mlp.*=float'."
                raise fail("quantize", problem, fix=fix)
            used.add(rule_of_path)
            reason = "quantized already" if rule_of_path is None else rule_of_path.text
            choices[path] = Choice(None, reason)
        elif not jnp.issubdtype(leaf.dtype, jnp.floating):
            choices[path] = Choice(None, "no floats")
        elif rule_of_path is not None:
            used.add(rule_of_path)
            choices[path] = _chosen(path, leaf, rule_of_path.scheme, rule_of_path.text, args.layout)
        elif policy is not None and _is_weight(path, leaf):
            scheme, reason = Scheme(policy), f"policy {args.policy}"
            if leaf.ndim == 2 and _TABLE.fullmatch(path):
                scheme, reason = tables, f"tables {args.tables or 'float'}"
            choices[path] = _chosen(path, leaf, scheme, reason, args.layout)
        else:
            choices[path] = Choice(None, "no rule")
    for rule in rules:
        if rule not in used:
            problem = f"the rule {rule.text!r} matches no name that no earlier rule matches."
            fix = "see the names with: python -m jqx quantize IN OUT --policy w8a16 --dry-run."
            raise fail("quantize", problem, fix=fix)
    return choices


def quantize_leaf(x: Any, spec: QSpec) -> QTensor:
    """Quantizes an array; codes of fewer than 8 bits are packed along its last axis."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.eval_shape(partial(quantize_leaf, spec=spec), x)
    packs = format_of(spec.qtype).bits < 8 and x.ndim > 0
    return QTensor.quantize(x, spec, pack=-1 if packs else None)


def quantize_finite(x: Any, path: str, spec: QSpec) -> QTensor:
    """Quantizes an array that is to be written; checks that codes and scales can hold it."""
    q = quantize_leaf(x, spec)
    if isinstance(x, jax.ShapeDtypeStruct):
        return q
    scale = np.asarray(q.real_scale())
    kind = jnp.finfo(getattr(spec.calibrator, "dtype", scale.dtype))  # `Rounded` clamps to its own
    scale, smallest = np.abs(scale.astype(np.float64)), float(kind.smallest_subnormal)
    wrong = {
        "numbers that are NaN or infinite": not np.isfinite(np.asarray(x)).all(),
        f"scales beyond {float(kind.max):.3g}": not (scale < float(kind.max)).all(),
        f"no scale above {smallest:.3g}": np.any(x) and scale.max() <= smallest,
    }
    problems = [text for text, holds in wrong.items() if holds]
    if problems:
        problem = f"the tensor {path!r} of {x.dtype.name} cannot be quantized: {problems[0]}."
        fix = "check the tensor, or leave it in float: --rule 'name=float'."
        raise fail("quantize", problem, fix=fix)
    return q


def made(read: Callable[[str], Any], path: str, choice: Choice) -> Any:
    """Returns a leaf of a file, abstract if `read` is, quantized if the choice has a spec."""
    leaf = read(path)
    return leaf if choice.spec is None else quantize_finite(leaf, path, choice.spec)


def _is_weight(path: str, leaf: Any) -> bool:
    return leaf.ndim >= 2 and path.endswith(_SUFFIXES)


def _chosen(path: str, leaf: Any, scheme: Scheme, reason: str, layout: str | None) -> Choice:
    if scheme.spec is None:
        return Choice(None, reason)
    if leaf.dtype == jnp.float64 and not jax.config.read("jax_enable_x64"):
        problem = f"the tensor {path!r} is float64, which JAX would cut to float32."
        fix = "set JAX_ENABLE_X64=1 in the environment, or keep it with a rule '...=float'."
        raise fail("quantize", problem, fix=fix)
    spec = scheme.spec
    try:
        spec = spec.resolve(leaf.ndim, _kept_axes(path, leaf.ndim, scheme.contract, layout))
        quantize_leaf(leaf, spec)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{error}\n  at: {path!r}, by {reason!r}") from None
    return Choice(spec, reason)


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


# Parses rules of the command line, `regex=scheme`; see `jqx/_src/tensor/spec.py`.


_RULE = re.compile(r"(.+?)=([a-z][a-z0-9_]*(?::[a-z]+(?:=[^:=]+)?)*)", re.DOTALL)


class FileRule(NamedTuple):
    """A scheme for the tensors whose names match a regular expression in full."""

    pattern: re.Pattern[str]
    scheme: Scheme
    text: str


def parse_rule(text: str) -> FileRule:
    """Returns the rule for a text `regex=scheme`.

    Raises:
      ValueError: if the text does not have this form.

    Example:
      >>> rule = parse_rule("layers.[0-9]+.*=int4:group=32")
      >>> rule.pattern.pattern, str(rule.scheme.spec)
      ('layers.[0-9]+.*', 'int4 per_group(32, tail=True)')
    """
    match = _RULE.fullmatch(text)
    if match is None:
        raise _wrong("the rule is not regex=scheme.", text, "such as '.*mlp.*=int4:group=32'")
    try:
        pattern = re.compile(match[1])
    except (re.error, OverflowError) as error:
        raise _wrong(
            f"the rule has no valid regular expression: {error}.", text, "a pattern of Python's re"
        ) from None
    return FileRule(pattern, parse_scheme(match[2]), text)


def _wrong(problem: str, detail: str, expected: str) -> Exception:
    fix = "see the table of schemes in the documentation, docs/guides/policies.md."
    return fail("scheme", problem, given=detail, expected=expected, fix=fix)


# Output of sub-commands other than tables.


def print_json(data: Any) -> None:
    """Prints JSON, with infinite and NaN numbers, which JSON lacks, as null."""
    print(json.dumps(finite(data), indent=2))


def savings(old_bytes: int, new_bytes: int) -> str:
    """Returns a description of the change of a number of bytes."""
    if old_bytes == new_bytes:
        return f"{old_bytes:,} bytes, as before"
    factor = f" ({old_bytes / new_bytes:.2f} times fewer)" if new_bytes else ""
    return f"{old_bytes:,} bytes become {new_bytes:,}{factor}"


def size_of(leaf: Any) -> int:
    """Returns the bytes of a leaf, abstract or not."""
    return leaf.nbytes if isinstance(leaf, QTensor) else leaf.size * leaf.dtype.itemsize


def add_force(parser: argparse.ArgumentParser) -> None:
    """Adds the option to overwrite existing output."""
    parser.add_argument("--force", action="store_true", help="replace existing output")


def check_absent(function: str, path: str, force: bool) -> None:
    """Checks that no file or checkpoint folder is replaced without `--force`."""
    is_model = os.path.isdir(path) and function == "convert"
    if not force and (os.path.isfile(path) or is_model):
        problem, fix = f"{path!r} exists already.", "choose another name, or pass --force."
        raise fail(function, problem, fix=fix, error=FileExistsError)
