"""What GPTQ computes from a Hessian: an order of columns, and the triangular factor of its inverse,
in float64 on the host.
"""

from typing import Literal, NamedTuple

import numpy as np

from ._scipy import linalg

Array = np.ndarray
Order = Literal["given", "activation", "groups"]


_LEAST, _MOST = 1e-6, 1e6
"""Limits of the damping by Ledoit and Wolf."""


class Factor(NamedTuple):
    """The inverse of a damped Hessian.

    Attributes:
      upper: upper triangular; `upper.T @ upper` is the inverse.
      damping: what was added to the diagonal, relative to its mean.
    """

    upper: Array
    damping: float


def damped(hessian: Array, damping: float) -> Array:
    """Returns a Hessian plus a multiple of the mean of its diagonal. The diagonal entries of dead
    channels, which no input reached, are 1.
    """
    found = np.array(hessian)
    np.fill_diagonal(found, _damped(np.diagonal(hessian), damping))
    return found


def _damped(diagonal: Array, damping: float) -> Array:
    dead = diagonal <= 0
    mean = diagonal[~dead].mean() if not dead.all() else 1.0
    return np.where(dead, 1, diagonal + damping * mean)


def shrunk(hessian: Array, rows: float, fourth: float) -> float:
    """Returns the damping of least expected error for a Hessian of so many independent inputs
    (Ledoit and Wolf, "A well-conditioned estimator for large-dimensional covariance matrices",
    Journal of Multivariate Analysis 88, 2004).

    Their estimate is a mean of `S`, the mean of `x x'`, and of a multiple of the identity, with
    weights by how far `S` is expected to be from what infinitely many inputs give, and by how far
    it is from that multiple. It is 1e-6 at least, and 1e6 at most.

    Args:
      hessian: sum of `x x'` over the inputs.
      rows: number of inputs.
      fourth: sum of `|x|^4`.
    """
    diagonal = np.diagonal(hessian) / rows
    live = diagonal > 0
    squares = float(np.vdot(hessian, hessian)) / rows**2
    from_identity = squares - live.sum() * diagonal[live].mean() ** 2 if live.any() else 0.0
    from_truth = (fourth / rows - squares) / rows
    if from_identity <= from_truth:  # also of one input, or of none
        return _MOST
    return float(np.clip(from_truth / (from_identity - from_truth), _LEAST, _MOST))


def factor(
    hessian: Array, damping: float, most: float = 1.0, order: Array | None = None
) -> Factor | None:
    """Returns the factor of the inverse of a Hessian with the least damping that makes it positive
    definite: `damping`, then ten times as much each time, up to `most`, or once if it is larger.
    `None` if that is not enough. `order` is the order of channels in the factor; `None` keeps it.
    """
    order = np.arange(len(hessian)) if order is None else order
    back = order[::-1]
    most = max(most, damping)
    while damping <= most:
        # Each array replaces the one before, so that only one exists besides the Hessian.
        found = hessian.T[np.ix_(back, back)].T
        np.fill_diagonal(found, _damped(np.diagonal(hessian)[order], damping)[::-1])
        try:
            found = linalg().cholesky(found, lower=True, overwrite_a=True, check_finite=True)
        except (linalg().LinAlgError, ValueError):
            damping *= 10
            continue
        # Reversed, the Hessian is L L.T. So it is R R.T with R = L[::-1, ::-1], upper triangular.
        (invert,) = linalg().get_lapack_funcs(("trtri",), (found,))
        inverse, _ = invert(found, lower=True, overwrite_c=True)
        return Factor(inverse[::-1, ::-1], damping)
    return None


def order_of(hessian: Array, group: Array, order: Order) -> Array:
    """Returns the order in which columns are rounded.

    `activation`: columns of the largest inputs first; each stays in its group. `groups`: the same
    inside each group, and groups ordered by their largest input, with a smaller group last, so that
    each group stays together (group-aware reordering).
    """
    count = len(group)
    if order == "given":
        return np.arange(count)
    weight = np.nan_to_num(np.diagonal(hessian))
    if order == "activation":
        return np.argsort(-weight, kind="stable")
    size = np.bincount(group)
    largest = np.full(len(size), -np.inf)
    np.maximum.at(largest, group, weight)
    last = size < size.max()
    rank = np.empty(len(size), int)
    rank[np.lexsort((-largest, last))] = np.arange(len(size))
    return np.lexsort((-weight, rank[group]))


def carried_over(upper: Array, cross: Array, strength: float) -> Array:
    """Returns what GPTAQ adds to the columns after a rounded one. `cross` is the sum of
    `(float - quantized) quantized.T` of inputs.
    """
    return strength * np.triu(cross @ upper.T, 1) @ upper


def corrected(w: Array, hessian: Array, cross: Array, strength: float, damping: float) -> Array:
    """Returns a matrix [rows, columns] corrected for quantized inputs (Arai and Ichikawa,
    "Quantization Error Propagation", arXiv:2504.09629).
    """
    solved = linalg().solve(damped(hessian, damping), cross.T, assume_a="pos").T
    return w + strength * w @ solved


def objective(difference: Array, hessian: Array) -> Array:
    """Returns `d @ hessian @ d` for each row `d`: its squared error over the inputs."""
    return np.einsum("nk,nk->n", difference @ hessian, difference)
