"""A graph of ONNX that is being written: nodes, constants, and sizes that are known at run time."""

from __future__ import annotations

import functools
import importlib
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from ..errors import fail
from ..numerics.lookup import E8M0

OPSET, IR_VERSION = 21, 10
"""The first opset with 4-bit integers and scales in blocks, and the IR that goes with it."""


def onnx_module() -> Any:
    """Returns the module onnx, or raises an error that says how to install it."""
    try:
        return importlib.import_module("onnx")
    except ImportError as error:
        fix = "pip install 'jqx[onnx]'"
        raise fail(
            "interop.to_onnx", "onnx is not installed.", fix=fix, error=ImportError
        ) from error


class Value(NamedTuple):
    """What a node computes.

    Attributes:
      name: its name in the graph.
      shape: its shape; a size that is known only at run time is a symbol of `jax.export`.
      dtype: its dtype.
    """

    name: str
    shape: tuple[Any, ...]
    dtype: np.dtype[Any]


Operand = Any
"""A `Value`, the name of one, or an array, which becomes a constant of the graph."""


class Graph:
    """Nodes in the order in which they run. Branches and bodies of loops are graphs of their own,
    which share names, constants and sizes with the graph around them.

    Attributes:
      nodes: the nodes.
      constants: arrays by name.
      sizes: for each symbol, the name of an input and the axis of it that has this size.
      domains: the domains of the operations; "" is that of ONNX.
      sites: what `verify_onnx` compares, for each site of the plan in the outermost graph: its key,
        the names of its rounded operands by their places, in codes or not, and that of its result.
        With a bias inside a convolution, also the name of the bias and the axis of its channels.
      products: how codes are multiplied; see `to_onnx`.
      matrices: the names of products of two axes whose operands are dequantized.
      in_step: whether it is one step of a scan, or inside one. A step has constants of its own.
      count: how many names there are, in a list that all graphs share.
    """

    def __init__(
        self, around: Graph | None = None, products: str = "uint8", *, is_step: bool = False
    ) -> None:
        owner = None if is_step else around
        self.nodes: list[Any] = []
        self.constants: dict[str, np.ndarray] = {} if owner is None else owner.constants
        self.sizes: dict[str, tuple[str, int]] = {} if around is None else around.sizes
        self.domains: set[str] = {""} if around is None else around.domains
        self.sites: list[list[Any]] = []
        self.products = products if around is None else around.products
        self.matrices: set[str] = set()
        self.in_step = is_step or (around is not None and around.in_step)
        self.count: list[int] = [0] if around is None else around.count
        self._known: dict[Any, str] = {} if owner is None else owner._known
        self._kept: list[Any] = [] if owner is None else owner._kept

    @property
    def multiplied(self) -> np.dtype[Any]:
        """The dtype of codes of activations, and of weights in products of integers."""
        return np.dtype(self.products.removeprefix("qdq_"))

    @property
    def is_qdq(self) -> bool:
        """Whether products are those of dequantized operands."""
        return self.products.startswith("qdq_")

    def new_name(self, hint: str) -> str:
        """Returns a name that nothing else in the model has."""
        self.count[0] += 1
        return f"{hint}_{self.count[0]}"

    def add(self, op: str, *operands: Operand, **attributes: Any) -> str:
        """Adds a node, and returns the name of its result."""
        return self.add_many(op, 1, *operands, **attributes)[0]

    def add_many(self, op: str, count: int, *operands: Operand, **attributes: Any) -> list[str]:
        """Adds a node with several results."""
        outputs = [self.new_name(op.lower()) for _ in range(count)]
        names = [self.name(x) for x in operands]
        self.domains.add(attributes.get("domain", ""))
        helper = onnx_module().helper
        self.nodes.append(helper.make_node(op, names, outputs, outputs[0], **attributes))
        return outputs

    def name(self, x: Operand) -> str:
        """Returns the name of an operand; arrays are stored, equal small ones once. "" leaves an
        optional operand out.
        """
        if isinstance(x, str):
            return x
        if isinstance(x, Value):
            return x.name
        array = np.asarray(x)
        array = array.view(np.uint8) if array.dtype == E8M0 else array
        # In a step only axes and sizes are compared: what else is equal may differ in the next.
        if array.nbytes <= 64 and (not self.in_step or array.dtype == np.int64):
            key: Any = (array.dtype.name, array.shape, array.tobytes())
        else:  # the object is kept, so that no other has its id
            key = id(x)
            self._kept.append(x)
        if key not in self._known:
            self._known[key] = self.new_name("constant")
            self.constants[self._known[key]] = array
        return self._known[key]

    def form(self) -> list[Any]:
        """Returns what two steps of a scan must share: all but the numbers in constants."""
        constants = [(name, x.shape, x.dtype) for name, x in self.constants.items()]
        return [*constants, *(node.SerializeToString() for node in self.nodes)]

    def packed(self, dtype: Any) -> np.dtype[Any]:
        """Returns the dtype of codes of 4 bits among the constants: that of bytes in a step, since
        runtimes do not slice 4 bits.
        """
        return in_bytes(dtype) if self.in_step else np.dtype(dtype)

    def stacked(self, arrays: Sequence[np.ndarray]) -> Operand:
        """Returns constants of steps as one: bytes that 4 bits hold are stored in these."""
        x = np.stack(arrays)
        for small in () if self.in_step or x.nbytes < _SHARED else _PACKED:
            limits = jnp.iinfo(small)
            if x.dtype == in_bytes(small) and x.min() >= limits.min and x.max() <= limits.max:
                return Value(self.cast(x.astype(small), x.dtype), x.shape, x.dtype)
        return x

    def ints(self, *numbers: int) -> np.ndarray:
        """Returns axes, sizes or indices as ONNX takes them."""
        return np.asarray(numbers, np.int64)

    # Sizes.

    def size(self, dim: Any) -> str:
        """Returns the name of a size, int64 [1], that may be known only at run time."""
        if not export.is_symbolic_dim(dim):
            return self.name(self.ints(int(dim)))
        text = str(dim).replace("^", "**")  # as `jax.export.symbolic_shape` reads it
        symbols = set(re.findall(r"[^\W\d]\w*", text)) - _FUNCTIONS.keys()
        if unknown := symbols - self.sizes.keys():
            problem = f"the open size {min(unknown)!r} is not that of an axis of an input."
            fix = f"pass an argument that has an axis of {min(unknown)!r} elements."
            raise fail("interop.to_onnx", problem, given=f"a size of {dim}", fix=fix)
        known = {symbol: _Size(self, self._size_of(symbol)) for symbol in sorted(symbols)}
        return eval(text, {"__builtins__": {}}, {**_FUNCTIONS, **known}).name

    def _size_of(self, symbol: str) -> str:
        source, axis = self.sizes[symbol]
        return self.add("Shape", source, start=axis, end=axis + 1)

    def shape(self, sizes: Sequence[Any]) -> Operand:
        """Returns a shape for a node; int64 [rank]."""
        if not any(map(export.is_symbolic_dim, sizes)):
            return self.ints(*map(int, sizes))
        return self.add("Concat", *map(self.size, sizes), axis=0)

    def reshape(self, x: Operand, sizes: Sequence[Any]) -> str:
        """Returns `x` with another shape, of which one size may be open."""
        symbolic = [i for i, n in enumerate(sizes) if export.is_symbolic_dim(n)]
        if len(symbolic) == 1 and 0 not in [n for i, n in enumerate(sizes) if i != symbolic[0]]:
            sizes = [-1 if i in symbolic else n for i, n in enumerate(sizes)]
        return self.add("Reshape", x, self.shape(sizes), allowzero=int(0 in sizes))

    def transpose(self, x: Operand, order: Sequence[int]) -> str:
        """Returns `x` with its axes in another order."""
        if list(order) == sorted(order):
            return self.name(x)
        return self.add("Transpose", x, perm=[int(i) for i in order])

    def cast(self, x: Operand, dtype: Any) -> str:
        """Returns `x` in another dtype; what float8 does not hold is infinite or NaN, as in JAX."""
        options = {"saturate": 0} if np.dtype(dtype).name.startswith("float8") else {}
        return self.add("Cast", x, to=onnx_type(dtype), **options)

    def slice(self, x: Operand, axis: int, start: Any, end: Any, step: int = 1) -> str:
        """Returns a part of `x` along an axis. Bounds may be names of int64 [1]."""
        bounds = [b if isinstance(b, str) else self.size(b) for b in (start, end)]
        return self.add("Slice", x, *bounds, self.ints(axis), self.ints(step))


class _Size:
    """A size in arithmetic, which becomes nodes."""

    def __init__(self, graph: Graph, name: str) -> None:
        self.graph, self.name = graph, name

    def _with(self, op: str, other: Any, *, swapped: bool = False) -> _Size:
        name = other.name if isinstance(other, _Size) else self.graph.size(int(other))
        pair = (name, self.name) if swapped else (self.name, name)
        return _Size(self.graph, self.graph.add(op, *pair))

    def __add__(self, other: Any) -> _Size:
        return self._with("Add", other)

    def __mul__(self, other: Any) -> _Size:
        return self._with("Mul", other)

    def __sub__(self, other: Any) -> _Size:
        return self._with("Sub", other)

    def __rsub__(self, other: Any) -> _Size:
        return self._with("Sub", other, swapped=True)

    def __neg__(self) -> _Size:
        return 0 - self

    def __pow__(self, count: int) -> _Size:
        return functools.reduce(_Size.__mul__, [self] * count)

    __radd__, __rmul__ = __add__, __mul__


def _of_sizes(op: str) -> Callable[[Any, Any], Any]:
    """Returns a function of sizes, at least one of which is known only at run time."""

    def apply(x: Any, y: Any) -> Any:
        return x._with(op, y) if isinstance(x, _Size) else y._with(op, x, swapped=True)

    return apply


def _floordiv(x: Any, y: Any) -> Any:
    return _of_sizes("Div")(x - _FUNCTIONS["mod"](x, y), y)  # `Div` rounds toward zero


_FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "max": _of_sizes("Max"),
    "min": _of_sizes("Min"),
    "mod": _of_sizes("Mod"),
    "floordiv": _floordiv,
}
"""The functions in the text of a size."""


_DTYPES = (
    *("bool", "int4", "int8", "int16", "int32", "int64"),
    *("uint4", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
)
"""The dtypes of the opset that JAX has too."""


_PACKED = {jnp.dtype(jnp.int4): "INT4", jnp.dtype(jnp.uint4): "UINT4"}


def in_bytes(dtype: Any) -> np.dtype[Any]:
    """Returns a dtype, but for 4 bits that of bytes."""
    dtype = np.dtype(dtype)
    return np.dtype(dtype.name.replace("4", "8")) if dtype in _PACKED else dtype


def onnx_type(dtype: Any) -> int:
    """Returns the number of ONNX for a dtype, or raises an error. Powers of two of float8_e8m0fnu,
    which it lacks, are bytes inside of a graph.
    """
    if np.dtype(dtype).name not in _DTYPES:
        problem = f"values of {np.dtype(dtype).name} have no form in ONNX (opset {OPSET})."
        fix = f"use one of {', '.join(_DTYPES)} in the function."
        raise fail("interop.to_onnx", problem, fix=fix, error=NotImplementedError)
    return int(onnx_module().helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))


def tensor(name: str, array: np.ndarray) -> Any:
    """Returns a constant as ONNX stores it; codes of 4 bits two to a byte, low first."""
    onnx = onnx_module()
    if array.dtype in _PACKED:
        codes = _in_bytes(array.reshape(-1))
        codes = np.pad(codes, (0, codes.size % 2))
        packed = (codes[::2] | codes[1::2] << 4).astype(np.uint8)
        kind = getattr(onnx.TensorProto, _PACKED[array.dtype])
        return onnx.helper.make_tensor(name, kind, array.shape, packed.tobytes(), raw=True)
    return onnx.numpy_helper.from_array(np.require(array, requirements="C"), name)


def beside(g: Graph) -> None:
    """Stores what `DequantizeLinear` reads inside of a branch or a loop beside it: onnxruntime does
    not look for it in the graph around, and then refuses to load what it rewrites. Drops constants
    that nothing reads.
    """
    read: set[str] = set()

    def visit(nodes: Iterable[Any], inner: Any) -> None:
        stored: set[str] = set()
        for node in nodes:
            if inner is not None and node.op_type == "DequantizeLinear":
                for i, name in enumerate(node.input):
                    if name in g.constants:
                        node.input[i] = local = f"{name}_of_{inner.name}"
                        if local not in stored:
                            inner.initializer.append(tensor(local, g.constants[name]))
                        stored.add(local)
            read.update(node.input)
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    visit(attribute.g.node, attribute.g)

    visit(g.nodes, None)
    g.constants = {name: x for name, x in g.constants.items() if name in read}


_SHARED = 1 << 10
"""Bytes from which constants are compared with each other."""

_SIGNED = {
    np.dtype(np.int8): np.dtype(np.uint8),
    jnp.dtype(jnp.int4): jnp.dtype(jnp.uint4),
}
"""Formats of codes, and those of the same codes less the least."""


def shared(g: Graph) -> None:
    """Stores constants once that hold the same elements, also with other axes, or as codes without
    a sign: nodes before all others make them of the first. So a table of embeddings that is also
    the head is in a file once.
    """
    alike: dict[Any, list[str]] = {}
    nodes, g.nodes = g.nodes, []
    for name, array in list(g.constants.items()):
        if array.nbytes < _SHARED:
            continue
        numbers = _bytes(array)
        # Equal for equal elements in any order, and rarely for others.
        kind = _SIGNED.get(array.dtype, array.dtype), array.size, numbers.sum(dtype=np.uint64)
        first = alike.setdefault(kind, [])
        if any(_made_of(g, name, other, numbers) for other in first):
            del g.constants[name]
        else:
            first.append(name)
    g.nodes += nodes


def _made_of(g: Graph, name: str, other: str, numbers: np.ndarray) -> bool:
    """Makes a constant of another, if it can be; `numbers` are its bytes."""
    array, stored = g.constants[name], g.constants[other]
    order = _order(stored, numbers)
    if order is None:
        return False
    shape = tuple(stored.shape[i] for i in order)
    if shape != array.shape and array.dtype in _PACKED:
        return False  # runtimes transpose codes of 4 bits, but do not reshape them
    result = g.add("Transpose", other, perm=order)
    if stored.dtype != array.dtype:
        least = np.int32(-8 if array.dtype in _PACKED else -128)
        shift = g.add("Sub" if stored.dtype in _SIGNED else "Add", g.cast(result, np.int32), least)
        result = g.cast(shift, array.dtype)
    if shape != array.shape:
        g.reshape(result, array.shape)
    g.nodes[-1].output[0] = name
    return True


def _bytes(array: np.ndarray) -> np.ndarray:
    """Returns the bytes of an array; codes less the least."""
    x = np.ascontiguousarray(array).reshape(-1)
    if array.dtype not in _SIGNED:
        return x.view(np.uint8)
    return x.view(np.uint8) ^ np.uint8(128) if array.dtype == np.int8 else _in_bytes(x) ^ 8


def _in_bytes(codes: np.ndarray) -> np.ndarray:
    """Returns codes of 4 bits, each in the low half of a byte."""
    return codes.astype(np.int8).astype(np.uint8) & np.uint8(15)


def _order(x: np.ndarray, wanted: np.ndarray) -> tuple[int, ...] | None:
    """Returns the order of the axes of `x` in which it has these bytes, if there is one."""
    moving = [i for i, n in enumerate(x.shape) if n > 1]
    orders = itertools.permutations(moving) if len(moving) <= 4 else [moving]
    rest = [i for i, n in enumerate(x.shape) if n <= 1]
    for order in orders:
        if np.array_equal(_bytes(x.transpose(*rest, *order)), wanted):
            return (*rest, *order)
    return None


def as_array(x: Any) -> Any:
    """Returns a concrete array as NumPy has it; of keys of random numbers, their data."""
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x) if isinstance(x, (jax.Array, np.ndarray, np.generic, float, int)) else x
