"""`python -m jqx convert`: converts a checkpoint to another format, tensor by tensor."""

import argparse
import dataclasses
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from .._errors import fail
from ..calibrators import Rounded
from ..interop import Archive, save_leaves, write
from ..interop._shared import GGUF, TARGETS, TOKENIZERS, Leaf, read_json
from ..numerics import Block, format_of
from ._beside import OWN, left_out, print_left_out, texts
from ._choices import Choice, add_choices, choose, made
from ._output import add_force, check_absent, print_json, savings, size_of

_IN_HALF = ("gptq", "awq", GGUF)
"""Formats with float16 scales: weights quantized here get such scales."""


def add(commands: Any) -> None:
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
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
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
            tree, leaves = archive.map(specs.get), (each() for each in read.values())
            save_leaves(args.output, tree, leaves, metadata=texts(archive))
        else:
            named = {path.replace("/", "."): Leaf(specs[path], read[path]) for path in specs}
            _check_names(named, specs)
            write(args.output, named, args.format, **_arguments(args, archive))
        _show(args, archive, specs)
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
        known = archive.metadata if archive.format == GGUF else None
        metadata = known if args.metadata is None else read_json(args.metadata)
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
            raise fail(
                "convert",
                f"`--{name}` has no use for {args.format}.",
                given=f"--{name} {getattr(args, name)}",
                expected="nothing: this format has no such data",
                fix="leave it out.",
            )


def _check_names(named: Mapping[str, Any], specs: Mapping[str, Any]) -> None:
    """Checks that each tensor keeps a unique name."""
    if len(named) != len(specs):
        raise fail(
            "convert",
            "two tensors have the same name.",
            given='paths that differ only in "/" and "."',
            expected='a unique name for each, with "." in place of "/"',
            fix="rename one of them, with jqx.interop.tree and named.",
        )


def _show(args: argparse.Namespace, archive: Archive, specs: dict[str, Any]) -> None:
    before = sum(size_of(archive.spec(path)) for path in archive.paths)
    after = sum(map(size_of, specs.values()))
    lost = left_out(archive, args.input, args.format, args.activation)
    if args.json:
        written = {"written": args.output, "from": archive.format, "format": args.format}
        sizes = {"bytes_before": before, "bytes_after": after, "left_out": lost}
        print_json({**written, "tensors": len(specs), **sizes})
        return
    kinds = f"{archive.format} to {args.format}"
    print(f"{args.output}: {len(specs)} tensors, {kinds}; {savings(before, after)}")
    print_left_out(lost)
