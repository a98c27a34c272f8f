"""`tree`: leaves of an archive as a tree of the user, by rules (`Name`); `named`: its inverse."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import dtypes
from jax.sharding import Sharding

from ... import QTensor
from ..checks import called, check_instance, check_integer, shown
from ..errors import fail, some
from ..tensor.shardings import put
from ..transforms.trace import is_quantized
from .archive import Archive, as_jax
from .safetensors import stored_dtype


@called("interop.tree", "pass for example jqx.interop.tree(archive, names).")
def tree(
    archive: Archive,
    names: Rules,
    *,
    like: Any = None,
    abstract: bool = False,
    sharding: Shardings = None,
) -> Any:
    """Returns the tensors of an archive as a tree of parameters, by rules for their names.

    Each tensor is read once, when it is put in its place; only one is held in addition to the
    result.

    Args:
      archive: an open archive, from `jqx.interop.read`.
      names: rules, as `jqx.interop.Name` or pairs of templates (name, path). The first rule that
        matches a name applies.
      like: the tree to build, of arrays or of `jax.ShapeDtypeStruct`, such as the result of
        `jax.eval_shape(init)`. Each of its leaves must be found, with its shape. Its keys, joined
        with "/", are the paths. `None` makes nested dicts.
      abstract: whether leaves are `jax.ShapeDtypeStruct` instead of arrays, so that nothing is
        read.
      sharding: where leaves are put: a `jax.sharding.Sharding` for all leaves, or a function of the
        path and the abstract leaf that returns one, or `None` for the default device. Scales are
        partitioned like their codes.

    Returns:
      The tree: arrays, and QTensors for quantized tensors. Their dtypes are those of the archive.

    Raises:
      ValueError: if a tensor has no rule, a rule has no tensor, two tensors have the same path,
        layers cannot be stacked, or a leaf does not fit `like`; or as in `Archive.read`.

    Example:
      >>> import jqx, jax.numpy as jnp, tempfile
      >>> path = tempfile.mkdtemp() + "/model.safetensors"
      >>> jqx.save(path, {f"layers.{i}.up.weight": jnp.ones((3, 2)) for i in range(4)})
      >>> with jqx.interop.read(path) as archive:
      ...     names = [jqx.interop.Name("layers.{i}.up.weight", "up", transpose=True)]
      ...     jqx.interop.tree(archive, names)["up"].shape
      (4, 2, 3)
    """
    fix = "pass an open archive: with jqx.interop.read(path) as archive."
    check_instance("interop.tree", "archive", archive, Archive, fix=fix)
    rules = as_names(names)
    stacks = _places(archive, rules)
    shapes = {path: _spec(archive, stack) for path, stack in stacks.items()}
    paths = None if like is None else _check_like(shapes, like)

    leaves = {}
    for path, (rule, _, stack) in stacks.items():
        spec = shapes[path]
        if abstract:
            leaves[path] = spec
            continue
        if () in stack:
            leaf = rule.view(stack[()], archive.numpy(stack[()]))
        else:
            leaf = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), spec)
            for index, name in stack.items():
                part = jax.tree.leaves(rule.view(name, archive.numpy(name)))
                for target, x in zip(jax.tree.leaves(leaf), part, strict=True):
                    target[index] = x
        where = sharding_of(sharding, path, spec)
        leaves[path] = jax.tree.map(as_jax, leaf) if where is None else placed(path, leaf, where)
    if paths is None:
        return _nested(leaves)
    structure = jax.tree.structure(like, is_leaf=is_quantized)
    return structure.unflatten(leaves[path] for path in paths)


@called("interop.named", "pass for example jqx.interop.named(params, names).")
def named(params: Any, names: Rules) -> dict[str, Any]:
    """Returns a tree as a dict by the names of a checkpoint, the inverse of `tree`.

    Args:
      params: arrays and QTensors in any tree.
      names: the rules of `tree`. The first rule that matches a path applies. A rule is an error if
        one earlier rule matches all paths that it matches, also with `optional=True`.

    Returns:
      A dict of views, ready for `jqx.interop.write`.

    Raises:
      ValueError: if a leaf has no rule, a rule has no leaf, two leaves have the same name, or a
        leaf does not fit its rule.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> names = [jqx.interop.Name("layers.{i}.up.weight", "up", transpose=True)]
      >>> jqx.interop.named({"up": jnp.ones((2, 3, 4))}, names)["layers.1.up.weight"].shape
      (4, 3)
    """
    rules, leaves_by_name, used = as_names(names), {}, set()
    leaves = _paths("interop.named", params)
    check_order("interop.named", rules, dict(leaves), Name.match_path, strict=True)
    for path, leaf in leaves:
        rule, parts = _rule_of("interop.named", rules, Name.match_path, path)
        used.add(rule.source)
        if len(leaf.shape) < len(rule.stacked):
            problem = f"{path!r} of shape {tuple(leaf.shape)} lacks axes that its rule stacks."
            raise fail("interop.named", problem, fix=f"correct the rule: {rule!r}.")
        for index in itertools.product(*map(range, leaf.shape[: len(rule.stacked)])):
            index_parts = {**parts, **dict(zip(rule.stacked, map(str, index), strict=True))}
            name = rule.name_of(index_parts)
            if name in leaves_by_name:
                raise _doubled("interop.named", name)
            leaves_by_name[name] = rule.unview(name, leaf[index] if index else leaf)
    for rule in rules:
        if rule.target is not None and not rule.optional and rule.source not in used:
            raise _unused("interop.named", rule)
    return leaves_by_name


def _places(archive: Archive, rules: Sequence[Name]) -> dict[str, Place]:
    """Returns the tensors of each leaf, in the order of the archive."""
    stacks: dict[str, tuple[Name, dict[tuple[int, ...], str]]] = {}
    used = set()
    for name in archive.paths:
        rule, parts = _rule_of("interop.tree", rules, Name.match, name)
        used.add(rule.source)
        if rule.target is None:
            continue
        path = rule.path_of(parts)
        for part in rule.stacked:
            if not (parts[part].isdecimal() and len(parts[part]) < 7):
                problem = f"the tensor {name!r} cannot be stacked: {{{part}}} is {parts[part]!r}, "
                problem += "not an index."
                fix = f"put {{{part}}} into the path, or one rule for each {{{part}}}: {rule!r}."
                raise fail("interop.tree", problem, fix=fix)
        index = tuple(int(parts[part]) for part in rule.stacked)
        first_rule, stack = stacks.setdefault(path, (rule, {}))
        if first_rule is not rule or index in stack:
            raise _doubled("interop.tree", path)
        stack[index] = name
    check_order("interop.tree", rules, archive.paths, Name.match, strict=False)
    for rule in rules:
        if not rule.optional and rule.source not in used:
            raise _unused("interop.tree", rule)
    return {path: (rule, _sizes(path, stack), stack) for path, (rule, stack) in stacks.items()}


def _sizes(path: str, stack: Mapping[tuple[int, ...], str]) -> tuple[int, ...]:
    """Returns the sizes of the stacked axes, after checking that no tensor is missing."""
    sizes = tuple(max(axis) + 1 for axis in zip(*stack, strict=True))
    if math.prod(sizes) != len(stack):
        missing = next(i for i in itertools.product(*map(range, sizes)) if i not in stack)
        problem = f"the stack {path!r} of sizes {sizes} has no tensor at {missing}."
        raise fail("interop.tree", problem, fix="give different layers different paths.")
    return sizes


def _spec(archive: Archive, tensors: Place) -> Any:
    """Returns an abstract leaf, after checking that stacked tensors agree."""
    rule, sizes, stack = tensors
    spec: Any = None
    for name in stack.values():
        leaf = jax.eval_shape(partial(rule.view, name), archive.spec(name))
        spec = leaf if spec is None else spec
        if _kind(leaf) != _kind(spec):
            problem = f"the tensor {name!r} cannot be stacked with the others: {leaf!r}, not "
            problem += f"{spec!r}."
            fix = "give different layers different paths."
            raise fail("interop.tree", problem, fix=fix)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((*sizes, *x.shape), x.dtype), spec)


def _kind(leaf: Any) -> Any:
    return jax.tree.structure(leaf), [(x.shape, x.dtype) for x in jax.tree.leaves(leaf)]


def _check_like(shapes: Mapping[str, Any], like: Any) -> list[str]:
    """Returns the paths of a tree, after checking that its leaves are those that were found."""
    leaves = dict(_paths("interop.tree", like))
    for path, leaf in shapes.items():
        if path not in leaves:
            problem = f"the leaf {path!r} has no place in `like`, which has {len(leaves)} leaves."
            fix = "correct the rule, or leave the tensor out: Name(source, None)."
            raise fail("interop.tree", problem, fix=fix)
        shape = tuple(leaves[path].shape)
        if tuple(leaf.shape) != shape:
            problem = f"the leaf {path!r} has the shape {tuple(leaf.shape)}, in `like` {shape}."
            raise fail("interop.tree", problem, fix="pass transpose= or split= in its rule.")
    missing = [path for path in leaves if path not in shapes]
    if missing:
        problem = f"{len(missing)} leaves of `like` have no tensor: {some(map(repr, missing))}."
        fix = "add rules for them; for tied weights, drop the leaf that the file lacks."
        raise fail("interop.tree", problem, fix=fix)
    return list(leaves)


def _paths(function: str, params: Any) -> list[tuple[str, Any]]:
    """Returns the leaves of a tree by path, after checking that they have shapes."""
    flat = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_quantized)
    pairs = [(jax.tree_util.keystr(keys, simple=True, separator="/"), x) for keys, x in flat]
    for path, x in pairs:
        if not (hasattr(x, "shape") and hasattr(x, "dtype")):
            problem = f"the leaf {path!r} is not an array: {type(x).__name__}."
            fix = "convert it, for example with jnp.asarray."
            raise fail(function, problem, fix=fix, error=TypeError)
    return pairs


def _nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *keys, name = path.split("/")
        node = root
        for key in keys:
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                raise _doubled("interop.tree", path)
        if name in node:
            raise _doubled("interop.tree", path)
        node[name] = leaf
    return root


def _rule_of(
    function: str, rules: Sequence[Name], match: Match, name: str
) -> tuple[Name, dict[str, str]]:
    """Returns the first rule that matches a name or a path, and the parts of the name."""
    for rule in rules:
        parts = match(rule, name)
        if parts is not None:
            return rule, parts
    raise fail(function, f"{name!r} has no rule.", fix="add one; Name(source, None) leaves it out.")


def _doubled(function: str, name: str) -> Exception:
    problem = f"rules give two tensors or leaves the name {name!r}."
    fix = "distinguish them by parts of the name in the path, such as {layer}."
    return fail(function, problem, fix=fix)


def _unused(function: str, rule: Name) -> Exception:
    problem = f"{rule!r} matches nothing that no earlier rule matches."
    return fail(function, problem, fix="drop it, or pass optional=True.")


# Maps names of tensors to paths of a tree and back, by rules: templates, stacks, views.


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
            problem = f"interleaved == {heads}, halved == {halved}: not a number of heads and 0."
            fix = "pass metadata['llama.attention.head_count'], or ['...head_count_kv'] for keys."
            raise fail("interop.Name", problem, fix=fix)
        if not (isinstance(self.split, Mapping) and all(map(_is_split, self.split.items()))):
            problem = "`split` does not give sizes of axes."
            fix = "pass for example split={1: (heads, size)}."
            raise fail("interop.Name", problem, given=shown(self.split), fix=fix, error=TypeError)
        if self.target is not None:
            check_instance("interop.Name", "target", self.target, str, fix=fix)
        missing = {*_holes(self.target or "")} - {*_holes(self.source)}
        if missing:
            problem = f"{self.source!r} lacks the part {{{min(missing)}}} of {self.target!r}."
            raise fail("interop.Name", problem, fix="use the same parts in both.")
        for template in (self.source, self.target or ""):
            _compiled(template)

    def __repr__(self) -> str:
        options = [
            f", {field}={value!r}"
            for field in ("transpose", "split", "interleaved", "halved", "optional")
            if (value := getattr(self, field))
        ]
        return f"Name({self.source!r} -> {self.target!r}{''.join(options)})"

    @property
    def stacked(self) -> tuple[str, ...]:
        """The parts of the name that are indices of leading axes."""
        if self.target is None:
            return ()
        return tuple(part for part in _holes(self.source) if part not in _holes(self.target))

    def match(self, name: str) -> dict[str, str] | None:
        """Returns the parts of a name; `None` if it does not match."""
        match = _compiled(self.source).fullmatch(name)
        return None if match is None else match.groupdict()

    def match_path(self, path: str) -> dict[str, str] | None:
        """Returns the parts of a path; `None` if it does not match."""
        if self.target is None:
            return None
        kinds = {match.group(1): match.group(0) for match in _HOLE.finditer(self.source)}
        template = _HOLE.sub(lambda hole: kinds[hole.group(1)], self.target)
        match = _compiled(template).fullmatch(path)
        return None if match is None else match.groupdict()

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
        shape, offset, axes = [], 0, []
        rank = leaf.ndim - sum(len(sizes) - 1 for sizes in self.split.values())
        for axis in range(rank):
            sizes = self.split.get(axis, leaf.shape[offset : offset + 1])
            fits = tuple(leaf.shape[offset : offset + len(sizes)]) == tuple(sizes)
            self._require(fits, name, leaf, f"axis {axis} split into {tuple(sizes)}")
            shape.append(math.prod(sizes))
            axes += [axis] * len(sizes)
            offset += len(sizes)
        if tuple(shape) != tuple(leaf.shape):
            leaf = self._moved(name, leaf, axes.__getitem__, lambda x: x.reshape(tuple(shape)))
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
        self, name: str, leaf: Any, axis_of: Callable[[int], int], move: Callable[[Any], Any]
    ) -> Any:
        """Returns a leaf with its axes moved, split or joined. Codes that lie in another order than
        the axes are unpacked for it, and packed again.

        Args:
          name: name of the tensor.
          leaf: the leaf.
          axis_of: returns where the end of an axis is afterwards.
          move: moves the axes of a leaf in the order of its axes.
        """
        layout = leaf.layout if isinstance(leaf, QTensor) else None
        try:
            if layout is None:
                return move(leaf)
            packing, moved = layout.packing, move(leaf.unpack())
        except (TypeError, ValueError) as error:
            raise ValueError(f"{error}\n  at:       {name!r}, by {self!r}") from None
        return moved if packing is None else moved.pack(axis_of(packing.axis % leaf.ndim))

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
            problem = f"the tensor {name!r} of shape {tuple(leaf.shape)} does not fit its rule."
            fix = f"correct the rule: {self!r}."
            raise fail("interop.tree", problem, expected=expected, fix=fix)


Place = tuple[Name, tuple[int, ...], dict[tuple[int, ...], str]]
"""A rule, the sizes of the axes that it stacks, and the name of the tensor at each index."""

Rules = Sequence[Name | tuple[str, str | None]] | Mapping[str, str | None]


def as_names(names: Any) -> tuple[Name, ...]:
    """Returns rules, from `Name`s or pairs of templates."""
    pairs = list(names.items()) if isinstance(names, Mapping) else names
    fits = isinstance(pairs, Sequence) and not isinstance(pairs, str)
    rules = []
    for rule in pairs if fits else [None]:
        pair = isinstance(rule, tuple) and len(rule) == 2
        if isinstance(rule, Name) or pair:
            rules.append(Name(*rule) if isinstance(rule, tuple) else rule)
            continue
        pairs = shown(rule) if fits else f"an object of type {type(names).__name__}"
        fix = 'pass for example [jqx.interop.Name("lm_head.weight", "head")].'
        raise fail("interop.tree", "`names` are not rules.", given=pairs, fix=fix, error=TypeError)
    return tuple(rules)


def _is_split(item: tuple[Any, Any]) -> bool:
    axis, sizes = item
    fits = isinstance(sizes, tuple) and all(type(n) is int and n >= 1 for n in sizes)
    return type(axis) is int and axis >= 0 and fits and len(sizes) > 0


@functools.cache
def _holes(template: str) -> tuple[str, ...]:
    return tuple(match.group(1) for match in _HOLE.finditer(template))


def _filled(template: str, parts: Mapping[str, str]) -> str:
    return _HOLE.sub(lambda match: parts[match.group(1)], template)


@functools.cache
def _compiled(template: str) -> re.Pattern[str]:
    """Returns the regular expression of a template."""
    text, end, parts = "", 0, set()
    for hole in _HOLE.finditer(template):
        part, pattern = hole.group(1), hole.group(2) or r"[^./]+"
        text += re.escape(template[end : hole.start()])
        text += f"(?P={part})" if part in parts else f"(?P<{part}>{pattern})"
        parts.add(part)
        end = hole.end()
    try:
        return re.compile(text + re.escape(template[end:]))
    except re.error as error:
        problem = f"the template {template!r} is invalid: {error}."
        fix = "pass for example 'model.layers.{layer}.mlp.up_proj.weight'."
        raise fail("interop.Name", problem, fix=fix) from None


# Rules that never apply, because earlier rules match all that they match.


Match = Callable[[Name, str], Any]
"""Returns the parts of a name or of a path; `None` if the rule does not match it."""


def check_order(
    function: str, rules: Sequence[Name], names: Collection[str], match: Match, *, strict: bool
) -> None:
    """Checks that each rule that matches a name applies to one.

    An optional rule may lose all its names to several earlier rules, as a general last rule does.

    Args:
      function: the public function that reads the rules.
      rules: the rules in order; the first that matches a name applies.
      names: names of tensors, or paths of leaves.
      match: matches a rule with one of `names`.
      strict: whether an optional rule is refused whose names one earlier rule matches.
    """
    matched = [[name for name in names if match(rule, name) is not None] for rule in rules]
    for index, (rule, own_names) in enumerate(zip(rules, matched, strict=True)):
        earlier = [i for i in range(index) if rules[i].source != rule.source]
        taken = {name: i for i in reversed(earlier) for name in matched[i]}
        if any(name not in taken for name in own_names):
            continue
        hidden = any(set(own_names) <= set(matched[i]) for i in earlier)
        taken_by = [f"{rule!r}, but {name!r} goes to {rules[taken[name]]!r}" for name in own_names]
        if own_names and not (rule.optional and not (strict and hidden)):
            problem = "a rule never applies, because earlier rules match all that it matches."
            fix = "put the narrower rule first, or narrow the other, as in {name:[qkvo]_proj}."
            raise fail(function, problem, given=taken_by[0], fix=fix)


# Puts leaves of NumPy arrays on devices, the scale of a QTensor like its codes.


Shardings = Sharding | Callable[[str, Any], Sharding | None] | None
"""A sharding for all leaves, or a function of the path and the abstract leaf."""


def sharding_of(shardings: Shardings, path: str, spec: Any) -> Sharding | None:
    """Returns the sharding of a leaf; `None` for the default device."""
    sharding = shardings
    if callable(shardings) and not isinstance(shardings, Sharding):
        sharding = shardings(path, spec)
    if sharding is not None and not isinstance(sharding, Sharding):
        problem = f"`sharding` returns a {type(sharding).__name__} for {path!r}, not a sharding."
        fix = "return for example NamedSharding(mesh, PartitionSpec('model'))."
        raise fail("interop.tree", problem, fix=fix, error=TypeError)
    assert sharding is None or isinstance(sharding, Sharding)
    return sharding


def placed(path: str, leaf: Any, sharding: Sharding) -> Any:
    """Puts an array or QTensor of NumPy arrays on devices; each device gets only its part."""
    for x in jax.tree.leaves(leaf):
        cut = dtypes.canonicalize_dtype(x.dtype)
        if cut != x.dtype:
            problem = f"{path!r} would lose bits: JAX cuts {x.dtype.name} to {cut.name}."
            fix = "return None for this path, which leaves it in NumPy, or set jax_enable_x64."
            raise fail("interop.tree", problem, fix=fix)
    try:
        return put("interop.tree", leaf, sharding, path)
    except (ValueError, IndexError) as error:
        text, *_ = str(error).strip().splitlines() or [""]
        problem = f"{path!r} of shape {tuple(leaf.shape)} does not fit its sharding."
        fix = "return another sharding for this path."
        raise fail("interop.tree", problem, given=f"{sharding}: {text}", fix=fix) from error


# The leaves to write, by name: from nested dicts, or from an open archive.


class Leaf(NamedTuple):
    """A leaf of the tree: abstract, or itself, and a function that reads it."""

    spec: Any
    read: Callable[[], Any]


def leaves_of(tree: Any) -> dict[str, Leaf]:
    """Returns the leaves of a tree by name; a dict of `Leaf`s is returned unchanged."""
    if isinstance(tree, Mapping) and tree and all(isinstance(x, Leaf) for x in tree.values()):
        return dict(tree)
    if isinstance(tree, Archive):
        return {path: Leaf(tree.spec(path), partial(tree.read, path)) for path in tree.paths}
    leaves: dict[str, Leaf] = {}
    for name, leaf in _walk(tree, ()):
        if name in leaves:
            problem = f"two leaves have the name {name!r}."
            raise fail("interop.write", problem, fix="rename one of them.")
        leaves[name] = Leaf(leaf, lambda leaf=leaf: leaf)
    return leaves


def _walk(tree: Any, keys: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        for key, item in tree.items():
            if not isinstance(key, str):
                problem = f"the key {shown(key)} at {'.'.join(keys)!r} is not a string."
                fix = "use strings as keys, for example with jqx.interop.tree."
                raise fail("interop.write", problem, fix=fix, error=TypeError)
            yield from _walk(item, (*keys, key))
        return
    name = ".".join(keys)
    is_array = isinstance(tree, (QTensor, jax.Array, np.ndarray))
    is_array = is_array and not isinstance(tree, np.ma.MaskedArray)
    if not (is_array and keys):
        problem = f"there is no tensor at {name!r}" if keys else "`tree` is not a dict of tensors"
        fix = "pass quantized.params by the names of the checkpoint; see jqx.interop.tree."
        kind = type(tree).__name__
        raise fail("interop.write", f"{problem}: {kind}.", fix=fix, error=TypeError)
    if not isinstance(tree, QTensor) and stored_dtype(tree.dtype) is None:
        problem = f"the array {name!r} has the dtype {tree.dtype}, which files cannot hold."
        raise fail("interop.write", problem, fix="convert it.")
    yield name, tree
