"""One array of a stack of QTensors, for kernels that read its codes from the stack.

A compiler cannot fuse a slice into a kernel: the slice that a step of a loop takes from a stack is
copied before the kernel reads it. So the kernel gets the whole stack and the index of the slice.
Everything else uses the slice itself.
"""

from typing import Any, ClassVar

import jax
from jax import lax

from ._pytree import flatten, rebuilt
from ._qtensor import QTensor


class OneOf(QTensor):
    """A QTensor that is a slice of a stack. Its views are plain QTensors without the stack, unless
    they leave the codes in place.

    Attributes:
      all_values: the values of the whole stack, with one more leading axis; `None` without a stack.
      step: the index of this slice, int32, shape ().
    """

    all_values: ClassVar[Any] = None
    step: ClassVar[Any] = None

    @classmethod
    def of(cls, stack: QTensor, step: jax.Array) -> "OneOf":
        """Returns one slice of a stack. Every leaf of the stack must have its leading axis."""
        q = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, step, keepdims=False), stack)
        return _one_of(stack.values, step, *flatten(q))

    def transpose(self, *axes: Any) -> QTensor:
        return self._with_stack(super().transpose(*axes))

    @property
    def stored(self) -> QTensor:
        return self._with_stack(super().stored)

    def _with_stack(self, q: QTensor) -> QTensor:
        same = q.values is self.values
        return _one_of(self.all_values, self.step, *flatten(q)) if same else alone(q)


def alone(x: Any) -> Any:
    """Returns a QTensor without its stack; anything else unchanged."""
    if not isinstance(x, OneOf):
        return x
    leaves, static = flatten(x)
    return rebuilt(QTensor, static, leaves)


def found(q: QTensor) -> tuple[jax.Array, jax.Array | None]:
    """Returns the codes of a QTensor and `None`, or those of its stack and the index into it."""
    if isinstance(q, OneOf) and q.all_values is not None:
        return q.all_values, q.step
    return q.values, None


def _one_of(all_values: Any, step: Any, leaves: Any, static: Any) -> OneOf:
    q = rebuilt(OneOf, static, leaves)
    object.__setattr__(q, "all_values", all_values)
    object.__setattr__(q, "step", step)
    return q


def _flatten(q: OneOf) -> tuple[tuple, tuple]:
    leaves, static = flatten(q)
    return (q.all_values, q.step, leaves), static


def _unflatten(static: Any, children: Any) -> OneOf:
    all_values, step, leaves = children
    return _one_of(all_values, step, leaves, static)


jax.tree_util.register_pytree_node(OneOf, _flatten, _unflatten)
