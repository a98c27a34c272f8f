"""`tree`: the leaves of an archive as a tree of the user, by rules; `named`: the inverse."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from .._calls import called
from .._checks import check_instance
from .._errors import fail
from ..tensor import QTensor
from ._archive import Archive, as_jax
from ._names import Name, as_names
from ._placed import Shardings, placed, sharding_of
from ._rule_order import check_order

Rules = Sequence[Name | tuple[str, str | None]] | Mapping[str, str | None]


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
    places = _places(archive, rules)
    shapes = {path: _spec(archive, place) for path, place in places.items()}
    paths = None if like is None else _check_like(shapes, like)

    def made(path: str) -> Any:
        if abstract:
            return shapes[path]
        leaf = _filled(archive, places[path], shapes[path])
        where = sharding_of(sharding, path, shapes[path])
        return jax.tree.map(as_jax, leaf) if where is None else placed(path, leaf, where)

    leaves = {path: made(path) for path in places}
    if paths is None:
        return _nested(leaves)
    structure = jax.tree.structure(like, is_leaf=_is_leaf)
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
    rules, found, used = as_names(names), {}, set()
    leaves = _paths("interop.named", params)
    check_order("interop.named", rules, dict(leaves), Name.match_path, strict=True)
    for path, leaf in leaves:
        pairs = ((rule, rule.match_path(path)) for rule in rules)
        rule, parts = next(((r, p) for r, p in pairs if p is not None), (None, {}))
        _require_rule(rule is not None, f"the leaf {path!r}", "interop.named")
        assert rule is not None
        used.add(rule.source)
        if not len(leaf.shape) >= len(rule.stacked):
            raise fail(
                "interop.named",
                f"the leaf {path!r} does not have the axes that its rule stacks.",
                given=f"shape {tuple(leaf.shape)}",
                expected=f"an axis for each of {', '.join(rule.stacked)}",
                fix=f"correct the rule: {rule!r}.",
            )
        for index in itertools.product(*map(range, leaf.shape[: len(rule.stacked)])):
            own = {**parts, **dict(zip(rule.stacked, map(str, index), strict=True))}
            name = rule.name_of(own)
            _require_once(name not in found, name, "interop.named")
            found[name] = rule.unview(name, leaf[index] if index else leaf)
    for rule in rules:
        fits = rule.target is None or rule.optional or rule.source in used
        _require_use(fits, rule, "leaf", "interop.named")
    return found


Place = tuple[Name, tuple[int, ...], dict[tuple[int, ...], str]]
"""A rule, the sizes of the axes that it stacks, and the name of the tensor at each index."""


def _places(archive: Archive, rules: Sequence[Name]) -> dict[str, Place]:
    """Returns the tensors of each leaf, in the order of the archive."""
    found: dict[str, tuple[Name, dict[tuple[int, ...], str]]] = {}
    used = set()
    for name in archive.paths:
        pairs = ((rule, rule.match(name)) for rule in rules)
        rule, parts = next(((r, p) for r, p in pairs if p is not None), (None, None))
        _require_rule(rule is not None, f"the tensor {name!r}", "interop.tree")
        assert rule is not None and parts is not None
        used.add(rule.source)
        if rule.target is None:
            continue
        path = rule.path_of(parts)
        index = tuple(_index(name, rule, part, parts[part]) for part in rule.stacked)
        own, stack = found.setdefault(path, (rule, {}))
        _require_once(own is rule and index not in stack, path, "interop.tree")
        stack[index] = name
    check_order("interop.tree", rules, archive.paths, Name.match, strict=False)
    for rule in rules:
        _require_use(rule.optional or rule.source in used, rule, "tensor", "interop.tree")
    return {path: (rule, _sizes(path, stack), stack) for path, (rule, stack) in found.items()}


def _index(name: str, rule: Name, part: str, text: str) -> int:
    if not (text.isdecimal() and len(text) < 7):
        raise fail(
            "interop.tree",
            f"the tensor {name!r} cannot be stacked.",
            given=f"{text!r} for {{{part}}}",
            expected="a number, the index along a new axis, as the path has no such part",
            fix=f"put {{{part}}} into the path, or write one rule for each {{{part}}} in place of "
            f"{rule!r}.",
        )
    return int(text)


def _sizes(path: str, stack: Mapping[tuple[int, ...], str]) -> tuple[int, ...]:
    """Returns the sizes of the stacked axes, after checking that no tensor is missing."""
    sizes = tuple(max(axis) + 1 for axis in zip(*stack, strict=True))
    count = 1
    for n in sizes:
        count *= n
    missing = None
    if count != len(stack):
        missing = next(i for i in itertools.product(*map(range, sizes)) if i not in stack)
    if missing is not None:
        raise fail(
            "interop.tree",
            f"a tensor of the stack {path!r} is missing.",
            given=f"{len(stack)} tensors, none with the index {missing}",
            expected=f"all of {sizes}",
            fix="give different layers different paths.",
        )
    return sizes


def _spec(archive: Archive, place: Place) -> Any:
    """Returns an abstract leaf, after checking that stacked tensors agree."""
    rule, sizes, stack = place
    first: Any = None
    for name in stack.values():
        leaf = _viewed(rule, name, archive.spec(name))
        first = leaf if first is None else first
        if _kind(leaf) != _kind(first):
            raise fail(
                "interop.tree",
                f"the tensor {name!r} cannot be stacked with the others.",
                given=repr(leaf),
                expected=repr(first),
                fix="give different layers different paths.",
            )
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((*sizes, *x.shape), x.dtype), first)


def _viewed(rule: Name, name: str, spec: Any) -> Any:
    return jax.eval_shape(lambda x: rule.view(name, x), spec)


def _kind(leaf: Any) -> Any:
    return jax.tree.structure(leaf), [(x.shape, x.dtype) for x in jax.tree.leaves(leaf)]


def _filled(archive: Archive, place: Place, spec: Any) -> Any:
    """Returns a leaf of NumPy arrays."""
    rule, _, stack = place
    if () in stack:
        return rule.view(stack[()], archive.numpy(stack[()]))
    whole = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), spec)
    for index, name in stack.items():
        part = rule.view(name, archive.numpy(name))
        for target, x in zip(jax.tree.leaves(whole), jax.tree.leaves(part), strict=True):
            target[index] = x
    return whole


def _check_like(shapes: Mapping[str, Any], like: Any) -> list[str]:
    """Returns the paths of a tree, after checking that its leaves are those that were found."""
    wanted = dict(_paths("interop.tree", like))
    for path, leaf in shapes.items():
        if path not in wanted:
            raise fail(
                "interop.tree",
                f"the leaf {path!r} has no place in `like`.",
                given=f"a tree of {len(wanted)} leaves: {', '.join(list(wanted)[:5])}, ...",
                expected="its path",
                fix="correct the rule, or leave the tensor out: Name(source, None).",
            )
        if tuple(leaf.shape) != tuple(wanted[path].shape):
            raise fail(
                "interop.tree",
                f"the leaf {path!r} does not have the shape of the leaf in `like`.",
                given=f"shape {tuple(leaf.shape)}",
                expected=f"shape {tuple(wanted[path].shape)}",
                fix="pass transpose= or split= in its rule.",
            )
    missing = [path for path in wanted if path not in shapes]
    if missing:
        raise fail(
            "interop.tree",
            "leaves of `like` are left without a tensor.",
            given=f"{len(missing)} leaves, {', '.join(map(repr, missing[:3]))} among them",
            expected="a rule and a tensor for each",
            fix="add rules for them; for tied weights, drop the leaf that the file lacks.",
        )
    return list(wanted)


def _is_leaf(x: Any) -> bool:
    return isinstance(x, QTensor)


def _paths(function: str, params: Any) -> list[tuple[str, Any]]:
    """Returns the leaves of a tree by path, after checking that they have shapes."""
    flat = jax.tree_util.tree_leaves_with_path(params, is_leaf=_is_leaf)
    pairs = [(jax.tree_util.keystr(keys, simple=True, separator="/"), x) for keys, x in flat]
    for path, x in pairs:
        if not (hasattr(x, "shape") and hasattr(x, "dtype")):
            raise fail(
                function,
                f"the leaf {path!r} is not an array.",
                given=f"an object of type {type(x).__name__}",
                expected="arrays, QTensors, or jax.ShapeDtypeStruct",
                fix="convert it, for example with jnp.asarray.",
                error=TypeError,
            )
    return pairs


def _nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    whole: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *keys, last = path.split("/")
        node = whole
        for key in keys:
            node = node.setdefault(key, {})
            _require_once(isinstance(node, dict), path, "interop.tree")
        _require_once(last not in node, path, "interop.tree")
        node[last] = leaf
    return whole


def _require_rule(holds: bool, what: str, function: str) -> None:
    if not holds:
        raise fail(
            function,
            f"{what} has no rule.",
            given="names that no template matches in full",
            expected="a rule for each",
            fix="add one; Name(source, None) leaves tensors out.",
        )


def _require_once(holds: bool, what: str, function: str) -> None:
    if not holds:
        raise fail(
            function,
            f"{what!r} exists twice.",
            given="two tensors, or leaves, that rules give this name",
            expected="one",
            fix="distinguish them by parts of the name in the path, such as {layer}.",
        )


def _require_use(holds: bool, rule: Name, what: str, function: str) -> None:
    if not holds:
        raise fail(
            function,
            "a rule matches nothing.",
            given=repr(rule),
            expected=f"a {what} of such a name that no earlier rule matches",
            fix="drop it, or pass optional=True.",
        )
