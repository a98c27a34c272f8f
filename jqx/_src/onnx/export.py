"""`to_onnx`: a function, with its weights and its plan, as a model of ONNX."""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import export as jax_export
from jax.tree_util import SequenceKey, keystr

from ... import Plan, Quantized
from .. import compat
from ..checks import called, check_instance
from ..compat import Eqn
from ..errors import fail
from ..numerics.lookup import format_of
from ..statistics.calibrators import Affine
from ..tensor.grid import fake_quantize_as
from ..tensor.qtensor import QTensor
from ..transforms.arguments import check_function
from ..transforms.calibrate import arguments_of
from ..transforms.integers import OnIntegers, quantized_leaves
from ..transforms.interpret import view
from ..transforms.make_plan import as_plan
from ..transforms.onnx_rules import ADDED
from ..transforms.paths import positions_of
from ..transforms.plan import Site
from ..transforms.trace import Call, trace_call
from ..transforms.views import real_of
from ..transforms.walk import (
    Body,
    Domain,
    Where,
    bodies,
    carried,
    contractions_in,
    passed_on,
    walk,
    while_starts,
)
from . import bits as bits  # adds its rules
from .contractions import (
    CONTRACTIONS,
    Codes,
    Later,
    has_nodes,
    is_integer,
    is_turned,
    quantized,
    real,
    table_rows,
)
from .dtypes import cast, moved_in
from .functions import FUNCTIONS, HELD, function_of
from .fusion import fuse
from .graph import (
    IR_VERSION,
    OPSET,
    Graph,
    Operand,
    Value,
    as_array,
    beside,
    in_bytes,
    onnx_module,
    onnx_type,
    shared,
    tensor,
)
from .operators import form_of
from .primitives import RULES, refuse, write
from .primitives import where as chosen
from .state import check_state, is_state, parts_of, with_parts, written

SITES = "jqx_sites"
"""The key of the sites in the properties of a model, as JSON; see `Graph.sites`."""

_EMPTY = Plan((), (), (), 0, ())

_LEAST = np.iinfo(np.int64).min
"""The end of a slice that runs backwards to the first element."""

_LARGE = 1 << 14
"""Bytes from which a broadcast constant is stored once, and spread by the graph."""


@dataclasses.dataclass(frozen=True)
class Scales:
    """Scales of the sites of a call whose scans are written step by step.

    Attributes:
      affines: scales by key, stacked along the steps of scans over the weight of a site.
      scans: the addresses of the scans around each contraction, outermost first.
    """

    affines: Mapping[str, Affine]
    scans: Mapping[tuple[int, ...], tuple[tuple[int, ...], ...]]

    @classmethod
    def of(cls, call: Call, affines: Mapping[str, Affine]) -> "Scales":
        scans = {
            address: tuple(x.address for x in around if x.name == "scan")
            for address, around in contractions_in(call.jaxpr)
        }
        return cls(affines, scans)

    def at(self, site: Site | None, key: str, where: Where) -> Affine | None:
        """Returns the scale of a site in this step of its loops."""
        affine = self.affines.get(key)
        if affine is None or site is None:
            return affine
        around = self.scans[site.address]
        for loop in site.loops:
            step = where.steps[around.index(loop.address)]
            scale, zero_point = affine
            with jax.ensure_compile_time_eval():  # for a caller that traces the call again
                affine = Affine(scale[step], None if zero_point is None else zero_point[step])
        return affine


@dataclasses.dataclass(frozen=True)
class _Emit(Domain[Any]):
    """Writes each equation into a graph. What is known of a value is the value itself: an array, a
    QTensor, a `Value` of the graph, or a state, which is a QTensor of these. Equations of arrays
    alone are evaluated.
    """

    graph: Graph
    plan: Plan
    scales: "Scales"
    scans: str

    unrolls = True

    def literal(self, atom: Any) -> Any:
        return np.asarray(atom.val, atom.aval.dtype)

    def constant(self, array: Any) -> Any:
        return as_array(array)

    def enters(self, eqn: Eqn, values: list[Any], where: Where) -> bool:
        if eqn.primitive.name == "scan":
            return not self._is_loop(eqn, values)
        # The function of a `shard_map` is that of one device, for a part of the arrays.
        apart = eqn.primitive.name in ("cond", "shard_map", "while")
        return not apart and form_of(eqn, values) is None

    def part(self, value: Any, step: int) -> Any:
        if is_state(value):
            return self._traced(lambda q: q[step], [value])
        if not isinstance(value, Value):
            return value[step]
        g, shape = self.graph, value.shape[1:]
        return self._moved(value, shape, lambda x: g.reshape(g.slice(x, 0, step, step + 1), shape))

    def _moved(self, x: Value, shape: Any, write: Callable[[Operand], str]) -> Value:
        """Writes what moves elements, in a dtype that runtimes move."""
        wide = moved_in(x.dtype)
        return cast(self.graph, Value(write(cast(self.graph, x, wide)), shape, wide), x.dtype)

    def stack(self, values: list[Any], aval: Any) -> Any:
        if values and all(map(is_state, values)):
            return self._traced(lambda *qs: jax.tree.map(lambda *xs: jnp.stack(xs), *qs), values)
        if all(isinstance(x, np.ndarray) for x in values):
            return np.stack(values) if values else np.zeros(aval.shape, aval.dtype)
        data = compat.data_of_key(aval)
        g, wide, shape = self.graph, moved_in(data.dtype), (1, *data.shape[1:])
        rows = [g.reshape(cast(g, real(g, x), wide), shape) for x in values]
        return cast(g, Value(g.add("Concat", *rows, axis=0), tuple(data.shape), wide), data.dtype)

    def start(self, eqn: Eqn, values: list[Any], where: Where) -> list[Any]:
        return values

    def evaluate(self, eqn: Eqn, values: list[Any], where: Where) -> Sequence[Any]:
        name, site = eqn.primitive.name, None
        if where.is_marked:
            site = self.plan.site_at(where.address)
        if name == "scan":
            return self._scan(eqn, values, where)
        if name not in CONTRACTIONS and any(map(is_state, values)):
            return self._of_state(eqn, values)
        if name == "cond":
            return self._branches(eqn, values, where)
        if name == "while":
            return self._loop(eqn, values, where)
        is_known = not any(isinstance(x, Value) or is_state(x) for x in values)
        if name in HELD:
            held = next(eqn.params[key] for key in HELD[name] if key in eqn.params)
            body, consts = compat.open_jaxpr(held)
            inner = dataclasses.replace(self, plan=_EMPTY)
            return walk(inner, body, values, consts=list(map(as_array, consts)))
        function = None if name in ADDED.get() else function_of(eqn)
        is_open = any(
            map(jax_export.is_symbolic_dim, [n for v in eqn.outvars for n in v.aval.shape])
        )
        if function is not None and not (is_known and name in FUNCTIONS and not is_open):
            return self._traced(function, list(map(self._opened, values, eqn.invars)))
        if is_known and name != "dim_as_value" and not self._is_spread(eqn):
            return self._computed(eqn, values, site, where)
        if all(0 in var.aval.shape for var in eqn.outvars):  # runtimes stop at some empty arrays
            return [self._empty(var.aval) for var in eqn.outvars]
        if (form := form_of(eqn, values)) is not None:
            return [self._value(form(self.graph), eqn.outvars[0].aval)]
        if name == "gather" and isinstance(values[0], QTensor):
            return [self._value(table_rows(self.graph, eqn, *values), eqn.outvars[0].aval)]
        if name in CONTRACTIONS:
            return [self._contraction(eqn, values, site, where)]
        if name not in RULES and name not in ADDED.get():
            raise refuse(eqn, "has no rule for ONNX")
        operands = [real(self.graph, x) for x in values]
        pairs = zip(write(self.graph, eqn, operands), eqn.outvars, strict=True)
        return [self._value(name, var.aval) for name, var in pairs]

    def _empty(self, aval: Any) -> Any:
        """Returns an array without elements."""
        if not _is_open(aval):
            return np.zeros(aval.shape, aval.dtype)
        shape = self.graph.shape(aval.shape)
        return self._value(self.graph.add("Expand", np.zeros((), aval.dtype), shape), aval)

    def _of_state(self, eqn: Eqn, values: list[Any]) -> list[Any]:
        """Writes a view or an update of inputs in codes."""
        if eqn.primitive.name == "dynamic_update_slice" and is_state(values[0]):
            cache, update, *starts = values
            return [written(self.graph, eqn, cache, update, starts)]

        def viewed(*operands: Any) -> list[Any]:
            results = view(eqn, operands)
            if results is None:
                raise refuse(eqn, "of an input in codes has no form in ONNX")
            return results

        return self._traced(viewed, values)

    def _opened(self, x: Any, atom: Any) -> Any:
        """Returns the real array of a QTensor, whose codes the file holds."""
        return self._value(real(self.graph, x), atom.aval) if isinstance(x, QTensor) else x

    def _traced(self, f: Callable[..., Any], values: Sequence[Any]) -> Any:
        """Writes what a function of JAX computes of values, some of which are in codes."""
        leaves, tree = jax.tree.flatten(list(values), is_leaf=lambda x: isinstance(x, Value))
        open_leaves = [x for x in leaves if isinstance(x, Value)]

        def run(given: list[Any]) -> Any:
            rest = iter(given)
            filled = [next(rest) if isinstance(x, Value) else x for x in leaves]
            return f(*jax.tree.unflatten(tree, filled))

        avals = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in open_leaves]
        jaxpr, shapes = jax.make_jaxpr(run, return_shape=True)(avals)
        inner = dataclasses.replace(self, plan=_EMPTY)
        results = walk(inner, jaxpr.jaxpr, open_leaves, consts=list(map(as_array, jaxpr.consts)))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    def _is_spread(self, eqn: Eqn) -> bool:
        """Whether an equation makes a large array of a small one."""
        if eqn.primitive.name not in ("broadcast_in_dim", "iota"):
            return False
        aval = eqn.outvars[0].aval
        if _is_open(aval):
            return True
        return eqn.primitive.name == "broadcast_in_dim" and _nbytes(aval) > max(
            _LARGE, 2 * _nbytes(eqn.invars[0].aval)
        )

    def _value(self, name: str, aval: Any) -> Value:
        aval = compat.data_of_key(aval)
        return Value(name, tuple(aval.shape), np.dtype(aval.dtype))

    def _computed(
        self, eqn: Eqn, values: list[Any], site: Site | None, where: Where
    ) -> Sequence[Any]:
        """Evaluates an equation of arrays and QTensors."""
        if site is not None:
            scales = {key: self.scales.at(site, key, where) for key in site.keys}
            known = {key: affine for key, affine in scales.items() if affine is not None}
            return [as_array(OnIntegers(self.plan, known).at_site(site, eqn, values)[0])]
        if any(isinstance(x, QTensor) for x in values):
            views = view(eqn, values)
            if views is not None:
                return list(map(as_array, views))
        return list(map(as_array, compat.bind(eqn, list(map(real_of, values)))))

    # Contractions.

    def _contraction(self, eqn: Eqn, values: list[Any], site: Site | None, where: Where) -> Value:
        g, out = self.graph, eqn.outvars[0].aval
        # What is in codes already, weights and states, is not rounded again.
        in_codes = [isinstance(x, QTensor) for x in values]
        values = [self._traced(QTensor.dequantize, [x]) if is_state(x) else x for x in values]
        operands = list(values)
        for i, operand in enumerate(() if site is None else site.operands):
            spec = operand.spec
            if operand.role != "activation" or spec is None or in_codes[i]:
                continue
            affine = self.scales.at(site, operand.key, where)
            if isinstance(operands[i], Value):
                operands[i] = self._rounded(eqn, i, spec, affine, values)
            else:
                operands[i] = np.asarray(QTensor.quantize(operands[i], spec, affine).dequantize())
        result = CONTRACTIONS[eqn.primitive.name](g, eqn, *operands)
        value = self._value(result, out)
        if site is not None and site.output is not None:
            affine = self.scales.at(site, site.output_key, where)
            value = self._to_grid(value, site.output, affine)
        if site is not None:
            names = {}
            for i, x in enumerate(operands):
                if isinstance(x, Codes | Value) and x is not values[i]:
                    names[i] = x.codes if isinstance(x, Codes) else x.name
            g.sites.append([site.output_key, names, value.name])
        return value

    def _rounded(self, eqn: Eqn, index: int, spec: Any, affine: Any, values: list[Any]) -> Any:
        """Returns an activation as codes where a product of integers reads them."""
        x = values[index]
        is_read = any(map(is_integer, values)) and (affine is None or not self.graph.is_qdq)
        if not has_nodes(spec, affine, x.shape):
            return self._to_grid(x, spec, affine)
        if is_read and format_of(spec.qtype).name in ("int8", "uint8"):
            return quantized(self.graph, x, spec, affine, as_codes=True)
        if is_turned(eqn, index) and affine is not None and np.size(affine[0]) == 1:
            return Later(x, spec, affine)
        return self._to_grid(x, spec, affine)

    def _to_grid(self, x: Value, spec: Any, affine: Any) -> Value:
        """Returns a value rounded as a spec says, in float."""
        if not has_nodes(spec, affine, x.shape):  # blocks, other calibrators and round modes
            return self._traced(lambda x: fake_quantize_as(x, spec, affine), [x])
        rounded = quantized(self.graph, x, spec, affine, as_codes=False)
        assert isinstance(rounded, str)
        return x._replace(name=rounded)

    # Control flow.

    def _inside(self, body: Any, values: list[Any], graph: Graph, where: Where) -> list[Any]:
        """Writes a function into a graph of its own, and returns its results."""
        return walk(dataclasses.replace(self, graph=graph), body, values, where)

    def _made(self, graph: Graph, results: Sequence[Any], avals: Sequence[Any]) -> list[Any]:
        """Returns values as what nodes of a graph compute, such as the results of a body."""

        def computed(x: Value) -> Value:
            return x._replace(name=graph.add("Identity", x))

        values = [
            x if is_state(x) else self._value(graph.name(real(graph, x)), aval)
            for x, aval in zip(results, avals, strict=True)
        ]
        return jax.tree.map(computed, values, is_leaf=_is_value)

    def _outputs(self, graph: Graph, results: Sequence[Any], atoms: Sequence[Any]) -> list[Any]:
        """Returns the declared outputs of a graph inside another."""
        return _infos(_leaves(self._made(graph, results, [atom.aval for atom in atoms])))

    def _branches(self, eqn: Eqn, values: list[Any], where: Where) -> Sequence[Any]:
        helper = onnx_module().helper
        index, *operands = values
        branches = bodies(eqn)
        if not isinstance(index, Value):
            body = branches[min(max(int(index), 0), len(branches) - 1)]
            return self._inside(body.jaxpr, operands, self.graph, _at(where, body))
        graphs = []
        for body in branches:
            graph = Graph(self.graph)
            results = self._inside(body.jaxpr, operands, graph, _at(where, body))
            graphs.append((graph, self._outputs(graph, results, eqn.outvars)))

        def choose(g: Graph, first: int) -> Any:
            """Returns the graph of the branches from one on."""
            graph, outputs = graphs[first]
            if first == len(graphs) - 1:
                return helper.make_graph(graph.nodes, g.new_name("branch"), [], outputs)
            inner = Graph(g)
            names = self._if(inner, index, first, choose(inner, first + 1), graphs, eqn)
            infos = [_info(helper, n, v.aval) for n, v in zip(names, eqn.outvars, strict=True)]
            return helper.make_graph(inner.nodes, g.new_name("branch"), [], infos)

        names = self._if(self.graph, index, 0, choose(self.graph, 1), graphs, eqn)
        return [self._value(n, v.aval) for n, v in zip(names, eqn.outvars, strict=True)]

    def _if(
        self, g: Graph, index: Value, first: int, other: Any, graphs: Sequence[Any], eqn: Eqn
    ) -> list[str]:
        """Adds an `If` between one branch and those after it."""
        helper = onnx_module().helper
        graph, outputs = graphs[first]
        branch = helper.make_graph(graph.nodes, g.new_name("branch"), [], outputs)
        is_this = g.add("LessOrEqual", g.cast(index, np.int32), np.asarray(first, np.int32))
        count = len(eqn.outvars)
        return g.add_many("If", count, is_this, then_branch=branch, else_branch=other)

    def _loop(self, eqn: Eqn, values: list[Any], where: Where) -> Sequence[Any]:
        g, avals = self.graph, [atom.aval for atom in eqn.outvars]
        condition, body = bodies(eqn)
        consts, start = while_starts(eqn)
        for_condition, for_body, state = values[:consts], values[consts:start], values[start:]

        def asked(graph: Graph, state: list[Any]) -> Any:
            inside = _at(where, condition)
            return self._inside(condition.jaxpr, [*for_condition, *state], graph, inside)[0]

        goes_on, inner = asked(g, state), Graph(g)
        before = [self._value(inner.new_name("carried"), aval) for aval in avals]
        results = self._inside(body.jaxpr, [*for_body, *before], inner, _at(where, body))
        if goes_on.shape:  # each loop of a batch for itself: one that has ended keeps its state
            on = asked(inner, before)
            results = list(map(functools.partial(self._while_on, inner, on), results, before))
        again = inner.name(_any(inner, asked(inner, results)))
        step, first = g.new_name("step"), [g.name(real(g, x)) for x in state]
        made = self._made(inner, results, avals)
        operands = "", _any(g, goes_on), *first
        names = self._repeated(inner.nodes, step, before, again, made, *operands)
        return [self._value(n, aval) for n, aval in zip(names, avals, strict=True)]

    def _repeated(
        self,
        nodes: Sequence[Any],
        step: str,
        before: Sequence[Value],
        again: str,
        made: Sequence[Value],
        *operands: Operand,
    ) -> list[str]:
        """Adds a `Loop`. Its body has the number of the step, the carried values before it, whether
        it goes on after it, and its results.
        """
        helper, g, boolean = onnx_module().helper, self.graph, np.dtype(np.bool_)
        inputs = Value(step, (), np.dtype(np.int64)), Value(g.new_name("goes_on"), (), boolean)
        outputs = Value(again, (), boolean), *made
        declared = _infos([*inputs, *before]), _infos(outputs)
        body = helper.make_graph(nodes, g.new_name("body"), *declared)
        return g.add_many("Loop", len(made), *operands, body=body)

    # Scans.

    def _is_loop(self, eqn: Eqn, values: Sequence[Any]) -> bool:
        """Whether a scan is written as a `Loop`. If not, its steps are, one after another."""
        length = eqn.params["length"]
        if jax_export.is_symbolic_dim(length):
            return True
        is_open = any(isinstance(x, Value) or is_state(x) for x in values)
        return self.scans == "loop" and length > 1 and is_open

    def _scan(self, eqn: Eqn, values: list[Any], where: Where) -> Sequence[Any]:
        """Writes a scan as a `Loop`. Values that its steps pass on unchanged stay what they are.

        A `Scan` is no faster, and runtimes lack parts of it: a length of 0, values from outside of
        its body, and bodies that hold another.
        """
        g, state = self.graph, carried(eqn)
        length, is_reverse = eqn.params["length"], eqn.params["reverse"]
        results = dict(enumerate(values[state]))
        avals = [atom.aval for atom in compat.open_jaxpr(bodies(eqn)[0].jaxpr)[0].outvars]
        moving = [i for i, is_same in enumerate(passed_on(eqn)) if not is_same]
        first = self._made(g, [results[i] for i in moving], [avals[i] for i in moving])
        inner = jax.tree.map(
            lambda x: x._replace(name=g.new_name("carried")), first, is_leaf=_is_value
        )
        before = results | dict(zip(moving, inner, strict=True))
        moving += range(len(results), len(avals))
        given = [*values[: state.start], *before.values()], values[state.stop :]
        steps = self._steps(eqn, *given, moving, where, is_known=True)
        steps = steps or self._steps(eqn, *given, moving, where, is_known=False)
        if steps is None:
            raise _refuse_scan(eqn, "its steps differ in more than their constants")
        body, made, slices = steps
        if _types(made[: len(first)]) != _types(first):
            raise _refuse_scan(eqn, "it changes the format of an input in codes that it carries")
        if any(x.dtype != in_bytes(x.dtype) for x in _leaves(made)):
            fix = "convert them in the function, for example with x.astype(jnp.int8)."
            raise refuse(eqn, "of values of 4 bits has no form in ONNX", fix)
        head, step = Graph(g), g.new_name("step")
        last = g.add("Squeeze", g.size(length - 1)) if is_reverse else ""
        place = head.add("Sub", last, step) if is_reverse else step
        for part, stack in slices.items():
            rows = cast(g, stack, moved_in(part.dtype))
            row = part._replace(name=head.add("Gather", rows, place, axis=0), dtype=rows.dtype)
            cast(head, row, part.dtype)
            head.nodes[-1].output[0] = part.name
        again, count = head.add("Identity", np.asarray(True)), g.add("Squeeze", g.size(length))
        nodes, carries = [*head.nodes, *body.nodes], _leaves(first)
        names = self._repeated(
            nodes, step, _leaves(inner), again, _leaves(made), count, "", *carries
        )
        found = [x._replace(name=name) for x, name in zip(_leaves(made), names, strict=True)]
        for i, x in list(enumerate(found))[len(carries) :]:
            found[i] = x = x._replace(shape=(length, *x.shape))
            if is_reverse:
                found[i] = self._moved(x, x.shape, lambda x: g.slice(x, 0, -1, _LEAST, -1))
        results |= dict(zip(moving, jax.tree.unflatten(_tree(made), found), strict=True))
        return [results[i] for i in range(len(avals))]

    def _steps(
        self,
        eqn: Eqn,
        before: list[Any],
        stacks: list[Any],
        moving: list[int],
        where: Where,
        *,
        is_known: bool,
    ) -> tuple[Graph, list[Any], dict[Value, Operand]] | None:
        """Writes the steps of a scan, each into a graph, and returns one that holds for all, its
        results, and the stacks of which its inputs are slices: those of the graph, and constants
        that differ between the steps. With `is_known=False` arrays are sliced as they are, since
        they may choose branches. Returns `None` if the nodes of the steps still differ.
        """
        g, (body,), length = self.graph, bodies(eqn), eqn.params["length"]
        avals = [atom.aval for atom in compat.open_jaxpr(body.jaxpr)[0].outvars]
        inputs: dict[Value, Operand] = {}

        def sliced(x: Any) -> Value:
            part = Value(g.new_name("slice"), tuple(x.shape[1:]), np.dtype(x.dtype))
            inputs[part] = x
            return part

        def slice_of(x: Any) -> Any:
            """Returns the slice of a stack that is the same for all steps, or `None`."""
            if is_state(x):
                if not all(y.shape[0] in (1, length) for y in _leaves(x)):
                    raise _refuse_scan(eqn, "it cuts blocks of an input in codes")
                first = jax.tree.map(
                    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), x, is_leaf=_is_value
                )
                parts = [sliced(x) if x.shape[0] == length else self.part(x, 0) for x in _leaves(x)]
                return jax.tree.unflatten(_tree(jax.eval_shape(lambda q: q[0], first)), parts)
            is_array = isinstance(x, np.ndarray)
            return sliced(x) if isinstance(x, Value) or (is_array and not is_known) else None

        slices = list(map(slice_of, stacks))
        is_one = all(isinstance(x, Value) or is_state(x) for x in stacks)
        graphs, made, count = [], [], g.count[0]
        for step in range(1 if is_one else length):
            g.count[0], graph = count, Graph(g, is_step=True)  # with the same names
            parts = [
                self.part(x, step) if y is None else y for x, y in zip(stacks, slices, strict=True)
            ]
            inside = _at(where, body)._replace(steps=(*where.steps, step))
            results = self._inside(body.jaxpr, [*before, *parts], graph, inside)
            made = self._made(graph, [results[i] for i in moving], [avals[i] for i in moving])
            graphs.append(graph)
            if graph.form() != graphs[0].form():
                g.count[0] = count
                return None
        for name, x in graphs[0].constants.items():
            column = [graph.constants[name] for graph in graphs]
            are_one = all(y is x for y in column)
            # In a step of another scan, what is equal here may differ in the next of its steps.
            if not g.in_step or x.dtype == np.int64:
                are_one = are_one or all(y.tobytes() == x.tobytes() for y in column)
            if are_one:
                g.constants[name] = x
            else:
                inputs[Value(name, x.shape, x.dtype)] = g.stacked(column)
        return graphs[0], made, inputs

    def _while_on(self, g: Graph, on: Any, new: Any, old: Value) -> Value:
        """Returns a new state where a batch of loops goes on, and elsewhere the old one."""
        aligned = g.reshape(on, (*on.shape, *[1] * (len(old.shape) - len(on.shape))))
        return old._replace(name=chosen(g, aligned, real(g, new), old, old.dtype))


def _any(g: Graph, x: Any) -> Any:
    """Returns whether anything is true; a scalar as it is."""
    if not x.shape:
        return x
    return x.any() if isinstance(x, np.ndarray) else g.add("ReduceMax", x, keepdims=0)


def _at(where: Where, body: Body) -> Where:
    """Returns where a function inside an equation is."""
    address = (*where.around, *body.part)
    return where._replace(address=address, is_marked=True, inside=address)


def _is_value(x: Any) -> bool:
    return isinstance(x, Value)


def _leaves(values: Any) -> list[Value]:
    """Returns the values of the graph in a list of them and of states."""
    return jax.tree.leaves(values, is_leaf=_is_value)


def _tree(values: Any) -> Any:
    return jax.tree.structure(values, is_leaf=_is_value)


def _types(values: Any) -> Any:
    """Returns the structure of values of the graph, and their shapes and dtypes."""
    return _tree(values), [(x.shape, x.dtype) for x in _leaves(values)]


def _refuse_scan(eqn: Eqn, reason: str) -> Exception:
    is_open = jax_export.is_symbolic_dim(eqn.params["length"])
    fix = "pass scans='unroll'" + (" and a known length." if is_open else ".")
    return refuse(eqn, f"has no form as a loop in ONNX, since {reason}", fix)


def _is_open(aval: Any) -> bool:
    return any(map(jax_export.is_symbolic_dim, aval.shape))


def _nbytes(aval: Any) -> int:
    return int(np.prod(aval.shape, dtype=np.int64)) * np.dtype(aval.dtype).itemsize


def _info(helper: Any, name: str, aval: Any) -> Any:
    """Returns the declaration of an input or output; open sizes are names."""
    aval = compat.data_of_key(aval)
    sizes = [str(n) if jax_export.is_symbolic_dim(n) else int(n) for n in aval.shape]
    return helper.make_tensor_value_info(name, onnx_type(aval.dtype), sizes)


def _infos(values: Sequence[Value]) -> list[Any]:
    """Returns the declarations of values."""
    return [_info(onnx_module().helper, x.name, x) for x in values]


@called("interop.to_onnx", "call it in two steps: to_onnx(quantized)(x), or to_onnx(f, params)(x).")
def to_onnx(
    f: Callable[..., Any],
    params: Any = None,
    *,
    plan: Plan | None = None,
    affines: Mapping[str, Affine] | None = None,
    products: Literal["uint8", "int8", "qdq_uint8", "qdq_int8"] = "uint8",
    scans: Literal["unroll", "loop"] = "unroll",
) -> Callable[..., Any]:
    """Returns a function that writes `f` as a model of ONNX, with its weights.

    Args:
      f: what `jqx.ptq` returns; or a function, whose first argument are the parameters.
      params: the parameters of a function.
      plan: the plan of a function; `None` writes it in float.
      affines: scales of activations, if the plan has static ones.
      products: how codes are multiplied. As integers (`MatMulInteger`, `ConvInteger`), whose sums
        are those of `jqx.convert` bit for bit: of `"uint8"` for onnxruntime, which multiplies
        `"int8"` exactly too, but slowly; of `"int8"` for OpenVINO, which adds products up in
        float32, and that is exact up to 2**24. As `"qdq_uint8"`, products of dequantized operands
        (QDQ), which onnxruntime and OpenVINO fuse into the fastest products of codes that they
        have; on x86 processors without VNNI these add pairs of products in 16 bits, and saturate.
        As `"qdq_int8"`, the same with activations in int8 and zero points of 0, as TensorRT wants.
      scans: how a `lax.scan` is written. `"unroll"` writes its steps one after another; each has
        its own weights, which runtimes prepare when they load the file. `"loop"` writes one `Loop`,
        whose steps get slices of the weights, codes and scales: the graph stays small, and is quick
        to load. A scan whose length is a symbol is always a `Loop`.

    Returns:
      A function of the other arguments, arrays or `jax.ShapeDtypeStruct`, whose sizes may be
      symbols of `jax.export`, or QTensors in 8 bits, such as caches. It returns an
      `onnx.ModelProto` of opset 21, whose inputs are the arrays among the arguments in order, named
      by their places, and whose outputs are the arrays of the result. Keys of random numbers are
      their data, `jax.random.key_data`.

    Raises:
      ImportError: onnx is not installed.
      NotImplementedError: an operation of `f`, or a spec of the plan, has no form in ONNX.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> from jqx.interop import to_onnx
      >>> f = lambda w, x: x @ w
      >>> model = to_onnx(f, jnp.eye(4))(jnp.ones((2, 4)))
      >>> [node.op_type for node in model.graph.node]
      ['MatMul', 'Identity']
    """
    onnx_module()
    if products not in ("uint8", "int8", "qdq_uint8", "qdq_int8"):
        problem = f"`products` is unknown: {products!r}."
        fix = "pass 'uint8', 'int8', 'qdq_uint8' or 'qdq_int8'."
        raise fail("interop.to_onnx", problem, fix=fix)
    if scans not in ("unroll", "loop"):
        problem = f"`scans` is unknown: {scans!r}."
        raise fail("interop.to_onnx", problem, fix="pass 'unroll' or 'loop'.")
    traced = with_parameters("interop.to_onnx", f, params, plan, affines)
    return lambda *args, **kwargs: _model(*traced(*args, **kwargs), products, scans)


def with_parameters(
    function: str,
    f: Callable[..., Any],
    params: Any,
    plan: Plan | None,
    affines: Mapping[str, Affine] | None,
) -> Callable[..., tuple[Call, Plan, Mapping[str, Affine]]]:
    """Checks the arguments of `to_onnx` and its like. Returns a function of the other arguments,
    which traces `f` and returns the call, and the plan and the scales that fit it.
    """
    if plan is not None:
        check_instance(function, "plan", plan, Plan, fix="pass the result of jqx.make_plan.")
    source: Any = f
    if isinstance(f, Quantized):
        if params is not None or plan is not None or affines is not None:
            problem = "a quantized function has its own parameters, plan and scales."
            fix = f"pass {function.split('.')[-1]}(quantized)(x)."
            raise fail(function, problem, fix=fix, error=TypeError)
        source, params, plan, affines = f.source, f.params, f.plan, f.affines
        positions: Any = plan.params
    else:
        check_function(function, f)
        positions = 0 if plan is None else plan.params

    def traced(*args: Any, **kwargs: Any) -> tuple[Call, Plan, Mapping[str, Affine]]:
        given = plan or _EMPTY
        weights = positions if plan is None else plan.parameters
        call = trace_call(function, source, weights, arguments_of(given, params, args), kwargs)
        if plan is None:
            return call, given, {}
        fitted = as_plan(function, plan, call, positions)
        return call, fitted, fitted.scales_of(function, affines)

    return traced


def _model(call: Call, plan: Plan, affines: Mapping[str, Affine], products: str, scans: str) -> Any:
    """Returns the model of a traced call."""
    onnx = onnx_module()
    helper = onnx.helper
    graph = Graph(products=products)
    leaves = quantized_leaves(call, call.leaves, OnIntegers(plan, affines, call=call))
    emit = _Emit(graph, plan, Scales.of(call, affines), scans)
    values, inputs = [], []
    for leaf, path, keys, var in zip(leaves, call.paths, call.keys, call.jaxpr.invars, strict=True):
        if path is not None or is_of_params(keys, plan):
            values.append(_constant(leaf, var.aval))
            continue
        name = input_name(keys, plan)
        if isinstance(leaf, QTensor):
            check_state(name, leaf)
        arrays = parts_of(leaf) if isinstance(leaf, QTensor) else {"": compat.data_of_key(var.aval)}
        parts = []
        for place, x in arrays.items():
            parts.append(Value(name + place, tuple(x.shape), np.dtype(x.dtype)))
            inputs.append(_info(helper, name + place, x))
            for axis, n in enumerate(x.shape):
                if jax_export.is_symbolic_dim(n) and str(n).isidentifier():
                    graph.sizes.setdefault(str(n), (name + place, axis))
        values.append(with_parts(leaf, parts) if isinstance(leaf, QTensor) else parts[0])
    consts = [_constant(x, v.aval) for x, v in zip(call.consts, call.jaxpr.constvars, strict=True)]
    results = walk(emit, call.jaxpr, values, consts=consts)
    outputs = []
    avals = [atom.aval for atom in call.jaxpr.outvars]
    for (name, x), (_, aval) in zip(named(call, results), named(call, avals), strict=True):
        parts = parts_of(x) if is_state(x) else {"": real(graph, x)}
        for place, part in parts.items():
            graph.add("Identity", part)
            graph.nodes[-1].output[0] = name + place
            outputs.append(_info(helper, name + place, part if is_state(x) else aval))
    if products == "qdq_uint8":
        fuse(graph)
    beside(graph)
    shared(graph)
    constants = [tensor(name, array) for name, array in graph.constants.items()]
    main = helper.make_graph(graph.nodes, "jqx", inputs, outputs, constants)
    opsets = [helper.make_opsetid(name, 1 if name else OPSET) for name in sorted(graph.domains)]
    model = helper.make_model(
        main, opset_imports=opsets, ir_version=IR_VERSION, producer_name="jqx"
    )
    helper.set_model_props(model, {SITES: json.dumps(graph.sites)})
    return model


def named(call: Call, results: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Yields the results of a call with the names of their outputs, and arrays and numbers that the
    function returns but does not compute; what is no array is no output.
    """
    rest, computed = iter(results), object()
    tree = jax.tree.unflatten(call.out_tree, [computed] * call.out_tree.num_leaves)
    for keys, x in jax.tree.leaves_with_path(tree):
        if x is computed:
            yield f"output{keystr(keys)}", next(rest)
        elif isinstance(x, bool | int | float | np.generic | np.ndarray | jax.Array):
            yield f"output{keystr(keys)}", as_array(jnp.asarray(x))


def output_names(call: Call) -> list[str]:
    """Returns the names of the results that a call computes."""
    pairs = named(call, call.jaxpr.outvars)
    return [name for name, x in pairs if not isinstance(x, np.ndarray)]


def is_of_params(keys: Sequence[Any], plan: Plan) -> bool:
    """Whether a leaf belongs to the parameters, also if the plan knows nothing of it."""
    kind, place, *_ = keys
    return kind.idx == 0 and place.idx in positions_of(plan.params)


def _constant(leaf: Any, aval: Any) -> Any:
    """Returns an array that a function reads, in the dtype in which it reads it."""
    is_shape = isinstance(leaf, jax.ShapeDtypeStruct)
    if is_shape or not all(map(compat.is_concrete, jax.tree.leaves(leaf))):
        problem = "`params`, or what the function closes over, has no values for a file."
        given = f"{'a shape' if is_shape else 'an array that is traced'}, {aval}"
        fix = "pass arrays, outside of jax.jit; only other arguments may be shapes."
        raise fail("interop.to_onnx", problem, given=given, fix=fix, error=TypeError)
    x = as_array(leaf)
    dtype = compat.data_of_key(aval).dtype
    return x.astype(dtype) if isinstance(x, np.ndarray) and x.dtype != dtype else x


def input_name(keys: Sequence[Any], plan: Plan) -> str:
    """Returns the name of an input: its place among the arguments without the parameters."""
    kind, place, *inside = keys
    positions = positions_of(plan.params)
    if kind.idx == 0:
        place = SequenceKey(place.idx - sum(position < place.idx for position in positions))
    return "input" + keystr((place, *inside))
