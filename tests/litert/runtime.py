"""Runs models in LiteRT, in its reference kernels unless a test asks for XNNPACK."""

import collections
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("litert_converter")
interpreter = pytest.importorskip("ai_edge_litert.interpreter")

PRODUCTS = ("FULLY_CONNECTED", "CONV_2D", "DEPTHWISE_CONV_2D", "BATCH_MATMUL", "TRANSPOSE_CONV")


class Run(NamedTuple):
    """What a model computes.

    Attributes:
      outputs: the results.
      products: for each product in order the dtypes of its operands and results, and its result.
      operations: how many operations of each kind there are.
    """

    outputs: list[np.ndarray]
    products: list[tuple[set[str], np.ndarray]]
    operations: collections.Counter[str]


def run(file: bytes, *args: Any, optimized: bool = False) -> Run:
    """Runs the model of a file."""
    kernels = interpreter.OpResolverType
    found = interpreter.Interpreter(
        model_content=file,
        experimental_op_resolver_type=kernels.AUTO
        if optimized
        else kernels.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
        experimental_preserve_all_tensors=not optimized,
    )
    found.allocate_tensors()
    signature = found.get_signature_list()["serving_default"]
    assert sorted(signature["inputs"]) == sorted(f"input[{i}]" for i in range(len(args)))
    assert all(name.startswith("output") for name in signature["outputs"])
    for i, x in enumerate(args):
        found.set_tensor(found.get_input_details()[i]["index"], np.asarray(x))
    found.invoke()
    tensors = {x["index"]: x for x in found.get_tensor_details()}
    operations = [x for x in found._get_ops_details() if x["op_name"] != "DELEGATE"]
    products = []
    for x in operations if not optimized else []:
        if x["op_name"] in PRODUCTS:
            data = x["inputs"][-1:] if x["op_name"] == "TRANSPOSE_CONV" else x["inputs"][:1]
            kinds = {
                tensors[i]["dtype"].__name__ for i in (*data, *x["inputs"][1:2], *x["outputs"])
            }
            products.append((kinds, found.get_tensor(x["outputs"][0])))
    outputs = [found.get_tensor(x["index"]) for x in found.get_output_details()]
    return Run(outputs, products, collections.Counter(x["op_name"] for x in operations))
