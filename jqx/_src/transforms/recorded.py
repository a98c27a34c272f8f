"""Equations of rows that are recorded, and the program that computes them: see `regions.py`."""

import contextlib
import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import compat
from ..compat import Eqn
from ..contractions.rows import CHOICE, Argument, Coded, Region, in_rows
from ..kernels.rows_cpu import (
    CODES,
    COLUMNS,
    CONSTANT,
    INPUT,
    MASK,
    MATRIX,
    OF_BLOCK,
    Result,
    RowProgram,
    Step,
    Value,
    strides_of,
)
from ..numerics.lookup import format_of
from ..statistics.calibrators import Affine
from ..tensor.layout import is_flipped
from ..tensor.qtensor import QTensor
from ..tensor.spec import QSpec
from .rules import in_float
from .walk import CALLS
from .walk import evaluate as evaluate_body

_OPS = {
    **{name: name for name in ("add", "sub", "mul", "div", "max", "min", "neg", "abs", "exp")},
    **{name: name for name in ("tanh", "logistic", "erf", "erfc", "sqrt", "rsqrt")},
    "add_any": "add",
}
_SAME = {"copy", "copy_p", "stop_gradient", "convert_element_type"}
_REDUCTIONS = {"reduce_sum": "sum", "reduce_max": "largest"}
_INLINED = {"jit", "pjit", "custom_jvp_call"}

WIDTH, SUMMED = -1, -2
"""Names of the axis along which a row lies, and of that along which rows and matrices are summed.
The axes of rows have their numbers as names; an axis of one element has the name `None`.
"""

Axes = tuple[int | None, ...]


class Later:
    """A value that is not computed yet.

    Attributes:
      array: the value, when it is computed.
    """

    __slots__ = ("__weakref__", "array")

    def __init__(self) -> None:
        self.array: Any = None


class Row(Later):
    """Rows of a region.

    Attributes:
      value: their number in the region.
      shape: the shape of the array in the function.
      axes: the names of its axes.
      place: its number among the results of recorded equations.
    """

    __slots__ = ("axes", "place", "shape", "value")

    def __init__(self, value: int, shape: tuple[int, ...], axes: Axes, place: int):
        super().__init__()
        self.value, self.shape, self.axes, self.place = value, shape, axes, place


def is_number(x: Any) -> bool:
    """Whether an operand is one number that is known."""
    return isinstance(x, (np.ndarray, np.generic, float, int)) and not np.shape(x)


def _identity(x: Any) -> Any:
    """Returns what is the same for equal numbers that are known: sites that read one array often
    have equal scales, and then share its codes.
    """
    if x is None or x.size != 1 or not compat.is_concrete(x):
        return id(x)
    return x.shape, str(x.dtype), np.asarray(x).item()


def is_float(aval: Any) -> bool:
    return aval.dtype == jnp.float32


def type_of_codes(shape: tuple[int, ...], spec: QSpec, affine: Affine | None) -> QTensor:
    """Returns the types of the codes of an array."""

    def quantized(x: jax.Array, affine: Affine | None) -> QTensor:
        return QTensor.quantize(x, spec, affine)

    return jax.eval_shape(quantized, jax.ShapeDtypeStruct(shape, jnp.float32), affine)


class _NotRecordedError(Exception):
    """An equation inside of another one cannot be recorded."""


class WeightSite(NamedTuple):
    """A product of codes: how its left operand is quantized, and what it is multiplied by."""

    scope: AbstractContextManager[Any]
    quantized: tuple[tuple[QSpec, Affine | None]]
    evaluate: Callable[..., jax.Array]
    weight: QTensor
    axis: int


class BatchSite(NamedTuple):
    """A product of codes of two activations, with the specs and given scales of both."""

    scope: AbstractContextManager[Any]
    quantized: tuple[tuple[QSpec, Affine | None], ...]
    evaluate: Callable[..., jax.Array]


class _Quantization(NamedTuple):
    spec: QSpec
    affine: int


class _Weight(NamedTuple):
    number: int


class _Matrix(NamedTuple):
    strides: tuple[int, ...]
    affine: int


class _Replayed(NamedTuple):
    """A recorded equation. `operands` are the numbers of results of others (`"row"`), of arrays, or
    of numbers; of a site `affines` and `weights` are indices.
    """

    eqn: Eqn
    operands: list[tuple[str, Any]]
    results: list[int]
    site: Callable[..., jax.Array] | None = None
    affines: tuple[int, ...] = ()
    weights: tuple[int, ...] = ()


class _Wanted(NamedTuple):
    """A result of recorded equations, its axes, the order of those of rows in an array for it, and
    how many numbers a row has.
    """

    place: int
    axes: Axes
    order: tuple[int, ...]
    width: int


@dataclasses.dataclass
class RecordedRows:
    """Recorded equations of rows.

    Attributes:
      lead: the sizes of the axes of rows.
    """

    lead: tuple[int, ...]

    def __post_init__(self) -> None:
        self.values: list[tuple[str, Any, int]] = []  # the kind, what it is, the width
        self.steps: list[tuple[str, int, tuple[int, ...], Any]] = []
        self.arrays: list[Any] = []
        self.arguments: list[tuple[Argument, Axes, tuple[int, ...]]] = []
        self.affines: list[Affine] = []
        self.specs: list[QSpec] = []
        self.weights: list[QTensor] = []
        self.of_weights: list[AbstractContextManager[Any]] = []  # the scopes of sites
        self.of_batches: list[tuple[AbstractContextManager[Any], str]] = []  # and their sizes
        self.contracted: list[int] = []
        self.replayed: list[_Replayed] = []
        self._numbers: dict[Any, int] = {}  # of what was read or quantized before
        self._rows: list[weakref.ref[Row]] = []
        self._places = itertools.count()

    def recorded(
        self, eqn: Eqn, operands: Sequence[Any], site: WeightSite | BatchSite | None = None
    ) -> list[Any] | None:
        """Records an equation; returns its results, or `None` if it cannot be recorded."""
        count = len(self.steps)
        if isinstance(site, WeightSite):
            results = [self._product(eqn, operands[0], site)]
        elif site is None:
            results = self._record(eqn, operands)
        else:
            row = self._batches(eqn, operands, site)
            results = None if row is None else [row]
        if results is None:
            del self.steps[count:]
            return None
        places = [row.place for row in results]
        if site is None:
            given = list(map(self._operand, operands))
            self.replayed.append(_Replayed(eqn, given, places))
            return results
        given = list(map(self._operand, operands[: len(site.quantized)]))
        affines = tuple(-1 if by is None else self._affine(by, spec) for spec, by in site.quantized)
        weights = (len(self.weights) - 1,) if isinstance(site, WeightSite) else ()
        self.replayed.append(_Replayed(eqn, given, places, site.evaluate, affines, weights))
        return results

    def has_rows(self, x: Any, lead: tuple[int, ...]) -> bool:
        """Whether an operand has the rows of the region, in their order, along its last axis."""
        if not isinstance(x, Row):
            return lead == self.lead
        order = [i for i, n in enumerate(self.lead) if n > 1]
        is_last = x.axes[-1] == WIDTH and self.values[x.value][2] == x.shape[-1]
        return is_last and [name for name in x.axes[:-1] if name is not None] == order

    # Values.

    def _operand(self, x: Any) -> tuple[str, Any]:
        if isinstance(x, Row):
            return "row", x.place
        if is_number(x):
            return "number", x
        return "array", self._array(x)

    def _array(self, x: Any) -> int:
        key = "array", id(x)
        if key not in self._numbers:
            self.arrays.append(x)
            self._numbers[key] = len(self.arrays) - 1
        return self._numbers[key]

    def _affine(self, affine: Affine, spec: QSpec) -> int:
        key = "affine", *map(_identity, affine), spec
        if key not in self._numbers:
            self.affines.append(affine)
            self.specs.append(spec)
            self._numbers[key] = len(self.affines) - 1
        return self._numbers[key]

    def _argument(self, kind: str, x: Any, axes: Axes, coded: Coded | None = None) -> int:
        """Returns the number of an array with rows, masks or matrices, or of the codes or scales of
        a matrix.
        """
        key = kind, id(x), axes, coded
        if key in self._numbers:
            return self._numbers[key]
        shape = x.shape
        if coded is not None and coded.part == "scales":
            shape = type_of_codes(shape, coded.spec, None).scale.shape
            axes = tuple(name if n > 1 else None for n, name in zip(shape, axes, strict=True))
        width, moved = shape[axes.index(WIDTH)] if WIDTH in axes else 1, None
        if kind != "matrix" and width > 1 and axes[-1] != WIDTH:  # rows are whole in memory
            moved = axes.index(WIDTH)
            axes = (*axes[:moved], *axes[moved + 1 :], WIDTH)
            shape = (*shape[:moved], *shape[moved + 1 :], width)
        self.arguments.append((Argument(self._array(x), moved, coded), axes, shape))
        self._numbers[key] = self._value(kind, len(self.arguments) - 1, width)
        return self._numbers[key]

    def _constant(self, x: float) -> int:
        if ("constant", x) not in self._numbers:
            self._numbers["constant", x] = self._value("constant", x, 1)
        return self._numbers["constant", x]

    def _read(self, x: Any, names: Axes) -> int | None:
        """Returns the number of an operand of an equation whose axes have names; `None` if it does
        not fit them.
        """
        if isinstance(x, Row):
            return x.value
        if is_number(x):
            return self._constant(float(x))
        if not isinstance(x, (jax.Array, np.ndarray)):
            return None
        is_mask = x.dtype == jnp.bool_
        if not is_mask and x.dtype != jnp.float32:
            return None
        if x.ndim not in (0, len(names)):
            return None
        pairs = zip(x.shape, names if x.ndim else (), strict=True)
        axes = tuple(name if n > 1 else None for n, name in pairs)
        if any(n > 1 and name is None for n, name in zip(x.shape, axes, strict=True)):
            return None
        return self._argument("mask" if is_mask else "input", x, axes)

    def _value(self, kind: str, x: Any, width: int) -> int:
        self.values.append((kind, x, width))
        return len(self.values) - 1

    def _step(self, op: str, operands: tuple[int, ...], width: int, note: Any = None) -> int:
        value = self._value("codes" if op == "quantize" else "made", None, width)
        self.steps.append((op, value, operands, note))
        return value

    def _row(self, value: int, shape: Sequence[int], axes: Axes) -> Row:
        named = (name if n > 1 else None for n, name in zip(shape, axes, strict=True))
        row = Row(value, tuple(shape), tuple(named), next(self._places))
        self._rows.append(weakref.ref(row))
        return row

    # Products.

    def _product(self, eqn: Eqn, x: Any, site: WeightSite) -> Row:
        """Records the product of quantized rows and a weight."""
        if isinstance(x, Row):
            axes, value = x.axes, x.value
        else:
            axes = (*(i if n > 1 else None for i, n in enumerate(self.lead)), WIDTH)
            axes = tuple(name if n > 1 else None for name, n in zip(axes, x.shape, strict=True))
            value = self._argument("input", x, axes)
        codes = self._codes(value, *site.quantized[0])
        self.weights.append(site.weight)
        self.of_weights.append(site.scope)
        self.contracted.append(site.axis)
        result, note = eqn.outvars[0].aval, _Weight(len(self.weights) - 1)
        made = self._step("product", (codes,), result.shape[-1], note)
        return self._row(made, result.shape, (*axes[:-1], WIDTH))

    def _codes(self, value: int, spec: QSpec, affine: Affine | None) -> int:
        """Returns the number of the codes of rows."""
        given = None if affine is None else self._affine(affine, spec)
        key = "codes", value, spec, given
        if key not in self._numbers:
            if given is None:
                form = format_of(spec.qtype)
                limit = self._constant(float(min(-form.low, form.high)))
                largest = self._step("magnitude", (value,), 1)
                scale = self._step("div", (largest, limit), 1)
            else:
                scale = self._value("scale", given, 1)
            note = _Quantization(spec, -1 if given is None else given)
            width = self.values[value][2]
            self._numbers[key] = self._step("quantize", (value, scale), width, note)
        return self._numbers[key]

    def _batches(
        self, eqn: Eqn, operands: Sequence[Any], site: BatchSite | None = None
    ) -> Row | None:
        """Records a product of rows and the matrices that they meet; returns `None` if there are no
        rows, or it sums along another axis.
        """
        lhs, rhs = operands
        (left, right), (left_batch, right_batch) = eqn.params["dimension_numbers"]
        if not all(is_float(atom.aval) for atom in (*eqn.invars, *eqn.outvars)):
            return None
        if not isinstance(eqn.params["precision"], (jax.lax.Precision, tuple, type(None))):
            return None
        if len(left) != 1 or (isinstance(lhs, Row) and isinstance(rhs, Row)):
            return None
        is_swapped = isinstance(rhs, Row)
        by = None if site is None else site.quantized[::-1] if is_swapped else site.quantized
        if is_swapped:
            lhs, rhs, left, right = rhs, lhs, right, left
            left_batch, right_batch = right_batch, left_batch
        if not isinstance(rhs, jax.Array):
            return None
        free = [i for i in range(len(lhs.shape)) if i not in (*left, *left_batch)]
        if isinstance(lhs, Row):
            axes, value = lhs.axes, lhs.value
        else:
            names: dict[int, int] = {axis: i for i, axis in enumerate((*left_batch, *free))}
            names[left[0]] = WIDTH
            axes = tuple(names[i] if n > 1 else None for i, n in enumerate(lhs.shape))
            value = self._argument("input", lhs, axes)
        rest = [i for i in range(rhs.ndim) if i not in (*right, *right_batch)]
        is_whole = axes[left[0]] == WIDTH and self.values[value][2] == lhs.shape[left[0]]
        if not is_whole or len(rest) != 1 or 1 in (rhs.shape[right[0]], rhs.shape[rest[0]]):
            return None
        if by is not None and rhs.ndim - 1 not in (*right, *rest):
            return None
        named: dict[int, int | None] = {right[0]: SUMMED, rest[0]: WIDTH}
        named |= {j: axes[i] for i, j in zip(left_batch, right_batch, strict=True)}
        of_matrix, coded = tuple(named[i] for i in range(rhs.ndim)), None
        if site is not None and by is not None:
            (spec, affine), (matrix_spec, given) = by
            value = self._codes(value, spec, affine)
            number = -1 if given is None else self._affine(given, matrix_spec)
            coded = Coded(matrix_spec, number, "codes", len(self.of_batches))
            self.of_batches.append(
                (site.scope, f"matrix_{lhs.shape[left[0]]}_{rhs.shape[rest[0]]}")
            )
        matrix = self._argument("matrix", rhs, of_matrix, coded)
        batch, kept = [axes[i] for i in left_batch], [axes[i] for i in free]
        order = (*batch, WIDTH, *kept) if is_swapped else (*batch, *kept, WIDTH)
        strides = strides_of(rhs.shape, self.arguments[self.values[matrix][1]][1], (SUMMED, WIDTH))
        width, note = rhs.shape[rest[0]], _Matrix(strides, -1 if coded is None else coded.affine)
        made = self._step("matrix_product", (value, matrix), width, note)
        if coded is not None and coded.affine < 0:
            scales = self._argument("input", rhs, of_matrix, coded._replace(part="scales"))
            made = self._step("mul", (made, scales), width)
        return self._row(made, eqn.outvars[0].aval.shape, order)

    # Other equations.

    def _record(self, eqn: Eqn, operands: Sequence[Any]) -> list[Any] | None:
        """Records the steps of an equation, and of those inside of it."""
        name = eqn.primitive.name
        if name in _INLINED:
            return self._inside(eqn.params[CALLS[name]], operands)
        result = eqn.outvars[0].aval
        if len(eqn.outvars) != 1 or not is_float(result):
            return None
        if name == "dot_general":
            row = self._batches(eqn, operands)
            return None if row is None else [row]
        found = self._steps_of(eqn, operands)
        return None if found is None else [self._row(found[0], result.shape, found[1])]

    def _inside(self, jaxpr: Any, operands: Sequence[Any]) -> list[Any] | None:
        body, consts = compat.open_jaxpr(jaxpr)

        def results_of(_: int, eqn: Eqn, given: list[Any]) -> list[Any]:
            if any(isinstance(x, Row) for x in given):
                results = self._record(eqn, given)
            elif eqn.primitive.name == "broadcast_in_dim" and not np.shape(given[0]):
                results = given[:1]  # one number suffices
            else:
                waits = eqn.effects or any(isinstance(x, Later) for x in given)
                results = None if waits else compat.bind(eqn, given)
            if results is None:
                raise _NotRecordedError
            return results

        try:
            results = evaluate_body(body, consts, operands, results_of)
        except _NotRecordedError:
            return None
        return results if all(isinstance(x, Row) for x in results) else None

    def _steps_of(self, eqn: Eqn, operands: Sequence[Any]) -> tuple[int, Axes] | None:
        """Returns the number of the result of an equation, and its axes."""
        name, params, shape = eqn.primitive.name, eqn.params, eqn.outvars[0].aval.shape
        if name in _OPS or name == "select_n":
            return self._elementwise(name, operands, len(shape))
        row = operands[0]
        if len(operands) != 1 or not isinstance(row, Row):
            return None
        value, axes, width = row.value, row.axes, self.values[row.value][2]
        if name == "square" or (name == "integer_pow" and params["y"] == 2):
            return self._step("mul", (value, value), width), axes
        if name == "integer_pow" and params["y"] == 3:
            square = self._step("mul", (value, value), width)
            return self._step("mul", (square, value), width), axes
        if name in _SAME:
            return (value, axes) if is_float(eqn.invars[0].aval) else None
        if name in _REDUCTIONS and len(params["axes"]) == 1:
            axis = int(params["axes"][0])
            if axes[axis] != WIDTH or width != row.shape[axis]:
                return None
            return self._step(_REDUCTIONS[name], (value,), 1), (*axes[:axis], *axes[axis + 1 :])
        if name == "transpose":
            return value, tuple(axes[i] for i in params["permutation"])
        if name in ("reshape", "squeeze"):
            return _reshaped(row, shape)
        if name == "broadcast_in_dim":
            return _broadcast(row, shape, params["broadcast_dimensions"])
        return None

    def _elementwise(
        self, name: str, operands: Sequence[Any], rank: int
    ) -> tuple[int, Axes] | None:
        names: list[int | None] = [None] * rank
        for x in operands:
            for i, axis in enumerate(x.axes if isinstance(x, Row) else ()):
                if axis is not None and names[i] not in (None, axis):
                    return None
                names[i] = names[i] if axis is None else axis
        for x in operands:  # one number of each row meets as many as an array has
            shape: tuple[int, ...] = () if isinstance(x, Later) else np.shape(x)
            for i, n in enumerate(shape if len(shape) == rank else ()):
                if n > 1 and names[i] is None and WIDTH not in names:
                    names[i] = WIDTH
        kept, axes = [axis for axis in names if axis is not None], tuple(names)
        if len({*kept}) != len(kept):
            return None
        numbers = [self._read(x, axes) for x in operands]
        values = tuple(i for i in numbers if i is not None)
        if len(values) != len(numbers):
            return None
        are_masks = [self.values[i][0] == "mask" for i in values]
        if name == "select_n":
            if are_masks != [True, False, False]:
                return None
            values = values[0], values[2], values[1]
        elif any(are_masks):
            return None
        width = max(self.values[i][2] for i in values)
        if name == "mul":
            values = self._without_sign(*values)
        return self._step("select" if name == "select_n" else _OPS[name], values, width), axes

    def _without_sign(self, x: int, y: int) -> tuple[int, int]:
        """Returns factors of which none is a negated value times a constant, as in `jax.nn.gelu`:
        the constant is negated in its place.
        """
        for value, factor in ((x, y), (y, x)):
            kind, constant, _ = self.values[factor]
            for op, made, operands, _ in self.steps if kind == "constant" else ():
                if op == "neg" and made == value:
                    return operands[0], self._constant(-constant)
        return x, y

    # What is computed.

    def compute(self) -> None:
        """Computes the rows that something still refers to."""
        known = {place for each in self.replayed for place in each.results}
        every = (ref() for ref in self._rows)
        rows = [row for row in every if row is not None and row.place in known]
        if not rows:
            return
        of_values = {row.value: row for row in rows}
        orders = {value: self._order(row) for value, row in of_values.items()}
        results = tuple(Result(value, orders[value]) for value in sorted(orders))
        program, used = self._program(results)
        wanted = [
            _Wanted(of_values[i].place, of_values[i].axes, order, self.values[i][2])
            for i, order in results
        ]
        how = Region(
            program,
            tuple(self.arguments[i][0] for i in used),
            tuple(self.specs),
            tuple(self.contracted),
            functools.partial(_replay, self.replayed, wanted, self.lead),
        )
        operands = self.arrays, self.affines, self.weights
        matrices = sum(step.op == "matrix_product" for step in program.steps)
        if matrices < 2 and not self.weights:  # one product alone is not faster
            found = how.plain(*operands)
        else:
            with contextlib.ExitStack() as scopes:
                for argument in how.arguments:  # then weights, which is the order of operands
                    if argument.coded is not None and argument.coded.part == "codes":
                        scope, sizes = self.of_batches[argument.coded.site]
                        scopes.enter_context(scope)
                        scopes.enter_context(jax.named_scope(sizes))
                for scope in self.of_weights:
                    scopes.enter_context(scope)
                found = CHOICE.compute_once(*operands, how)
        by_value = dict(zip(sorted(orders), found, strict=True))
        for row in rows:
            names = (*orders[row.value], WIDTH)
            row.array = _with_axes(by_value[row.value], names, row.axes, row.shape)

    def _order(self, row: Row) -> tuple[int, ...]:
        """Returns the order of the axes of rows in which an array is written: that of the function
        if its rows lie along the last axis.
        """
        named = [name for name in row.axes if name is not None]
        every = range(len(self.lead))
        if WIDTH in named[:-1]:
            return tuple(every)
        known = [name for name in named if name != WIDTH]
        return (*(i for i in every if i not in known), *known)

    def _program(self, results: tuple[Result, ...]) -> tuple[RowProgram, list[int]]:
        """Returns the program of some values, and which arguments it reads."""
        needed, steps = {result.value for result in results}, []
        for step in reversed(self.steps):
            if step[1] in needed:
                needed.update(step[2])
                steps.append(step)
        steps.reverse()
        used = sorted({self.values[i][1] for i in needed if self.values[i][0] in _READ})
        constants = sorted(i for i in needed if self.values[i][0] == "constant")
        place = itertools.count(len(used))
        affines = [
            (next(place), -1 if affine.zero_point is None else next(place))
            for affine in self.affines
        ]
        weights = [
            tuple(
                -1 if x is None else next(place)
                for x in jax.eval_shape(functools.partial(in_rows, axis=axis), q)
            )
            for q, axis in zip(self.weights, self.contracted, strict=True)
        ]
        values = [Value(CONSTANT, 0, 1)] * len(self.values)  # those that nothing needs
        for i in needed:
            kind, x, width = self.values[i]
            if kind in _READ:
                _, axes, shape = self.arguments[x]
                strides = strides_of(shape, axes, range(len(self.lead)))
                values[i] = Value(_READ[kind], used.index(x), width, strides)
            elif kind == "constant":
                values[i] = Value(CONSTANT, constants.index(i), 1)
            elif kind == "scale":
                values[i] = Value(COLUMNS, affines[x][0], 1)
            else:
                values[i] = Value(CODES if kind == "codes" else OF_BLOCK, 0, width)

        def numbers(note: Any) -> tuple[int, ...]:
            if isinstance(note, _Weight):
                return weights[note.number]
            if isinstance(note, _Matrix):
                return note.strides + ((-1, -1) if note.affine < 0 else affines[note.affine])
            if not isinstance(note, _Quantization):
                return ()
            form = format_of(note.spec.qtype)
            shift = 128 if is_flipped(form) else 0
            zero = -1 if note.affine < 0 else affines[note.affine][1]
            return zero, int(form.low) - shift, int(form.high) - shift

        program = RowProgram(
            self.lead,
            tuple(values),
            tuple(self.values[i][1] for i in constants) or (0.0,),
            tuple(Step(op, to, xs, numbers(note)) for op, to, xs, note in steps),
            results,
        )
        return program, used


_READ = {"input": INPUT, "mask": MASK, "matrix": MATRIX}


def _reshaped(row: Row, shape: Sequence[int]) -> tuple[int, Axes] | None:
    """Returns rows whose axes of one element are added or removed."""
    if [n for n in row.shape if n > 1] != [n for n in shape if n > 1]:
        return None
    names = iter([name for n, name in zip(row.shape, row.axes, strict=True) if n > 1])
    return row.value, tuple(next(names) if n > 1 else None for n in shape)


def _broadcast(
    row: Row, shape: Sequence[int], dimensions: Sequence[int]
) -> tuple[int, Axes] | None:
    """Returns rows along more axes: those of one element, and the width if a row is one number."""
    axes: list[int | None] = [None] * len(shape)
    for i, to in enumerate(dimensions):
        axes[to] = row.axes[i]
    for i, n in enumerate(shape):
        if n > 1 and axes[i] is None:
            if WIDTH in axes:
                return None
            axes[i] = WIDTH
    return row.value, tuple(axes)


def _with_axes(y: jax.Array, names: Axes, wanted: Axes, shape: Sequence[int]) -> jax.Array:
    """Returns an array, whose axes have names, with the wanted axes, and of a shape."""
    order = [names.index(name) for name in wanted if name is not None]
    others = [axis for axis in range(y.ndim) if axis not in order]  # of one element
    sizes = [1 if name is None else y.shape[names.index(name)] for name in wanted]
    return jnp.broadcast_to(jnp.transpose(y, (*others, *order)).reshape(sizes), shape)


def _replay(
    replayed: Sequence[_Replayed],
    wanted: Sequence[_Wanted],
    lead: tuple[int, ...],
    arrays: Sequence[jax.Array],
    affines: Sequence[Affine],
    weights: Sequence[QTensor],
) -> list[jax.Array]:
    """Evaluates recorded equations, and returns some results as the kernel does."""
    results: dict[int, Any] = {}

    def read(kind: str, x: Any) -> Any:
        return results[x] if kind == "row" else arrays[x] if kind == "array" else x

    for each in replayed:
        operands = [read(*operand) for operand in each.operands]
        if each.site is None:
            values = in_float(each.eqn, operands)
        else:
            given = [None if i < 0 else affines[i] for i in each.affines]
            values = [each.site(*operands, *given, *(weights[i] for i in each.weights))]
        results.update(zip(each.results, values, strict=True))
    found = []
    for place, axes, order, width in wanted:
        y, names = results[place], (*order, WIDTH)
        present = [axes.index(name) for name in names if name in axes]
        rest = [axis for axis in range(y.ndim) if axis not in present]  # of one element
        full = jnp.transpose(y, (*present, *rest)).reshape(*(lead[i] for i in order), -1)
        found.append(full[..., :width])
    return found
