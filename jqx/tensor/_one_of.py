"""One array of a stack of QTensors, for kernels that find its codes in the stack.

A compiler cannot look into a kernel: what a step of a loop takes from a stack is copied before the
kernel reads it. So the kernel is given the whole stack, and which one to take. All else reads the
array, a slice, as any.
"""

from typing import Any, ClassVar

import jax
from jax import lax

from ._pytree import flatten, rebuilt
from ._qtensor import QTensor


class OneOf(QTensor):
    """A QTensor that is one of a stack. What is computed of it has no stack any more, but where its
    codes lie as they did.

    Attributes:
      all_values: those of all, with one axis more, in front; `None` where there is no stack.
      step: which one it is, int32, shape ().
    """

    all_values: ClassVar[Any] = None
    step: ClassVar[Any] = None

    @classmethod
    def of(cls, stack: QTensor, step: jax.Array) -> "OneOf":
        """Returns one of a stack of which every leaf has the first axis."""
        q = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, step, keepdims=False), stack)
        return _one_of(stack.values, step, *flatten(q))

    def transpose(self, *axes: Any) -> QTensor:
        return self._as_it_lies(super().transpose(*axes))

    @property
    def stored(self) -> QTensor:
        return self._as_it_lies(super().stored)

    def _as_it_lies(self, q: QTensor) -> QTensor:
        same = q.values is self.values
        return _one_of(self.all_values, self.step, *flatten(q)) if same else alone(q)


def alone(x: Any) -> Any:
    """Returns a QTensor without a stack; all else as it is."""
    if not isinstance(x, OneOf):
        return x
    leaves, static = flatten(x)
    return rebuilt(QTensor, static, leaves)


def found(q: QTensor) -> tuple[jax.Array, jax.Array | None]:
    """Returns the codes of a QTensor and `None`, or those of its stack and which of it to take."""
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
