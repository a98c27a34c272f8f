"""`sensitivity`: the cost of quantizing each weight and site, measured or estimated."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._errors import fail
from .._table import Table, Tabular
from ..policy import Policy
from ..transforms import Plan
from ..transforms._shared import advancing, check_function, params_of
from ._metric import Metric, relative_error
from ._sweep import Sweep, plan_of_batches

ESTIMATES = ("one_at_a_time", "all_but_one", "weight_error", "hessian", "fisher")


@dataclasses.dataclass(frozen=True)
class Sensitivity:
    """The cost of quantizing one weight, or one site without a weight.

    Attributes:
      path: path of the weight, or of all weights that one site joins; or the scope of a site.
      op: its first operation.
      cost: cost in units of the metric; larger is worse.
      scheme: how its operands were quantized, such as `float x int4 per_group(32)`.
      label: what tables call it; if empty, its path. Sites with neither weight nor scope are
        quantized together: `(4 unnamed)`.
    """

    path: str
    op: str
    cost: float
    scheme: str = ""
    label: str = ""

    @property
    def name(self) -> str:
        """What tables call it."""
        return self.label or self.path or "(argument)"


@dataclasses.dataclass(frozen=True)
class Sensitivities(Tabular):
    """The result of `sensitivity`, the worst first. Prints as a table.

    Attributes:
      ranked: from the largest cost to the smallest.
      estimate: the estimate that was used.
      everything: the metric with everything quantized; `None` if it was not measured.
    """

    ranked: tuple[Sensitivity, ...]
    estimate: str
    everything: float | None

    def __getitem__(self, path: str) -> float:
        """Returns the cost of a path."""
        return {row.path: row.cost for row in self.ranked}[path]

    def table(self) -> Table:
        """Returns the rows as text."""
        whole = sum(row.cost for row in self.ranked if row.cost > 0) or 1.0
        rows = [
            (
                row.name,
                row.op,
                f"{row.cost:.4g}",
                f"{100 * row.cost / whole:.1f} %",
            )
            for row in self.ranked
        ]
        footer = f"estimate: {self.estimate}"
        if self.everything is not None:
            footer += f"; all quantized: {self.everything:.4g}"
        return Table(("path", "op", "cost", "share"), tuple(rows), footer, texts=2)

    def to_dict(self) -> dict[str, Any]:
        """Returns the rows as a dict for `json.dumps`."""
        return dataclasses.asdict(self)


def sensitivity(
    f: Callable[..., Any],
    plan: Plan | Policy,
    metric: Metric = relative_error,
    *,
    estimate: str = "one_at_a_time",
    samples: int = 8,
    key: jax.Array | None = None,
    progress: bool = True,
) -> Callable[..., Sensitivities]:
    """Returns a function that ranks weights and sites by the cost of their quantization.

    Args:
      f: the function that the plan was made for.
      plan: a `Plan`, or a `Policy` to plan the call with (its parameters are argument 0 then).
      metric: `metric(result, float_result) -> scalar`, larger is worse, averaged over the batches.
        The default is `relative_error`: the energy of the difference divided by that of the float
        result, for each channel (the last axis), averaged. If `f` returns a loss, use
        `lambda loss, _: loss`.
      estimate: `"one_at_a_time"`: the metric with only this one quantized. `"all_but_one"`: the
        decrease of the metric if all others are quantized and this one is not. The other three are
        cheap, and for weights only. `"weight_error"`: the energy of the error divided by that of
        the weight. `"hessian"`: the mean of the diagonal of the Hessian of the metric, by
        Hutchinson's method, times the energy of the error (HAWQ-V2, arXiv:1911.03852). `"fisher"`:
        the sum of the squared error times the squared gradient of the metric.
      samples: samples of the Hutchinson estimate, per batch.
      key: random key of the Hutchinson estimate; `None` is `jax.random.key(0)`.
      progress: whether to show a progress bar, as in `jqx.calibrate_batches`.

    Returns:
      `ranked(params, *batches) -> Sensitivities`; each batch is a tuple of the other arguments of
      `f`, or a single argument. Static scales are calibrated on the batches. One program is
      compiled; it runs for each unit and batch.

    Raises:
      TypeError: if `f` is not a function or `plan` is not a plan.
      ValueError: if the plan was made for another function, `estimate` is unknown, there is no
        batch, a parameter is quantized already, or `metric` has no gradient at the float weights.

    Example:
      >>> import jqx, jax, jax.numpy as jnp
      >>> f = lambda p, x: jnp.tanh(x @ p["a"]) @ p["b"]
      >>> w = jax.random.normal(jax.random.key(0), (16, 16))
      >>> p = {"a": w, "b": w.at[0, 0].set(1e3)}  # an outlier
      >>> policy = jqx.presets.w8a16(weight={"granularity": jqx.per_tensor()})
      >>> [row.path for row in jqx.diagnostics.sensitivity(f, policy)(p, w).ranked]
      ['b', 'a']
    """
    check_function("diagnostics.sensitivity", f)
    params_of("diagnostics.sensitivity", plan)
    if estimate not in ESTIMATES:
        raise fail(
            "diagnostics.sensitivity",
            "`estimate` is unknown.",
            given=f"estimate == {estimate!r}",
            expected=f"one of {', '.join(map(repr, ESTIMATES))}",
            fix="use the default 'one_at_a_time', which measures.",
        )

    def ranked(params: Any, *batches: Any) -> Sensitivities:
        known = plan if isinstance(plan, Plan) else plan_of_batches(f, plan, params, batches)
        sweep = Sweep("diagnostics.sensitivity", f, [known], metric, params, batches, progress)
        everything = None
        measured = estimate in ("one_at_a_time", "all_but_one")
        count = len(sweep.units) + 1 if measured else _steps(estimate, samples, batches)
        with advancing("sensitivity", "step", count, progress) as sweep.advance:
            if measured:
                everything = sweep(dict.fromkeys(sweep.units, 1))
            if estimate == "one_at_a_time":
                costs = {unit: sweep({unit: 1}) for unit in sweep.units}
            elif estimate == "all_but_one":
                assert everything is not None
                costs = {
                    unit: everything - sweep({u: 1 for u in sweep.units if u != unit})
                    for unit in sweep.units
                }
            else:
                costs = _of_weights(sweep, estimate, samples, key)
        rows = [
            Sensitivity(unit, sweep.ops[unit], cost, sweep.schemes[unit], sweep.labels[unit])
            for unit, cost in costs.items()
        ]
        return Sensitivities(tuple(sorted(rows, key=lambda row: -row.cost)), estimate, everything)

    return ranked


def _steps(estimate: str, samples: int, batches: Sequence[Any]) -> int:
    """Returns the number of steps of an estimate from the weights."""
    return len(batches) * {"hessian": samples, "fisher": 1}.get(estimate, 0)


def _of_weights(
    sweep: Sweep, estimate: str, samples: int, key: jax.Array | None
) -> dict[str, float]:
    """Returns estimates from the weights and their error."""
    errors = {
        path: jnp.asarray(q.dequantize() - sweep.weights[path], jnp.float32)
        for path, (q,) in sweep.codes.items()
        if q is not None
    }
    if estimate == "weight_error":
        sizes = {path: jnp.square(sweep.weights[path].astype(jnp.float32)).sum() for path in errors}
        of_path = {
            path: jnp.sum(e * e) / jnp.where(sizes[path] == 0, 1, sizes[path])
            for path, e in errors.items()
        }
    else:
        loss = sweep.loss_of_weights()
        weights = {path: sweep.weights[path] for path in errors}
        if estimate == "fisher":
            gradient = jax.jit(jax.grad(loss))
            # From one program: results of two programs would differ by rounding.
            own = gradient(weights, sweep.pairs()[0][0], None)
            if not any(bool((g != 0).any()) for g in own.values()):
                raise fail(
                    "diagnostics.sensitivity",
                    "the metric has no gradient at the float weights.",
                    given="a gradient of 0, such as that of a distance from the float result "
                    "itself",
                    expected="a loss, such as one with labels",
                    fix="let f return its loss, with metric=lambda loss, _: loss; or use "
                    "'hessian'.",
                )
            found = [*_advanced(sweep, (gradient(weights, *pair) for pair in sweep.pairs()))]
            of_path = {
                path: sum(jnp.sum((tree[path] * e) ** 2) for tree in found) / len(found)
                for path, e in errors.items()
            }
        else:
            traces = _hutchinson(sweep, loss, weights, samples, key)
            of_path = {
                path: traces[path] / max(e.size, 1) * jnp.sum(e * e) for path, e in errors.items()
            }
    costs = dict.fromkeys((sweep.unit_of(path) for path in of_path), 0.0)
    for path, cost in of_path.items():
        costs[sweep.unit_of(path)] += float(cost)
    return costs


def _hutchinson(
    sweep: Sweep, loss: Any, weights: dict[str, Any], samples: int, key: jax.Array | None
) -> dict[str, jax.Array]:
    """Returns the trace of the diagonal block of the Hessian of each weight: the mean of `v . H v`
    over random signs `v`.
    """

    @jax.jit
    def sample(key: jax.Array, batch: Any, plain: Any) -> dict[str, jax.Array]:
        keys = jax.random.split(key, len(weights))
        signs = {
            path: jax.random.rademacher(k, w.shape, w.dtype)
            for k, (path, w) in zip(keys, weights.items(), strict=True)
        }
        _, moved = jax.jvp(lambda w: jax.grad(loss)(w, batch, plain), (weights,), (signs,))
        return {path: jnp.sum(v * moved[path]) for path, v in signs.items()}

    key = jax.random.key(0) if key is None else key
    found = (
        sample(k, batch, plain)
        for i, (batch, plain) in enumerate(sweep.pairs())
        for k in jax.random.split(jax.random.fold_in(key, i), samples)
    )
    found = [*_advanced(sweep, found)]
    return {path: jnp.mean(jnp.stack([tree[path] for tree in found])) for path in weights}


def _advanced(sweep: Sweep, found: Iterable[Any]) -> Iterator[Any]:
    """Yields results as soon as they are computed, and advances the progress bar."""
    for each in found:
        yield jax.block_until_ready(each)
        sweep.advance()
