"""Parameters in bfloat16 without a copy in float32: sums that are rounded stochastically.

A bfloat16 has 8 significant bits, so rounding to nearest drops an update of less than 1/512 of its
weight, step after step. Rounded up with the probability of what is dropped, the sum is right in the
mean.

Source: Gupta et al., "Deep Learning with Limited Numerical Precision", arXiv:1502.02551, for
rounding; Zamirai et al., "Revisiting BFloat16 Training", arXiv:2010.06192, for weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from ...extend import step_of
from ...gradients import stochastic_round
from ..checks import called, shown_as
from ..errors import fail
from .states import as_transformation, optax_module

if TYPE_CHECKING:
    import optax


class StochasticState(NamedTuple):
    """The state of `stochastic_bf16`.

    Attributes:
      key: the key of the next update, as `jax.random.key_data` returns it, so that files hold it.
      inner_state: the state of the wrapped transformation, for parameters in float32.
    """

    key: jax.Array
    inner_state: Any


@called("optim.stochastic_bf16", "pass for example optax.adamw(1e-3), and key=0.")
def stochastic_bf16(
    tx: optax.GradientTransformation, key: int | jax.Array = 0
) -> optax.GradientTransformationExtraArgs:
    """Returns a transformation for parameters in bfloat16, without a float32 copy of them.

    `tx` sees gradients and parameters in float32, so its state is in float32 (or quantized, see
    `quantized`). Each bfloat16 parameter plus its update is added up in float32, and the sum is
    rounded to one of its two neighbours in bfloat16, so that it is right in the mean. The result is
    returned as a float32 update: `optax.apply_updates`, or `jqx.optim.apply_updates` under strict
    promotion of dtypes, gives exactly the rounded sum. So nothing may change the update after this
    transformation: it is the last of a chain, with `optax.apply_if_finite` inside of it.

    Parameters of other dtypes are updated as `tx` does.

    Args:
      tx: any transformation.
      key: a seed, or a key of `jax.random.key`. The state holds the key of the next update, and
        each parameter has its own: the same key gives the same bits.

    Raises:
      ImportError: optax is not installed.
      TypeError: `tx` is no transformation, or `key` neither a key nor an integer.
      ValueError: `update` is called without parameters.

    NaN and infinities: unchanged.
    Rounding: where a sum is less than `2**-15` of the parameter, its neighbours are farther apart
      than those of bfloat16, so that the difference is a float32. It is right in the mean there
      too.

    Example:
      >>> import jax.numpy as jnp, jqx.optim, optax
      >>> tx = jqx.optim.stochastic_bf16(optax.sgd(1.0), key=0)
      >>> params, grads = jnp.ones(10_000, jnp.bfloat16), jnp.full(10_000, -1e-3, jnp.bfloat16)
      >>> updates, state = tx.update(grads, tx.init(params), params)
      >>> new = optax.apply_updates(params, updates)
      >>> print(new.dtype, f"{new.astype('float32').mean():.4f}")
      bfloat16 1.0010
    """
    name = "optim.stochastic_bf16"
    inner = as_transformation(name, tx)
    is_seed = isinstance(key, int) and not isinstance(key, bool)
    if not is_seed and not jnp.issubdtype(getattr(key, "dtype", bool), jax.dtypes.prng_key):
        problem = "`key` is neither a seed nor a key."
        fix = "pass an integer, or jax.random.key(0)."
        raise fail(name, problem, given=shown_as("key", key), fix=fix, error=TypeError)

    def first_key() -> Any:
        return jax.random.key(key) if is_seed else key

    def init(params: Any) -> StochasticState:
        data = jnp.copy(jax.random.key_data(first_key()))  # the state may be donated
        return StochasticState(data, inner.init(_widened(params)))

    def update(
        updates: Any, state: StochasticState, params: Any = None, **extra: Any
    ) -> tuple[Any, StochasticState]:
        if params is None:
            problem = "`params` is missing: updates are rounded together with the parameters."
            raise fail(name, problem, fix="pass them: tx.update(grads, state, params).")
        wide = _widened(updates), state.inner_state, _widened(params)
        new_updates, inner_state = inner.update(*wide, **extra)
        impl = jax.random.key_impl(first_key())
        next_key, used = jax.random.split(jax.random.wrap_key_data(state.key, impl=impl))
        leaves, structure = jax.tree.flatten(params)
        rounded = [
            _rounded_update(p, u, jax.random.fold_in(used, n)) if p.dtype == jnp.bfloat16 else u
            for n, (p, u) in enumerate(
                zip(leaves, structure.flatten_up_to(new_updates), strict=True)
            )
        ]
        next_state = StochasticState(jax.random.key_data(next_key), inner_state)
        return structure.unflatten(rounded), next_state

    return optax_module(name).GradientTransformationExtraArgs(init, update)


def _widened(tree: Any) -> Any:
    """Returns a tree with float32 in place of bfloat16."""
    return jax.tree.map(
        lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x,
        tree,
    )


def _rounded_update(param: jax.Array, update: jax.Array, key: jax.Array) -> jax.Array:
    """Returns the difference of a parameter and its rounded sum with an update, float32.

    The steps of the grid are those of bfloat16 at the sum, but at least `2**-22` of the exponent of
    the parameter. The difference is then a multiple of both steps with at most 24 bits if the sum
    is not much larger than the parameter, and exact. If it is, the difference is rounded far below
    the bits of a bfloat16.
    """
    old = param.astype(jnp.float32)
    total = old + update.astype(jnp.float32)
    # Exponents are limited from below so that steps are normal floats.
    step, inverse = step_of(total, 7, -119, 127)
    least_step, largest_inverse = step_of(old, 22, -104, 127)
    step, inverse = jnp.maximum(step, least_step), jnp.minimum(inverse, largest_inverse)
    return stochastic_round(total * inverse, key) * step - old


@called("optim.apply_updates", "pass params and updates, as to optax.apply_updates.")
def apply_updates(params: Any, updates: Any) -> Any:
    """Adds updates to parameters, as `optax.apply_updates` does, but 16-bit ones in float32 under
    any promotion of dtypes.

    Args:
      params: a tree of arrays; `None` stays.
      updates: a tree of the same structure.

    Returns:
      The new parameters, with the dtypes of the old ones.

    Example:
      >>> import jax.numpy as jnp, jqx.optim
      >>> jqx.optim.apply_updates(jnp.ones(2, jnp.bfloat16), jnp.array([0.5, 1.0]))
      Array([1.5, 2], dtype=bfloat16)
    """

    def added(param: Any, update: Any) -> Any:
        if param is None:
            return None
        param = jnp.asarray(param)
        wide = jnp.float32 if param.dtype.itemsize == 2 else param.dtype
        return (param.astype(wide) + jnp.asarray(update).astype(wide)).astype(param.dtype)

    return jax.tree.map(added, params, updates, is_leaf=lambda x: x is None)
