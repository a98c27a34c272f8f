"""Quantized models of Keras 3, as functions of QTensors and back: `from_keras` and `to_keras`.

A quantized layer has by mode, with K inputs and N outputs (a table of N vectors has K = their size)

    int8   kernel int8 [K, N] and kernel_scale [N]; codes are divided by scales
    int4   kernel int8 [K, N / 2]: two codes in a byte, the low one first; with kernel_scale [N] as
           in int8, or in blocks of K: less kernel_zero int8 [G, N], times kernel_scale [G, N]
    gptq   kernel uint8 [N, K], in 4 bits [N / 2, K]; less kernel_zero uint8 [N, G], times
           kernel_scale [N, G]

and for blocks g_idx float32 [K], which rounded down is the group of each input. In int4 and gptq a
kernel of `EinsumDense` has its axes merged to K and N, in the order in memory.

Source: https://github.com/keras-team/keras (3.15), `src/layers/core` and `src/quantizers`.
"""

import contextlib
import importlib
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

import jax.numpy as jnp
import numpy as np

from ... import Plan, QSpec, QTensor
from ...extend import Groups
from ...numerics import Integer, format_of
from ..checks import called, check_instance, shown
from ..errors import fail, some
from ..ptq.quantized import Quantized, SavedModel
from ..statistics.granularity import PerAxis
from .codec import codes_of, for_rows, integers_of

_FROM, _TO = "interop.from_keras", "interop.to_keras"

_OLDEST = (3, 15)
"""The first version of Keras with these layouts that jqx was tested with."""


@called(_FROM, "pass a built keras.Model.")
def from_keras(model: Any) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Returns the function of a Keras model and its variables, with the codes that Keras has made.

    The function calls the layers in float, so jqx plans, quantizes and converts it like any other.
    `jqx.convert(f, jqx.Policy([]))` runs it on the codes. In mode `gptq`, and in `int4` with
    blocks, `dequantize` gives the numbers that Keras multiplies by. In `int8`, and in `int4`
    without blocks, Keras divides codes by scales. jqx has the reciprocals, so that numbers differ
    in the last bits of float32. A layer with an activation quantizer, which `int8` has by default,
    also rounds its inputs in Keras: convert with `jqx.presets.w8a8_dynamic()` to do the same.

    Args:
      model: a built `keras.Model` of the JAX backend, with or without layers in the modes `int8`,
        `int4` and `gptq`. It is not changed.

    Returns:
      `f` and `params`. `f(params, *inputs)` is the model in inference; it takes the keyword
      arguments of the model. `params` has all weights by path; if layers have the same, the second
      is `path#1`. Quantized kernels and tables are QTensors, packed along the last axis if they
      have less than 8 bits.

    Raises:
      ImportError: Keras 3.15 or newer is not installed.
      TypeError: `model` is no `keras.Model`.
      ValueError: it is not built, has another backend, or has a layer that cannot be read: in
        another mode (`awq`, `float8`), with LoRA on codes, or one that Keras cannot build again
        from its config, as it does in loading.

    Example:
      >>> import jax, jqx
      >>> model.quantize("int4")  # doctest: +SKIP
      >>> f, params = jqx.interop.from_keras(model)  # doctest: +SKIP
      >>> y = jax.jit(jqx.convert(f, jqx.Policy([])))(params, x)  # doctest: +SKIP
    """
    keras = _keras(_FROM, model)
    codes = [_read(keras, layer) for layer in model._flatten_layers()]
    is_float = not any(map(_mode, model._flatten_layers()))
    twin = model if is_float else _in_float(keras, _FROM, model)
    params: dict[str, Any] = {}
    names: dict[int, str] = {}
    for tensors, layer in zip(codes, _layers(model, twin), strict=True):
        for path, source, v in zip(layer.paths, layer.sources, layer.variables, strict=True):
            names[id(v)] = path
            params[path] = tensors.get(v.name, source.value)
            if v.name in tensors:  # frees the random numbers, which no call reads
                v._value = np.broadcast_to(np.zeros((), v.dtype), v.shape)
        if not is_float and not _mode(layer.source):
            _fill(layer.own, layer.variables, [v.value for v in layer.sources])

    def f(params: Mapping[str, Any], *inputs: Any, **options: Any) -> Any:
        parts = (twin.trainable_variables, twin.non_trainable_variables)
        known = {key: params[name] for key, name in names.items()}  # all but seeds
        values = ([known.get(id(v), v) for v in part] for part in parts)
        return twin.stateless_call(*values, *inputs, **options)[0]

    return f, params


@called(_TO, "pass a built keras.Model, and what jqx.ptq returns for its function.")
def to_keras(model: Any, quantized: Any) -> Any:
    """Returns a new Keras model with the codes of jqx, which Keras runs, saves and loads.

    Codes of 4 bits or fewer are written in mode `int4`: with one scale for each channel, or in
    blocks of inputs, with zero points and `g_idx`. Codes of 5 to 8 bits are written in mode `int8`,
    with one scale for each channel. `from_keras` reads the same codes, zero points and scales from
    the result. Scales by which Keras divides are stored as reciprocals; those few that are the
    reciprocal of no float32 return with another last bit. Nothing is written in mode `gptq`, of
    which Keras 3.15 does not save the zero points.

    Args:
      model: the model whose function was quantized, as for `from_keras`. It is not changed.
      quantized: what `jqx.ptq` or `jqx.load` returns for the function of `from_keras`; or only its
        parameters, and then Keras quantizes no activations. In a plan, activations may be dynamic
        int8 with one scale for each token, where weights have one for each channel.

    Returns:
      A `keras.Model` that is not compiled. It is made as loading makes it, so the paths of weights
      in nested models may be shorter.

    Raises:
      ImportError: Keras 3.15 or newer is not installed.
      TypeError: `model` is no `keras.Model`, or `quantized` has no dict of parameters.
      ValueError: the parameters are not those of the model, or a layer of Keras cannot hold them:
        static activations, formats that are no integers, 8 bits in groups or with zero points,
        convolutions, arrays that the dtype of a variable rounds. The message names the layer.

    Example:
      >>> f, params = jqx.interop.from_keras(model)  # doctest: +SKIP
      >>> quantized = jqx.ptq(f, jqx.presets.w4a16())(params, batches)  # doctest: +SKIP
      >>> jqx.interop.to_keras(model, quantized).save("model.keras")  # doctest: +SKIP
    """
    keras = _keras(_TO, model)
    is_result = isinstance(quantized, (Quantized, SavedModel))
    params = quantized.params if is_result else quantized
    fix = "pass what jqx.ptq returns for the function of from_keras, or its parameters."
    check_instance(_TO, "quantized", params, Mapping, fix=fix)
    if is_result and quantized.maps:
        fix = "use an algorithm that changes only weights, such as jqx.algorithms.gptq()."
        _refuse(some(quantized.maps), "channel maps at sites", "weights alone", fix)
    dynamic = _dynamic(quantized.plan) if is_result else {}
    twin = _in_float(keras, _TO, model)
    layers = _layers(model, twin)
    paths = {path for layer in layers for path in layer.paths}
    if paths != {*params}:
        problem = "`quantized` has other parameters than the model."
        given = f"without {some(sorted(paths - {*params}))}, with {some(sorted({*params} - paths))}"
        fix = "pass a model and what jqx made of its parameters, as from_keras returns them."
        raise fail(_TO, problem, given=given, fix=fix)
    written = [_written(keras, layer, params, dynamic) for layer in layers]
    _announce(keras, twin)
    result = _rebuilt(keras, _TO, twin, lambda config: config)
    for layer, new, codes in zip(layers, result._flatten_layers(), written, strict=True):
        if _how(new) != _how(layer.own):
            given, expected = ("{}, inputs {}".format(*_how(x)) for x in (layer.own, new))
            expected = f"{expected}, as Keras loads this layer inside of another"
            fix = "quantize it like that (jqx.presets.w8a8_dynamic()), or leave it in float."
            _refuse(layer.source.path, given, expected, fix)
        values = [params[path] for path in layer.paths]
        if codes:
            new._dtype_policy = layer.own.dtype_policy  # Keras saves no codes with a map
            for name, value in codes.items():
                _assign(getattr(new, name), value)
            by_name = {v.name: v for v in _own(new)}
            for v, value in zip(layer.variables, values, strict=True):
                if not isinstance(value, QTensor):
                    _assign(by_name[v.name], value)
        else:
            _fill(new, _own(new), values)
    return result


# Models of Keras: their layers, and copies of them.


class _Layer(NamedTuple):
    """A layer, and the same layer in float.

    Attributes:
      source: the layer of the user's model.
      own: the layer in float.
      paths: the names of its weights: those of Keras, numbered if layers have the same.
      sources: the variables of `source` that `own` has too; codes in place of floats.
      variables: those of `own`.
    """

    source: Any
    own: Any
    paths: list[str]
    sources: list[Any]
    variables: list[Any]


def _layers(model: Any, twin: Any) -> list[_Layer]:
    """Returns the layers of a model, and of its twin in float."""
    layers, names, counts = [], {}, Counter()
    for source, own in zip(model._flatten_layers(), twin._flatten_layers(), strict=True):
        sources, variables = _own(source), _own(own)
        if _mode(source):  # the first of a name: GPTQ before calibration has the float kernel too
            by_name = {v.name: v for v in reversed(sources)}
            sources = [by_name[v.name] for v in variables]
        for v in sources:
            if id(v) not in names:
                count = counts[v.path]
                names[id(v)] = f"{v.path}#{count}" if count else v.path
                counts[v.path] += 1
        paths = [names[id(v)] for v in sources]
        layers.append(_Layer(source, own, paths, sources, variables))
    return layers


def _own(layer: Any) -> list[Any]:
    """Returns the weights of a layer itself."""
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def _mode(layer: Any) -> str | None:
    """Returns the mode in which Keras has quantized a layer."""
    return layer.quantization_mode if getattr(layer, "_is_quantized", False) else None


def _how(layer: Any) -> tuple[str | None, str]:
    """Returns the mode of a layer, and the format of its inputs."""
    return _mode(layer), "int8" if getattr(layer, "inputs_quantizer", None) else "float"


def _announce(keras: Any, model: Any) -> None:
    """Makes layers whose configs lack those of the layers inside of them, such as
    `MultiHeadAttention`, say how these are quantized, in a map of dtype policies.
    """
    policies = keras.dtype_policies
    for outer in model._flatten_layers():
        inner = [x for x in outer._flatten_layers(include_self=False) if _mode(x)]
        if inner and isinstance(outer, keras.layers.TimeDistributed):  # calls Dense.call on codes
            given, fix = "codes in a layer of TimeDistributed", "use the layer without it."
            _refuse(inner[0].path, given, "a layer that is called as it is quantized", fix)
        if inner and not isinstance(outer, keras.Sequential) and not hasattr(outer, "operations"):
            policy, known = outer.dtype_policy, {}
            if isinstance(policy, policies.DTypePolicyMap):
                known, policy = {path: policy[path] for path in policy}, policy.default_policy
            known |= {x.path: x.dtype_policy for x in inner}
            outer._dtype_policy = policies.DTypePolicyMap(policy.name, known)


def _keras(function: str, model: Any) -> Any:
    """Returns the package, after checking it and the model."""
    try:
        keras = importlib.import_module("keras")
    except ImportError as error:
        fix = "pip install 'keras>=3.15'"
        raise fail(function, "Keras is not installed.", fix=fix, error=ImportError) from error
    if tuple(map(int, keras.__version__.split(".")[:2])) < _OLDEST:
        problem, fix = "this version of Keras has other layouts.", "pip install 'keras>=3.15'"
        raise fail(function, problem, given=keras.__version__, fix=fix, error=ImportError)
    check_instance(function, "model", model, keras.Model, fix="pass a keras.Model.")
    if keras.backend.backend() != "jax":
        problem, fix = "Keras does not use JAX.", "set KERAS_BACKEND=jax before it is imported."
        raise fail(function, problem, given=keras.backend.backend(), fix=fix)
    if not model.built:
        problem, fix = f"the model {model.name!r} is not built.", "call it once, or model.build."
        raise fail(function, problem, fix=fix)
    for layer in model._flatten_layers():
        if _mode(layer) and getattr(layer, "lora_enabled", False):
            problem = f"the quantized layer {layer.path!r} has LoRA."
            fix = "quantize after LoRA: train the float model, and save and load it to merge."
            raise fail(function, problem, given=type(layer).__name__, fix=fix)
    return keras


def _in_float(keras: Any, function: str, model: Any) -> Any:
    """Returns a new model with the layers of another one, none of them quantized."""
    layers = [x for x in model._flatten_layers() if getattr(x, "quantization_config", None)]
    configs = [layer.quantization_config for layer in layers]
    try:
        for layer in layers:  # that of GPTQ holds layers, and is then no JSON
            layer.quantization_config = None
        return _rebuilt(keras, function, model, _in_float_dtypes)
    finally:
        for layer, config in zip(layers, configs, strict=True):
            layer.quantization_config = config


def _rebuilt(keras: Any, function: str, model: Any, change: Callable[[Any], Any]) -> Any:
    """Returns a new model of the changed config of a model, as loading makes it."""
    classes = {type(layer).__name__: type(layer) for layer in model._flatten_layers()}
    saving, given = keras.saving, "it is not built then"
    try:
        config = change(saving.serialize_keras_object(model))
        config.pop("compile_config", None)
        new = saving.deserialize_keras_object(config, custom_objects=classes, safe_mode=False)
        for old, layer in zip(model._flatten_layers(), new._flatten_layers(), strict=True):
            for a, b in zip(old._seed_generators, layer._seed_generators, strict=True):
                b.state.assign(a.state.value)
        if new.built:
            return new
    except Exception as error:  # of any layer of the user
        given = shown(f"{type(error).__name__}: {error}")
    problem = f"Keras cannot build the model {model.name!r} from its config, as it does in loading."
    fix = "give its classes get_config, and build for their variables."
    raise fail(function, problem, given=given, fix=fix)


def _in_float_dtypes(config: Any) -> Any:
    """Returns the config of a model with the dtype policies from which it was quantized."""
    if isinstance(config, (list, tuple)):
        return [*map(_in_float_dtypes, config)]
    if not isinstance(config, dict):
        return config
    inner = config.get("config")
    if isinstance(inner, dict) and "source_name" in inner:
        policy = {"name": inner["source_name"]}
        return {"module": "keras", "class_name": "DTypePolicy", "config": policy}
    return {key: _in_float_dtypes(x) for key, x in config.items()}


def _assign(v: Any, value: Any) -> None:
    """Assigns an array to a variable, after checking that the variable can hold it."""
    array, dtype = np.asarray(value), jnp.dtype(v.dtype)
    fits = array.shape == tuple(v.shape)
    if not fits or not np.array_equal(
        array.astype(dtype).astype(array.dtype), array, equal_nan=True
    ):
        problem = f"the variable {v.path!r} of Keras cannot hold its array."
        given = f"{array.dtype.name}{list(array.shape)} for {dtype.name}{list(v.shape)}"
        fix = "pass float arrays of its dtype; scales need a dtype policy with float32 variables."
        raise fail(_TO, problem, given=given, fix=fix)
    v.assign(array)


def _fill(layer: Any, variables: list[Any], values: list[Any]) -> None:
    """Assigns the variables of a layer in float. Loading them lets the layer compute what it keeps
    beside variables, as `Normalization` does.
    """
    for v, value in zip(variables, values, strict=True):
        _assign(v, value)
    if variables:
        store: dict[str, Any] = {}
        layer.save_own_variables(store)
        layer.load_own_variables(store)


# Weights of Keras as matrices [N, K] with groups of K, as GPTQ has them.


_STORED = {"kernel": "_kernel", "embeddings": "_embeddings"}
"""The attribute with the codes of a weight, where it is not its name."""


def _weights(keras: Any, layer: Any) -> tuple[str, ...]:
    """Returns the names of the weights that a layer of Keras holds as codes."""
    if isinstance(layer, (keras.layers.Dense, keras.layers.EinsumDense)):
        return ("kernel",)
    if not isinstance(layer, keras.layers.Embedding):
        return ()
    is_tied = getattr(layer, "tie_weights", True)
    return ("embeddings",) if is_tied else ("embeddings", "reverse_embeddings")


def _read(keras: Any, layer: Any) -> dict[str, QTensor]:
    """Returns the QTensors of a layer by the names of its weights; none if it is in float."""
    mode, names = _mode(layer), _weights(keras, layer)
    if mode is None or (mode == "gptq" and not layer.is_gptq_calibrated):
        return {}
    if not names or mode not in ("int8", "int4", "gptq"):
        problem = f"the layer {layer.path!r} is quantized in a mode that jqx does not read: {mode}."
        expected, fix = "int8, int4 or gptq", "quantize the float model with jqx instead."
        raise fail(_FROM, problem, given=type(layer).__name__, expected=expected, fix=fix)
    return {name: _tensor(keras, layer, mode, name) for name in names}


def _tensor(keras: Any, layer: Any, mode: str, name: str) -> QTensor:
    """Returns the QTensor of a weight."""
    scale = np.asarray(getattr(layer, f"{name}_scale").value).astype(np.float32)
    unpack, bits, zero = keras.quantizers.unpack_int4, 8 if mode == "int8" else 4, None
    is_table, is_einsum = name == "embeddings", isinstance(layer, keras.layers.EinsumDense)
    if mode == "gptq":
        policy = layer.dtype_policy
        is_map = isinstance(policy, keras.dtype_policies.DTypePolicyMap)
        bits = (policy[layer.path] if is_map else policy).weight_bits
        codes, half = layer.quantized_kernel.value, 2 ** (bits - 1)
        codes = unpack(codes, len(scale), axis=0, dtype="uint8") if bits == 4 else codes
        codes, zero = (
            np.asarray(x).astype(np.int16) - half for x in (codes, layer.kernel_zero.value)
        )
    else:
        codes = getattr(layer, _STORED.get(name, name)).value
        if mode == "int4":
            count = scale.shape[-1] if name == "kernel" else layer.output_dim
            codes = unpack(codes, count, axis=0 if name == "reverse_embeddings" else -1)
        codes = np.asarray(codes)
        if mode == "int8" and is_einsum:
            scale = jnp.asarray(1 / np.asarray(layer._adjust_scale_for_dequant(scale)))
            return QTensor(jnp.asarray(codes), scale, qtype="int8", dtype=layer.variable_dtype)
        codes = codes if is_table else codes.T
        if scale.ndim == 1:
            scale = 1 / scale[:, None]
        else:
            zero = np.asarray(getattr(layer, f"{name}_zero").value).astype(np.int16)
            scale, zero = (x if is_table else x.T for x in (scale, zero))
    index = layer.g_idx.value if scale.shape[1] > 1 else np.zeros(codes.shape[1])
    q = _matrix(layer, codes, scale, zero, np.asarray(index).astype(np.int32), bits)
    q = q if is_table else q.T
    if is_einsum:
        shape = tuple(layer.original_kernel_shape)
        try:
            q = q.reshape(shape)
        except ValueError:
            problem = f"the groups of {layer.path!r} are no blocks of the axes of its kernel."
            fix = "in Keras use another group_size or block_size, and activation_order=False."
            raise fail(_FROM, problem, given=f"{layer.equation}, {shape}", fix=fix) from None
    return q.pack() if format_of(q.qtype).bits < 8 else q


def _matrix(
    layer: Any, codes: np.ndarray, scale: np.ndarray, zero: Any, index: np.ndarray, bits: int
) -> QTensor:
    """Returns the QTensor of signed codes [N, K], with the group of each column."""
    qtype, half = f"int{bits}", 2 ** (bits - 1)
    if zero is not None and not zero.any():
        zero = None
    elif zero is not None and (zero.min() < -half or zero.max() >= half):  # all of a group below 0
        qtype, codes, zero = "uint8", codes + half, zero + half
    order = np.argsort(index, kind="stable").astype(np.int32)
    size = int(np.bincount(index).max())
    groups = Groups(codes.shape, (1, size))
    is_regular = np.array_equal(index[order], np.arange(len(index)) // size)
    if not is_regular or groups.scale_shape != scale.shape:
        problem = f"the groups of {layer.path!r} do not have equal sizes."
        fix = "quantize the layer again: its g_idx is damaged."
        raise fail(_FROM, problem, given=f"up to {size} inputs in a group", fix=fix)
    storage = format_of(qtype).storage
    return QTensor(
        jnp.asarray(codes[:, order].astype(storage)),
        jnp.asarray(scale),
        None if zero is None else jnp.asarray(zero.astype(storage)),
        order=None if np.array_equal(order, np.arange(len(order))) else jnp.asarray(order[None]),
        qtype=qtype,
        dtype=layer.variable_dtype,
        blocks=groups.blocks,
    )


# The codes of jqx in layers of Keras.


def _refuse(path: str, given: str, expected: str, fix: str) -> NoReturn:
    """Raises an error: Keras cannot hold something."""
    raise fail(_TO, f"Keras cannot hold {path!r}.", given=given, expected=expected, fix=fix)


def _dynamic(plan: Plan) -> dict[str, bool]:
    """Returns whether the inputs of each weight are quantized, by path."""
    found: dict[str, bool] = {}
    for site in plan.sites:
        pairs = list(zip(site.operands, site.shapes, strict=False))
        summed = (sum(len(shape) for _, shape in pairs) - len(site.result)) // 2
        inputs = [(o.spec, len(shape) - summed) for o, shape in pairs if not o.path and o.spec]
        for spec, kept in inputs:
            axes = spec.granularity.axes if isinstance(spec.granularity, PerAxis) else ()
            fits = spec == QSpec("int8", spec.granularity, dynamic=True) and len(axes) == kept
            if not fits or len(inputs) > 1 or site.output is not None:
                fix = "leave activations in float, or use jqx.presets.w8a8_dynamic()."
                _refuse(site.label, str(spec), "inputs in int8 per token, dynamic", fix)
        if site.op == "dot_general" and found.setdefault(site.path, bool(inputs)) != bool(inputs):
            fix = "give all its sites the same rule."
            _refuse(site.path, "inputs in int8 and in float", "one of both", fix)
    return found


def _written(
    keras: Any, layer: _Layer, params: Mapping[str, Any], dynamic: Mapping[str, bool]
) -> dict[str, np.ndarray]:
    """Quantizes a layer in float in Keras's way, and returns the arrays to put there, by the
    attributes with the variables; none for a layer that stays in float.
    """
    pairs = zip(layer.paths, layer.variables, strict=True)
    tensors = {v.name: (path, params[path]) for path, v in pairs}
    tensors = {name: x for name, x in tensors.items() if isinstance(x[1], QTensor)}
    if not tensors:
        return {}
    own, names = layer.own, _weights(keras, layer.own)
    path, q = next(iter(tensors.values()))
    if {*tensors} != {*names}:
        expected = f"codes of {' and '.join(names)}, or none" if names else "no codes"
        fix = f"keep it in float: a rule {path!r}: 'float', or params[{path!r}].dequantize()."
        _refuse(path, f"{q!r} in a layer {type(own).__name__}", expected, fix)
    arrays: dict[str, np.ndarray] = {}
    blocks = {_add(keras, own, name, *pair, arrays) for name, pair in tensors.items()}
    inputs = any(dynamic.get(path, False) for path, _ in tensors.values())
    block = next(iter(blocks))
    if len(blocks) > 1 or (inputs and block):
        given = f"{q!r}{', with inputs in int8' if inputs else ''}"
        expected = "one format for both tables" if len(blocks) > 1 else "one scale for each channel"
        _refuse(path, given, expected, "quantize it like that, or leave its inputs in float.")
    quantizer = keras.quantizers.AbsMaxQuantizer() if inputs else None
    if block is None:
        config = keras.quantizers.Int8QuantizationConfig(None, quantizer)
    else:
        config = keras.quantizers.Int4QuantizationConfig(None, quantizer, block or None)
    if isinstance(own.dtype_policy, keras.dtype_policies.DTypePolicyMap):
        own._dtype_policy = own.dtype_policy[own.path]
    try:
        own.quantize(config.mode, config=config)
    except (NotImplementedError, ValueError) as error:  # of a subclass, or for float16
        fix = "leave it in float."
        _refuse(path, shown(str(error)), f"a layer that Keras quantizes in {config.mode}", fix)
    return arrays


def _add(
    keras: Any, own: Any, name: str, path: str, q: QTensor, arrays: dict[str, np.ndarray]
) -> int | None:
    """Adds the arrays of a weight. Returns the size of its blocks in mode `int4`, 0 for one scale
    for each channel; `None` for mode `int8`.
    """
    form, fix = format_of(q.qtype), "quantize it like that, or leave it in float."
    expected = "integers of 4 bits or fewer, or of 8 with a scale for each channel and no zeros"
    if not isinstance(form, Integer) or form.bits > 8 or q.offset is not None:
        _refuse(path, repr(q), expected, fix)
    is_einsum, is_table = isinstance(own, keras.layers.EinsumDense), name == "embeddings"
    if is_einsum:
        own._set_quantization_info()
    reduced = own._kernel_reduced_axes if is_einsum else [int(is_table)]
    has_zero = not form.signed or (q.zero_point is not None and np.asarray(q.zero_point).any())
    is_shared = all(q.scale.shape[axis] == 1 for axis in reduced) and q.order is None
    stored = _STORED.get(name, name)
    if form.bits > 4 and is_shared and not has_zero:
        sizes = [1 if axis in reduced else n for axis, n in enumerate(q.shape)]
        scale = _reciprocal(path, np.broadcast_to(np.asarray(q.real_scale()), sizes))
        scale = own._adjust_scale_for_quant(scale) if is_einsum else scale.reshape(-1)
        arrays |= {stored: codes_of(q), f"{name}_scale": np.asarray(scale)}
        return None
    q, rows, matrix = q.unpack(), math.prod(q.shape[axis] for axis in reduced), None
    with contextlib.suppress(ValueError):
        matrix = q if is_table else q.reshape(rows, q.size // rows).T
    if matrix is None or matrix.groups.sizes[1] == 1 < rows:
        blocks = f"blocks of inputs of a matrix [{rows}, {q.size // rows}] in the same order"
        _refuse(path, repr(q), blocks, fix)
    *integers, index = integers_of(path, matrix, "Keras")
    codes, zeros = (x.astype(np.int16) for x in integers)
    zero = 2 ** (form.bits - 1) if form.bits <= 4 else 8 + codes.min()  # few codes of a wide format
    codes, zeros = codes - zero, zeros - zero
    if codes.max() > 7 or zeros.max() > 127 or zeros.min() < -128:
        _refuse(path, repr(q), expected, fix)
    codes, zeros = codes.astype(np.int8), zeros.astype(np.int8)
    scale, size = for_rows(np.asarray(matrix.real_scale()), matrix), matrix.groups.sizes[1]
    if scale.shape[1] == 1 and not zeros.any():
        size, scale = 0, _reciprocal(path, scale[:, 0])
    codes, scale, zeros = (x if is_table else x.T for x in (codes, scale, zeros))
    axis = 0 if name == "reverse_embeddings" else -1
    arrays[stored] = np.asarray(keras.quantizers.pack_int4(codes, axis=axis)[0])
    arrays[f"{name}_scale"] = scale
    arrays |= {f"{name}_zero": zeros, "g_idx": index} if size else {}
    return size


def _reciprocal(path: str, scale: np.ndarray) -> np.ndarray:
    """Returns float32 numbers whose reciprocals are the scales, where there are such."""
    scale = scale.astype(np.float32)
    with np.errstate(divide="ignore", over="ignore"):
        best = 1 / scale
        for other in (np.nextafter(best, np.float32(0)), np.nextafter(best, np.float32(np.inf))):
            best = np.where((1 / best != scale) & (1 / other == scale), other, best)
    if not np.isfinite(best).all():
        fix = "quantize again: these weights are close to zero."
        _refuse(path, f"a scale of {scale.min()}", "scales with a reciprocal in float32", fix)
    return best
