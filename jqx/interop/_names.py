"""Maps names of tensors to paths of a tree and back, by rules: templates, stacks, views."""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from .._checks import check_instance, check_integer, shown
from .._errors import fail
from ..tensor import QTensor

_HOLE = re.compile(r"\{(\w+)(?::([^{}]*))?\}")


@dataclasses.dataclass(frozen=True)
class Name:
    """A rule for tensors of a checkpoint: their paths in a tree, and their layout there.

    In both templates `{layer}` stands for a part of the name without dots or slashes, and
    `{layer:[0-9]+}` for a part that matches the regular expression. A part that is not in the path
    must be a number: it is the index along a new first axis, so that the tensors of all layers are
    stacked for a scan. (If there are several such parts, the first is the outermost axis.)

    Attributes:
      source: template of names, such as `"model.layers.{layer}.mlp.up_proj.weight"`.
      target: template of paths, such as `"layers/up"`, or `"layers/{layer}/up"`; `None` leaves out
        the tensors.
      transpose: swaps the last two axes, as between torch's `[out, in]` and `x @ w`; or the order
        of all axes. `True` is a view: no code is moved.
      split: sizes into which an axis is split, keyed by its number after transposing, counted from
        0, such as `{1: (heads, size)}`. Packed codes are unpacked for it and packed again; each
        part must consist of whole groups.
      interleaved: number of heads of queries or keys whose rows llama.cpp has permuted. GGUF files
        of Llama store the rows of each pair of a rotary embedding next to each other; the tree then
        has them in the two halves of a head. 0 keeps the order of rows.
      halved: the inverse: number of heads whose rows are in halves in the file, as in transformers;
        the tree then has them in pairs. 0 keeps the order of rows.
      optional: whether the rule may match nothing.

    Raises:
      TypeError: if a field has another type.
      ValueError: if a template is invalid, or the path has a part that the name lacks.

    Example:
      >>> import jqx
      >>> jqx.interop.Name("model.layers.{layer}.mlp.up_proj.weight", "layers/up", transpose=True)
      Name('model.layers.{layer}.mlp.up_proj.weight' -> 'layers/up', transpose=True)
    """

    source: str
    target: str | None
    _: dataclasses.KW_ONLY
    transpose: bool | tuple[int, ...] = False
    split: Mapping[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    interleaved: int = 0
    halved: int = 0
    optional: bool = False

    def __post_init__(self) -> None:
        fix = "pass for example Name('lm_head.weight', 'head/kernel', transpose=True)."
        check_instance("interop.Name", "source", self.source, str, fix=fix)
        heads = check_integer("interop.Name", "interleaved", self.interleaved)
        halved = check_integer("interop.Name", "halved", self.halved)
        if not min(heads, halved) == 0 <= max(heads, halved):
            raise fail(
                "interop.Name",
                "`interleaved` or `halved` is not a number of heads.",
                given=f"interleaved == {heads}, halved == {halved}",
                expected="one of them the number of heads of the weight, the other 0",
                fix="pass metadata['llama.attention.head_count'], or ['...head_count_kv'] for "
                "keys.",
            )
        if not (isinstance(self.split, Mapping) and all(map(_is_split, self.split.items()))):
            raise fail(
                "interop.Name",
                "`split` does not give sizes of axes.",
                given=shown(self.split),
                expected="a dict from the number of an axis, from 0, to a tuple of sizes, from 1",
                fix="pass for example split={1: (heads, size)}.",
                error=TypeError,
            )
        if self.target is not None:
            check_instance("interop.Name", "target", self.target, str, fix=fix)
        missing = {*_holes(self.target or "")} - {*_holes(self.source)}
        if missing:
            raise fail(
                "interop.Name",
                "the path has a part that the name lacks.",
                given=f"{{{min(missing, default='')}}} in {self.target!r}, and {self.source!r}",
                expected="parts of the name in the path",
                fix="use the same parts in both.",
            )
        for template in (self.source, self.target or ""):
            _compiled(template)

    def __repr__(self) -> str:
        more = [
            f", {field}={value!r}"
            for field in ("transpose", "split", "interleaved", "halved", "optional")
            if (value := getattr(self, field))
        ]
        return f"Name({self.source!r} -> {self.target!r}{''.join(more)})"

    @property
    def stacked(self) -> tuple[str, ...]:
        """The parts of the name that are indices of leading axes."""
        if self.target is None:
            return ()
        return tuple(part for part in _holes(self.source) if part not in _holes(self.target))

    def match(self, name: str) -> dict[str, str] | None:
        """Returns the parts of a name; `None` if it does not match."""
        found = _compiled(self.source).fullmatch(name)
        return None if found is None else found.groupdict()

    def match_path(self, path: str) -> dict[str, str] | None:
        """Returns the parts of a path; `None` if it does not match."""
        if self.target is None:
            return None
        kinds = {found.group(1): found.group(0) for found in _HOLE.finditer(self.source)}
        template = _HOLE.sub(lambda hole: kinds[hole.group(1)], self.target)
        found = _compiled(template).fullmatch(path)
        return None if found is None else found.groupdict()

    def path_of(self, parts: Mapping[str, str]) -> str:
        """Returns the path of a tensor."""
        return _filled(self.target or "", parts)

    def name_of(self, parts: Mapping[str, str]) -> str:
        """Returns the name of a tensor."""
        return _filled(self.source, parts)

    def view(self, name: str, leaf: Any) -> Any:
        """Returns a leaf in the layout of the tree."""
        leaf = self._with_rows(name, leaf, back=False)
        order = self._order(name, leaf)
        if order is not None:
            leaf = self._transposed(name, leaf, order)
        shape: list[int] = []
        for axis, sizes in self.split.items():
            fits = axis < leaf.ndim and math.prod(sizes) == leaf.shape[axis]
            self._require(fits, name, leaf, f"an axis {axis} of {' * '.join(map(str, sizes))}")
        ends = []
        for axis, n in enumerate(leaf.shape):
            shape += self.split.get(axis, (n,))
            ends.append(len(shape) - 1)
        if tuple(shape) == tuple(leaf.shape):
            return leaf
        return self._moved(name, leaf, ends.__getitem__, lambda x: x.reshape(tuple(shape)))

    def unview(self, name: str, leaf: Any) -> Any:
        """Inverts `view`."""
        shape, at, places = [], 0, []
        rank = leaf.ndim - sum(len(sizes) - 1 for sizes in self.split.values())
        for axis in range(rank):
            sizes = self.split.get(axis, leaf.shape[at : at + 1])
            fits = tuple(leaf.shape[at : at + len(sizes)]) == tuple(sizes)
            self._require(fits, name, leaf, f"axis {axis} split into {tuple(sizes)}")
            size = 1
            for n in sizes:
                size *= n
            shape.append(size)
            places += [axis] * len(sizes)
            at += len(sizes)
        if tuple(shape) != tuple(leaf.shape):
            leaf = self._moved(name, leaf, places.__getitem__, lambda x: x.reshape(tuple(shape)))
        order = self._order(name, leaf)
        if order is not None:
            back = tuple(sorted(range(leaf.ndim), key=order.__getitem__))
            leaf = self._transposed(name, leaf, back)
        return self._with_rows(name, leaf, back=True)

    def _transposed(self, name: str, leaf: Any, order: tuple[int, ...]) -> Any:
        """Returns a leaf with its axes in an order; a view if only the last two are swapped."""
        if self.transpose is True:
            return leaf.transpose(order)
        return self._moved(name, leaf, order.index, lambda x: x.transpose(order))

    def _moved(
        self, name: str, leaf: Any, place: Callable[[int], int], move: Callable[[Any], Any]
    ) -> Any:
        """Returns a leaf with its axes moved, split or joined. Codes that lie in another order than
        the axes are unpacked for it, and packed again.

        Args:
          name: name of the tensor.
          leaf: the leaf.
          place: returns where the end of an axis is afterwards.
          move: moves the axes of a leaf in the order of its axes.
        """
        layout = leaf.layout if isinstance(leaf, QTensor) else None
        try:
            if layout is None:
                return move(leaf)
            packing, moved = layout.packing, move(leaf.unpack())
        except (TypeError, ValueError) as error:
            raise ValueError(f"{error}\n  at:       {name!r}, by {self!r}") from None
        return moved if packing is None else moved.pack(place(packing.axis % leaf.ndim))

    def _with_rows(self, name: str, leaf: Any, *, back: bool) -> Any:
        """Returns a leaf of the file with the rows of heads in the order of the tree; or the
        inverse.
        """
        heads = self.interleaved or self.halved
        if not heads:
            return leaf
        axis = max(leaf.ndim - 2, 0)
        rows = leaf.shape[axis] if leaf.ndim else 1
        self._require(rows % (2 * heads) == 0, name, leaf, f"rows of {heads} heads of pairs")
        order = np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(leaf)):
            return leaf
        if isinstance(leaf, QTensor) and leaf.layout is not None:
            packing = leaf.layout.packing
            along = leaf.layout.swapped or packing is None or packing.axis % leaf.ndim == axis
            leaf = leaf.unpack() if along else leaf
        to_halves = bool(self.interleaved) != back
        return leaf.take(order if to_halves else np.argsort(order), axis=axis)

    def _order(self, name: str, leaf: Any) -> tuple[int, ...] | None:
        if self.transpose is False:
            return None
        n = leaf.ndim
        order = (*range(n - 2), n - 1, n - 2) if self.transpose is True else tuple(self.transpose)
        self._require(sorted(order) == [*range(n)] and n > 1, name, leaf, f"axes {order}")
        return order

    def _require(self, fits: bool, name: str, leaf: Any, expected: str) -> None:
        if not fits:
            raise fail(
                "interop.tree",
                f"the tensor {name!r} does not fit its rule.",
                given=f"{leaf!r}" if isinstance(leaf, QTensor) else f"shape {tuple(leaf.shape)}",
                expected=expected,
                fix=f"correct the rule: {self!r}.",
            )


def as_names(names: Any) -> tuple[Name, ...]:
    """Returns rules, from `Name`s or pairs of templates."""
    given = list(names.items()) if isinstance(names, Mapping) else names
    fits = isinstance(given, Sequence) and not isinstance(given, str)
    rules = []
    for rule in given if fits else [None]:
        pair = isinstance(rule, tuple) and len(rule) == 2
        if isinstance(rule, Name) or pair:
            rules.append(Name(*rule) if isinstance(rule, tuple) else rule)
            continue
        raise fail(
            "interop.tree",
            "`names` are not rules.",
            given=shown(rule) if fits else f"an object of type {type(names).__name__}",
            expected="a list of jqx.interop.Name, or of pairs (name, path); or a dict",
            fix='pass for example [jqx.interop.Name("lm_head.weight", "head")].',
            error=TypeError,
        )
    return tuple(rules)


def _is_split(item: tuple[Any, Any]) -> bool:
    axis, sizes = item
    fits = isinstance(sizes, tuple) and all(type(n) is int and n >= 1 for n in sizes)
    return type(axis) is int and axis >= 0 and fits and len(sizes) > 0


@functools.cache
def _holes(template: str) -> tuple[str, ...]:
    return tuple(found.group(1) for found in _HOLE.finditer(template))


def _filled(template: str, parts: Mapping[str, str]) -> str:
    return _HOLE.sub(lambda found: parts[found.group(1)], template)


@functools.cache
def _compiled(template: str) -> re.Pattern[str]:
    """Returns the regular expression of a template."""
    text, at, seen = "", 0, set()
    for found in _HOLE.finditer(template):
        part, pattern = found.group(1), found.group(2) or r"[^./]+"
        text += re.escape(template[at : found.start()])
        text += f"(?P={part})" if part in seen else f"(?P<{part}>{pattern})"
        seen.add(part)
        at = found.end()
    try:
        return re.compile(text + re.escape(template[at:]))
    except re.error as error:
        raise fail(
            "interop.Name",
            "a template is invalid.",
            given=f"{template!r}: {error}",
            expected="names with {part} or {part:regular expression} in them",
            fix="pass for example 'model.layers.{layer}.mlp.up_proj.weight'.",
        ) from None
