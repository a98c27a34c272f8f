"""Errors for a call that differs from the planned one: the first difference, and its meaning."""

import re
from collections.abc import Sequence
from typing import Any

from jax import dtypes

from .._errors import fail

AGAIN = "make the plan again with jqx.make_plan(f, policy)(*args)."


def parameter_line(path: str, leaf: Any) -> str:
    """The line of a signature that describes one parameter."""
    # That of NumPy's arrays inside JAX; typed keys of random numbers have an extended one.
    dtype = dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)
    return line_of(path, dtype, leaf.shape)


def line_of(path: str, dtype: Any, shape: Sequence[int]) -> str:
    """The line of a parameter of a dtype, or of the name of one, and a shape."""
    return f"parameter {path}: {dtype}{list(shape)}"


def parameter_of(line: str) -> tuple[str, str, tuple[int, ...]]:
    """Returns the path, name of the dtype and shape of the parameter that a line describes."""
    path, dtype, sizes = re.fullmatch(r"parameter (.*): (\S+)\[(.*)\]", line, re.DOTALL).groups()  # type: ignore[union-attr]
    return path, dtype, tuple(int(size) for size in sizes.split(",") if size)


def is_parameter_line(line: str) -> bool:
    """Whether the line of a signature describes a parameter."""
    return line.startswith("parameter ")


_CONTRACTION = re.compile(r"contraction \(([0-9, ]*)\) ")
"""The start of a line that describes a contraction, with its address."""


def addresses_of(signature: Sequence[str]) -> list[tuple[int, ...]]:
    """Returns the addresses of the contractions in a signature, in order."""
    found = [own[1] for line in signature if (own := _CONTRACTION.match(line))]
    return [tuple(int(part) for part in text.split(",") if part.strip()) for text in found]


def without_addresses(signature: Sequence[str]) -> list[str]:
    """Returns a signature that does not depend on the calls, loops and branches around each
    contraction.
    """
    return [_CONTRACTION.sub("contraction ", line, count=1) for line in signature]


def check_same(
    function: str, signature: Sequence[str], planned: Sequence[str], fix: str = AGAIN
) -> None:
    """Raises if a function, or its parameters, are not those that the plan was made for."""
    if tuple(signature) == tuple(planned):
        return
    length = max(len(signature), len(planned))
    pad = [*signature, *["(nothing)"] * (length - len(signature))]
    own = [*planned, *["(nothing)"] * (length - len(planned))]
    found, wanted = next((a, b) for a, b in zip(pad, own, strict=True) if a != b)
    if _without_first_axis(wanted) == found:
        fix = "map over the other arguments alone: jax.vmap(..., in_axes=(None, 0))."
    raise fail(
        function,
        "the plan was made for another function or other parameters.",
        given=found,
        expected=wanted,
        fix=fix,
    )


def check_ranks(function: str, plan: Any, found: Sequence[Any]) -> None:
    """Raises if the operands of a contraction have another number of axes than when planned."""
    shapes = {(item.address, item.op): item.shapes for item in (*plan.skipped, *plan.sites)}
    for item in found:
        now = tuple(tuple(atom.aval.shape) for atom in item.eqn.invars[:2])
        planned = shapes.get((item.address, item.op)) if item.address else None
        if planned is None or [*map(len, now)] == [*map(len, planned)]:
            continue
        where = f" at path {item.path!r}" if item.path else ""
        raise fail(
            function,
            "an argument has another number of axes than when the plan was made.",
            given=f"{item.op} of {_shown(now)}{where}",
            expected=f"{_shown(planned)}, with any batch size",
            fix="give it the axes that it had, such as x[None] for one example of a batch, or "
            "make the plan for such an argument. To map over examples what jqx.ptq returned, "
            "map inside: result.bind(jax.vmap(f, in_axes=(None, 0)))(x).",
        )


def _without_first_axis(line: str) -> str:
    """Returns the line of a parameter for one index of its first axis."""
    return re.sub(r"\[\d+(, )?(.*)\]$", r"[\2]", line) if is_parameter_line(line) else ""


def _shown(shapes: Sequence[Sequence[Any]]) -> str:
    return " x ".join("[" + ", ".join(map(str, shape)) + "]" for shape in shapes)
