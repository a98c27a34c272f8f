"""SciPy, imported at first use, which keeps `import jqx` fast."""

import functools
import importlib
from typing import Any

import numpy as np


@functools.cache
def linalg() -> Any:
    """Returns the module of factorizations and solvers."""
    return importlib.import_module("scipy.linalg")


def components(count: int, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns the number of the connected component of each of `count` vertices, in the graph with
    edges between `a[i]` and `b[i]`.
    """
    sparse = importlib.import_module("scipy.sparse")
    graphs = importlib.import_module("scipy.sparse.csgraph")
    edges = sparse.coo_matrix((np.ones(len(a), bool), (a, b)), (count, count))
    return graphs.connected_components(edges, directed=False)[1]
