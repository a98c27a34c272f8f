"""Two layers with an activation between them, as modules of Flax."""

import itertools
from collections.abc import Callable, Sequence

import jax
from flax import linen, nnx


class LinenLayers(linen.Module):
    """Layers `a` and `b`, with as many results as `widths` say."""

    widths: Sequence[int]
    activation: Callable[[jax.Array], jax.Array] = jax.nn.relu
    use_bias: bool = True

    @linen.compact
    def __call__(self, x):
        """Evaluates both."""
        a, b = (
            linen.Dense(width, use_bias=self.use_bias, name=name)
            for name, width in zip("ab", self.widths, strict=True)
        )
        return b(self.activation(a(x)))


class NnxLayers(nnx.Module):
    """The same, of which `widths` also say how many inputs the first has."""

    def __init__(self, widths, activation=jax.nn.relu, use_bias=True):
        rngs = nnx.Rngs(0)
        self.a, self.b = (
            nnx.Linear(*pair, use_bias=use_bias, rngs=rngs) for pair in itertools.pairwise(widths)
        )
        self.activation = activation

    def __call__(self, x):
        """Evaluates both."""
        return self.b(self.activation(self.a(x)))
