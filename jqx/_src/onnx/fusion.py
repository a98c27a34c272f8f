"""Rewrites nodes so that runtimes on CPUs fuse them into products of codes (`"qdq_uint8"`).

onnxruntime and OpenVINO multiply codes where a product stands between the nodes that dequantize its
operands and, for convolutions, the node that rounds its result. JAX writes other operations there:
the addition of a bias, `relu`, turned axes. The rewrites change no code by more than the order in
which floats are added: a bias inside a convolution is added before the rest of a sum.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from .graph import Graph, onnx_module


def fuse(g: Graph) -> None:
    """Rewrites the nodes of a graph; not those of branches and loops."""
    for rewrite in (_clip_codes, _multiply_channels, _put_bias_inside, _add_to_matrices):
        rewrite(_Nodes(g))
    _drop_unused(g)


class _Nodes:
    """The nodes of a graph, with what makes and what uses each value."""

    def __init__(self, g: Graph) -> None:
        self.g = g
        self.makers: dict[str, Any] = {name: x for x in g.nodes for name in x.output}
        self.users: dict[str, list[Any]] = collections.defaultdict(list)
        for node in g.nodes:
            for name in _inputs(node):
                self.users[name].append(node)

    def maker(self, name: str) -> Any:
        """Returns the node that makes a value; `None` for inputs and constants."""
        return self.makers.get(name)

    def of(self, op: str) -> list[Any]:
        """Returns the nodes of an operation."""
        return [node for node in self.g.nodes if node.op_type == op]

    def only_user(self, node: Any) -> Any:
        """Returns the node that uses the result of a node; `None` if there are several."""
        users = self.users[node.output[0]]
        return users[0] if len(users) == 1 else None

    def is_rounded(self, node: Any) -> bool:
        """Whether a result is only rounded, after its axes are turned and a constant is added."""
        user = self.only_user(node)
        while user is not None and user.op_type in ("Transpose", "Add"):
            if user.op_type == "Add" and not set(user.input) & set(self.g.constants):
                return False
            user = self.only_user(user)
        return user is not None and user.op_type == "QuantizeLinear"

    def number(self, name: str) -> Any:
        """Returns a constant of one element; `None` for other values."""
        array = self.g.constants.get(name)
        return array.reshape(()) if array is not None and array.size == 1 else None

    @contextlib.contextmanager
    def instead_of(self, node: Any) -> Iterator[None]:
        """Puts the nodes that are added meanwhile in place of a node; the last one makes what the
        node made.
        """
        place = self.g.nodes.index(node)
        self.g.nodes, rest = self.g.nodes[:place], self.g.nodes[place + 1 :]
        yield
        self.g.nodes[-1].output[0] = node.output[0]
        self.g.nodes += rest

    def remove(self, node: Any, instead: str) -> None:
        """Removes a node; what used its result uses another value."""
        for user in self.users[node.output[0]]:
            user.input[:] = [instead if x == node.output[0] else x for x in user.input]
        others = [user for user in self.users[instead] if user is not node]
        self.users[instead] = others + self.users[node.output[0]]
        self.g.nodes.remove(node)


def _inputs(node: Any) -> Iterator[str]:
    """Yields what a node uses, also in the graphs inside of it."""
    yield from node.input
    for attribute in node.attribute:
        for inner in attribute.g.node:
            yield from _inputs(inner)


def _attributes(node: Any) -> dict[str, Any]:
    value = onnx_module().helper.get_attribute_value
    return {x.name: value(x) for x in node.attribute}


def _order(node: Any) -> list[int]:
    """Returns the order in which a node puts the axes of an image, if it is a `Transpose`."""
    return list(_attributes(node)["perm"]) if node.op_type == "Transpose" else []


def _aligned(array: np.ndarray, ndim: int) -> np.ndarray:
    """Returns an array with axes of size 1 in front."""
    return array.reshape((1,) * (ndim - array.ndim) + array.shape)


def _clip_codes(nodes: _Nodes) -> None:
    """Rounds before bounds such as those of `relu` are applied, and applies them to the codes. The
    codes are the same, since rounding is monotonic.
    """
    for q in nodes.of("QuantizeLinear"):
        scale, zero = nodes.number(q.input[1]), nodes.number(q.input[2])
        if scale is None or zero is None or zero.dtype.name not in ("int8", "uint8"):
            continue
        lowest, highest = np.iinfo(zero.dtype).min, np.iinfo(zero.dtype).max
        bounds, node = [], nodes.maker(q.input[0])
        while node is not None and nodes.only_user(node) is not None:
            bound = nodes.number(node.input[1]) if node.op_type in ("Max", "Min") else None
            if bound is not None and not np.isnan(bound):
                with np.errstate(over="ignore"):
                    code = np.clip(np.rint(bound / scale) + np.float32(zero), lowest, highest)
                bounds.append((node, int(code)))
            elif node.op_type != "Transpose":
                break
            node = nodes.maker(node.input[0])
        low, high = int(lowest), int(highest)
        for node, code in reversed(bounds):
            best = max if node.op_type == "Max" else min
            low, high = best(low, code), best(high, code)
            nodes.remove(node, node.input[0])
        if (low, high) != (lowest, highest):
            with nodes.instead_of(q):
                codes = nodes.g.add("QuantizeLinear", *q.input)
                nodes.g.add("Clip", codes, *(np.asarray(n, zero.dtype) for n in (low, high)))


def _multiply_channels(nodes: _Nodes) -> None:
    """Writes convolutions of single pixels whose results stay in float as products. Runtimes
    multiply the codes of a convolution only if its result is rounded.
    """
    g = nodes.g
    for conv in nodes.of("Conv"):
        image, weight, turned = *map(nodes.maker, conv.input[:2]), nodes.only_user(conv)
        is_quantized = all(
            x is not None and x.op_type == "DequantizeLinear" for x in (image, weight)
        )
        kernel = g.constants.get(weight.input[0]) if is_quantized else None
        if kernel is None or turned is None or kernel.dtype != np.int8:
            continue
        options, channels = _attributes(conv), [0, *range(2, kernel.ndim), 1]
        steps = (*kernel.shape[2:], *options["strides"], options["group"])
        if any(n != 1 for n in steps) or any(options["pads"]) or _order(turned) != channels:
            continue
        if nodes.is_rounded(turned):
            continue
        axis = {"axis": 1} if "axis" in _attributes(weight) else {}
        matrix = np.ascontiguousarray(kernel.reshape(kernel.shape[:2]).T)
        with nodes.instead_of(turned):
            codes = g.transpose(image.input[0], channels)
            x = g.add("DequantizeLinear", codes, *image.input[1:])
            y = g.add("DequantizeLinear", matrix, *weight.input[1:], **axis)
            g.add("MatMul", x, y)
        g.nodes.remove(conv)


def _put_bias_inside(nodes: _Nodes) -> None:
    """Makes a constant that is added to the channels of a convolution an operand of it."""
    g = nodes.g
    for conv in nodes.of("Conv"):
        last, axis, add = conv, 1, nodes.only_user(conv)
        if add is not None and (order := _order(add)):
            last, axis, add = add, order.index(1), nodes.only_user(add)
        if add is None or add.op_type != "Add":
            continue
        bias = g.constants.get(add.input[1 if add.input[0] == last.output[0] else 0])
        weight = nodes.maker(conv.input[1])
        kernel = None if weight is None else g.constants.get(weight.input[0])
        if bias is None or kernel is None or bias.ndim > kernel.ndim:
            continue
        if bias.size != kernel.shape[0] or _aligned(bias, kernel.ndim).shape[axis] != bias.size:
            continue
        conv.input.append(g.name(bias.reshape(-1)))
        for site in g.sites:
            if site[2] == last.output[0]:
                site += [conv.input[2], axis]
        nodes.remove(add, last.output[0])


def _add_to_matrices(nodes: _Nodes) -> None:
    """Adds to a product of two axes with a third axis in front. onnxruntime writes a sum of two
    axes as `Gemm`, which multiplies codes only if the other term is in int32.
    """
    g = nodes.g
    for add in nodes.of("Add"):
        products = [name for name in add.input if name in g.matrices]
        if len(products) != 1:
            continue
        (other,) = set(add.input) - set(products) or products
        constant = g.constants.get(other)
        with nodes.instead_of(add):
            is_known = constant is not None
            third = _aligned(constant, 3) if is_known else g.add("Unsqueeze", other, g.ints(0))
            g.add("Squeeze", g.add("Add", products[0], third), g.ints(0))


def _drop_unused(g: Graph) -> None:
    """Drops what dequantizes for nobody; `beside` drops constants that nothing uses."""
    names = {name for node in g.nodes for name in _inputs(node)}
    g.nodes = [x for x in g.nodes if x.op_type != "DequantizeLinear" or x.output[0] in names]
