"""What a checker must report; an ignore without use is an error, so each line here is reported."""

import jax
import jax.numpy as jnp

import jqx


def f(params: dict[str, jax.Array], x: jax.Array, *, train: bool = False) -> jax.Array:
    return x @ params["w"]


def wrong_calls(plan: jqx.Plan, params: dict[str, jax.Array], x: jax.Array) -> None:
    converted = jqx.convert(f, plan)
    converted(params)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    converted(params, x, trian=True)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    converted(x, x)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    converted(params, x).nope()  # type: ignore[attr-defined]  # pyright: ignore
    jqx.simulate(f, plan)(x)  # type: ignore[call-arg, arg-type]  # pyright: ignore
    jqx.calibrate(f, plan)(x, x)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    jqx.make_plan(f, jqx.presets.w8a8())(params)  # type: ignore[call-arg]  # pyright: ignore
    jqx.compare(f, plan)(params, "x")  # type: ignore[arg-type]  # pyright: ignore
    jqx.convert(f, plan, "dynamik")  # type: ignore[arg-type]  # pyright: ignore
    jqx.convert(f, params)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    jqx.make_plan(f, "int8")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def wrong_results(plan: jqx.Plan, params: dict[str, jax.Array], x: jax.Array) -> None:
    text: str = jqx.convert(f, plan)(params, x)  # type: ignore[assignment]  # pyright: ignore
    text = jqx.quantize_params(params, plan)  # type: ignore[assignment]  # pyright: ignore
    text, _ = jqx.calibrate(f, plan)(params, x)  # type: ignore[assignment]  # pyright: ignore
    print(text)


def wrong_batch(params: dict[str, jax.Array], x: jax.Array) -> None:
    quantized = jqx.ptq(f, jqx.presets.w8a8())(params, [x])
    quantized(x, x)  # type: ignore[call-arg, arg-type]  # pyright: ignore[reportCallIssue]
    quantized(x, trian=True)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    text: str = quantized(x)  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
    print(text)


def wrong_operands(q: jqx.QTensor, x: jax.Array) -> None:
    x + q  # type: ignore[operator]  # pyright: ignore
    q @ "x"  # type: ignore[operator]  # pyright: ignore
    jnp.sum(q)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    q.dequantise()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    product: jqx.QTensor = x @ q  # type: ignore[assignment]  # pyright: ignore
    cache: jax.Array = jqx.dynamic_slice(q, (0,), (1,))  # type: ignore[assignment]  # pyright: ignore
    print(product, cache)


def wrong_names(x: jax.Array) -> None:
    jqx.quantise(x)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    jqx.presets.w8a9()  # type: ignore[attr-defined]  # pyright: ignore
    jqx.presets.w8a8(wieght="int8")  # type: ignore[call-arg]  # pyright: ignore
    jqx.Rule(".*", weigth="int8")  # type: ignore[call-arg]  # pyright: ignore
    jqx.ptq(f, jqx.presets.w8a8(), effort="days")  # type: ignore[call-overload]  # pyright: ignore
