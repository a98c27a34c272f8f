"""Number formats, round modes, and arithmetic that XLA does not rewrite."""

import typing as _typing

from ._src.late import unknown as _unknown
from ._src.numerics.blocks import Block as Block
from ._src.numerics.blocks import mxfp4 as mxfp4
from ._src.numerics.blocks import mxfp6_e2m3 as mxfp6_e2m3
from ._src.numerics.blocks import mxfp6_e3m2 as mxfp6_e3m2
from ._src.numerics.blocks import mxfp8_e4m3 as mxfp8_e4m3
from ._src.numerics.blocks import mxfp8_e5m2 as mxfp8_e5m2
from ._src.numerics.blocks import mxint8 as mxint8
from ._src.numerics.blocks import nvfp4 as nvfp4
from ._src.numerics.codebooks import Codebook as Codebook
from ._src.numerics.codebooks import Squares as Squares
from ._src.numerics.codebooks import binary as binary
from ._src.numerics.codebooks import nf4 as nf4
from ._src.numerics.lookup import format_of as format_of
from ._src.numerics.minifloats import Minifloat as Minifloat
from ._src.numerics.minifloats import Specials as Specials
from ._src.numerics.minifloats import float6_e2m3fn as float6_e2m3fn
from ._src.numerics.minifloats import float6_e3m2fn as float6_e3m2fn
from ._src.numerics.qtype import Integer as Integer
from ._src.numerics.qtype import int3 as int3
from ._src.numerics.qtype import int5 as int5
from ._src.numerics.qtype import int6 as int6
from ._src.numerics.qtype import int7 as int7
from ._src.numerics.qtype import ternary as ternary
from ._src.numerics.qtype import uint3 as uint3
from ._src.numerics.qtype import uint5 as uint5
from ._src.numerics.qtype import uint6 as uint6
from ._src.numerics.qtype import uint7 as uint7
from ._src.numerics.runtimes import Numerics as Numerics
from ._src.numerics.runtimes import SymmetricRange as SymmetricRange
from ._src.numerics.runtimes import ngraph as ngraph
from ._src.numerics.runtimes import onednn as onednn
from ._src.numerics.runtimes import onednn_runtime as onednn_runtime
from ._src.numerics.runtimes import onnx as onnx
from ._src.numerics.runtimes import openvino as openvino
from ._src.numerics.runtimes import qwix as qwix
from ._src.numerics.runtimes import tflite as tflite
from ._src.numerics.runtimes import torchao as torchao

if not _typing.TYPE_CHECKING:  # so that type checkers report unknown names
    __getattr__ = _unknown(__name__)
