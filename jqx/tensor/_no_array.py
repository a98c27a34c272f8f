"""What a QTensor does not do, because codes are no numbers to calculate with: each is an error that
says what to write.
"""

import difflib
from typing import TYPE_CHECKING, Any, ClassVar

import jax

from .._checks import check_instance
from .._errors import fail
from ._fields import refuse_as_array

_INSTEAD = {
    "at": "write with jqx.dynamic_update_slice(q, update, starts), or change q.dequantize().",
    "dot": "write q @ x, or jqx.dot_general(q, x, dimension_numbers).",
    "flatten": "write q.reshape(-1).",
    "ravel": "write q.reshape(-1).",
    "mT": "write q.transpose(...) with the last two axes swapped; q.T reverses all.",
    "swapaxes": "write q.transpose(...) with the order of the axes.",
    "squeeze": "write q.reshape(...), or q[0].",
    "numpy": "write numpy.asarray(q.dequantize()), or numpy.asarray(q.values) for the codes.",
    "float": "write q.dequantize().",
    "dequant": "write q.dequantize().",
    "data": "the codes are q.values; the real array is q.dequantize().",
    "qvalue": "the codes are q.values; the real array is q.dequantize().",
    "int_repr": "the codes are q.values.",
    "q_scale": "it is called q.scale.",
    "q_zero_point": "it is called q.zero_point.",
}
"""What to write in place of attributes of arrays in JAX, PyTorch and other libraries."""

_AFFINE = "write affine=jqx.calibrators.Affine(scale, zero_point)."
_SPEC = 'write jqx.QTensor.quantize(x, "int8"), or jqx.QSpec("int8", jqx.per_axis(0)).'
QUANTIZE_INSTEAD = {
    **dict.fromkeys(("scale", "scales", "zero_point", "zero_points"), _AFFINE),
    **dict.fromkeys(("bits", "num_bits", "qtype", "dtype", "axis", "axes", "channel_axis"), _SPEC),
}
"""What to write in place of arguments that `QTensor.quantize` does not have."""

_SCALE = "write q.scaled(factor) to change the scale, or calculate with q.dequantize()."
_FLOAT = "calculate with q.dequantize(), or write q @ x for a product."
_OPERATORS = {
    "multiplication": ("mul truediv", _SCALE),
    "addition": ("add sub", _FLOAT),
    "arithmetic": ("floordiv mod pow divmod", _FLOAT),
    "sign": ("neg pos abs", _SCALE),
    "bits": ("and or xor lshift rshift invert", "use q.values for the bits of codes."),
    "order": ("lt le gt ge", "compare q.dequantize()."),
}
_ALONE = ("lt", "le", "gt", "ge", "neg", "pos", "abs", "invert")
"""Operators without a reflected form."""


def check_affine(affine: Any) -> None:
    """Checks the argument `affine` of `QTensor.quantize`."""
    if affine is not None:
        check_instance("QTensor.quantize", "affine", affine, tuple, fix=_AFFINE)


class Named(type):
    """The class of QTensor. The errors of `jax.numpy` for an argument that is no array show its
    `repr`, so it says what to write.
    """

    def __repr__(cls) -> str:
        if cls.__module__.partition(".")[0] != "jqx":
            return super().__repr__()
        return (
            f"<class 'jqx.{cls.__name__}'> (write x @ q, jqx.matmul, jqx.einsum, jqx.dot_general "
            "or jqx.take, or pass q.dequantize())"
        )


class NoArray(metaclass=Named):
    """The base of QTensor that refuses what only arrays can do."""

    __array_ufunc__: ClassVar[None] = None  # so that `numpy_array @ q` reaches `__rmatmul__`
    __iter__ = None  # else Python iterates with __getitem__, and `in` compares by identity

    if not TYPE_CHECKING:
        # Hidden from type checkers: for NumPy's types anything with `__array__` is an array, and
        # with `__getattr__` any attribute exists.

        def __array__(self, *args: Any, **kwargs: Any) -> Any:
            """Raises, because the caller must choose between the codes and the real array."""
            fix = "pass q.dequantize() for the real array, or q.values for the codes."
            refuse_as_array("QTensor", "a QTensor is not an array.", self, fix)

        def __getattr__(self, name: str) -> Any:
            """Raises: looked up only if there is no such attribute."""
            if name.startswith("_"):
                raise AttributeError(name)
            own = [x for x in dir(type(self)) if not x.startswith("_")]
            close = difflib.get_close_matches(name, [*own, "values", "scale"], n=1)
            fix = f"write q.dequantize().{name}." if hasattr(jax.Array, name) else None
            fix = _INSTEAD.get(name, fix) or (f"did you mean q.{close[0]}?" if close else None)
            raise fail(
                "QTensor",
                f"a QTensor has no attribute {name!r}.",
                given=f"q.{name}",
                expected="codes q.values, q.scale, q.zero_point; views such as q.T, q.reshape, "
                "q[...]; q.dequantize()",
                fix=fix or "take the attribute of q.dequantize().",
                error=AttributeError,
            )


def _refusing(what: str, fix: str) -> Any:
    def refuse(self: Any, *others: Any) -> Any:
        refuse_as_array("QTensor", f"a QTensor has no {what}.", self, fix)

    return refuse


for _what, (_names, _fix) in _OPERATORS.items():
    for _name in _names.split():
        for _sign in (_name,) if _name in _ALONE else (_name, f"r{_name}"):
            setattr(NoArray, f"__{_sign}__", _refusing(_what, _fix))
