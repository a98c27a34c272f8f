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
from ..transforms.walk import Body, Domain, Where, bodies, contractions_in, walk, while_starts
from . import bits as bits  # adds its rules
from .contractions import (
    CONTRACTIONS,
    Codes,
    Later,
    is_integer,
    is_turned,
    quantized,
    real,
    table_rows,
)
from .functions import FUNCTIONS, HELD, function_of
from .graph import (
    IR_VERSION,
    OPSET,
    Graph,
    Value,
    as_array,
    beside,
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

_LARGE = 1 << 14
"""Bytes from which a broadcast constant is stored once, and spread by the graph."""


@dataclasses.dataclass(frozen=True)
class Scales:
    """Scales of the sites of a call whose scans are unrolled.

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
    products: str

    unrolls = True

    def literal(self, atom: Any) -> Any:
        return np.asarray(atom.val, atom.aval.dtype)

    def constant(self, array: Any) -> Any:
        return as_array(array)

    def enters(self, eqn: Eqn, values: list[Any], where: Where) -> bool:
        # The function of a `shard_map` is that of one device, for a part of the arrays.
        apart = eqn.primitive.name in ("cond", "shard_map", "while")
        return not apart and form_of(eqn, values) is None

    def part(self, value: Any, step: int) -> Any:
        if is_state(value):
            return self._traced(lambda q: q[step], [value])
        if not isinstance(value, Value):
            return value[step]
        part = self.graph.slice(value, 0, step, step + 1)
        shape = value.shape[1:]
        return Value(self.graph.reshape(part, shape), shape, value.dtype)

    def stack(self, values: list[Any], aval: Any) -> Any:
        if values and all(map(is_state, values)):
            return self._traced(lambda *qs: jax.tree.map(lambda *xs: jnp.stack(xs), *qs), values)
        if all(isinstance(x, np.ndarray) for x in values):
            return np.stack(values) if values else np.zeros(aval.shape, aval.dtype)
        sizes = 1, *compat.data_of_key(aval).shape[1:]
        rows = [self.graph.reshape(real(self.graph, x), sizes) for x in values]
        return self._value(self.graph.add("Concat", *rows, axis=0), aval)

    def start(self, eqn: Eqn, values: list[Any], where: Where) -> list[Any]:
        return values

    def evaluate(self, eqn: Eqn, values: list[Any], where: Where) -> Sequence[Any]:
        name, site = eqn.primitive.name, None
        if where.is_marked:
            site = self.plan.site_at(where.address)
        if name not in CONTRACTIONS and any(map(is_state, values)):
            return self._of_state(eqn, values)
        if name == "cond":
            return self._branches(eqn, values, where)
        if name == "while":
            return self._loop(eqn, values, where)
        is_known = not any(isinstance(x, Value) or is_state(x) for x in values)
        if name in HELD:
            body, consts = compat.open_jaxpr(eqn.params[HELD[name]])
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
            rounded = quantized(g, value, site.output, affine, as_codes=False)
            assert isinstance(rounded, str)
            value = value._replace(name=rounded)
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
        is_byte = format_of(spec.qtype).name in ("int8", "uint8")
        as_codes = (
            is_byte
            and any(map(is_integer, values))
            and (affine is None or self.products != "float")
        )
        if (
            is_turned(eqn, index)
            and not as_codes
            and affine is not None
            and np.size(affine[0]) == 1
        ):
            return Later(x, spec, affine)
        rounded = quantized(self.graph, x, spec, affine, as_codes=as_codes)
        return rounded if isinstance(rounded, Codes) else x._replace(name=rounded)

    # Control flow.

    def _inside(self, body: Any, values: list[Any], graph: Graph, where: Where) -> list[Any]:
        """Writes a function into a graph of its own, and returns its results."""
        return walk(dataclasses.replace(self, graph=graph), body, values, where)

    def _outputs(self, graph: Graph, results: list[Any], atoms: Sequence[Any]) -> list[Any]:
        """Returns the declared outputs of a graph inside another."""
        helper, infos = onnx_module().helper, []
        for x, atom in zip(results, atoms, strict=True):
            name = graph.add("Identity", real(graph, x))
            infos.append(_info(helper, name, atom.aval))
        return infos

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
        helper, g = onnx_module().helper, self.graph
        condition, body = bodies(eqn)
        consts, start = while_starts(eqn)
        for_condition, for_body, state = values[:consts], values[consts:start], values[start:]

        def asked(graph: Graph, state: list[Any]) -> Any:
            inside = _at(where, condition)
            return self._inside(condition.jaxpr, [*for_condition, *state], graph, inside)[0]

        goes_on, inner, atoms = asked(g, state), Graph(g), eqn.outvars
        carried = [self._value(inner.new_name("carried"), v.aval) for v in atoms]
        results = self._inside(body.jaxpr, [*for_body, *carried], inner, _at(where, body))
        if goes_on.shape:  # each loop of a batch for itself: one that has ended keeps its state
            on = asked(inner, carried)
            results = list(map(functools.partial(self._while_on, inner, on), results, carried))
        again = _any(inner, asked(inner, results))
        boolean = np.dtype(np.bool_)
        step, before = inner.new_name("step"), inner.new_name("goes_on")
        inputs = [
            helper.make_tensor_value_info(step, onnx_type(np.int64), []),
            helper.make_tensor_value_info(before, onnx_type(boolean), []),
            *(_info(helper, x.name, v.aval) for x, v in zip(carried, atoms, strict=True)),
        ]
        again_name = inner.add("Identity", again)
        outputs = [
            helper.make_tensor_value_info(again_name, onnx_type(boolean), []),
            *self._outputs(inner, results, atoms),
        ]
        graph = helper.make_graph(inner.nodes, g.new_name("body"), inputs, outputs)
        first = [g.name(real(g, x)) for x in state]
        names = g.add_many("Loop", len(atoms), "", _any(g, goes_on), *first, body=graph)
        return [self._value(n, v.aval) for n, v in zip(names, atoms, strict=True)]

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


def _is_open(aval: Any) -> bool:
    return any(map(jax_export.is_symbolic_dim, aval.shape))


def _nbytes(aval: Any) -> int:
    return int(np.prod(aval.shape, dtype=np.int64)) * np.dtype(aval.dtype).itemsize


def _info(helper: Any, name: str, aval: Any) -> Any:
    """Returns the declaration of an input or output; open sizes are names."""
    aval = compat.data_of_key(aval)
    sizes = [str(n) if jax_export.is_symbolic_dim(n) else int(n) for n in aval.shape]
    return helper.make_tensor_value_info(name, onnx_type(aval.dtype), sizes)


@called("interop.to_onnx", "call it in two steps: to_onnx(quantized)(x), or to_onnx(f, params)(x).")
def to_onnx(
    f: Callable[..., Any],
    params: Any = None,
    *,
    plan: Plan | None = None,
    affines: Mapping[str, Affine] | None = None,
    products: Literal["uint8", "int8", "float"] = "uint8",
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
        float32, and that is exact up to 2**24. As `"float"`, with static scales, products of
        dequantized operands (QDQ), which runtimes such as TensorRT fuse; on x86 processors without
        VNNI, onnxruntime and OpenVINO then add pairs of products in 16 bits, and saturate.

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
    if products not in ("uint8", "int8", "float"):
        problem = f"`products` is unknown: {products!r}."
        raise fail("interop.to_onnx", problem, fix="pass 'uint8', 'int8' or 'float'.")
    traced = with_parameters("interop.to_onnx", f, params, plan, affines)
    return lambda *args, **kwargs: _model(*traced(*args, **kwargs), products)


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


def _model(call: Call, plan: Plan, affines: Mapping[str, Affine], products: str) -> Any:
    """Returns the model of a traced call."""
    onnx = onnx_module()
    helper = onnx.helper
    graph = Graph(multiplied=np.int8 if products == "int8" else np.uint8)
    leaves = quantized_leaves(call, call.leaves, OnIntegers(plan, affines, call=call))
    emit = _Emit(graph, plan, Scales.of(call, affines), products)
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
