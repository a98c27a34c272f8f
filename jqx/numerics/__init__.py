"""Number formats, round modes, and arithmetic that XLA does not rewrite."""

import typing as _typing

from .._late import unknown as _unknown
from ._blocks import Block as Block
from ._blocks import mxfp4 as mxfp4
from ._blocks import mxfp6_e2m3 as mxfp6_e2m3
from ._blocks import mxfp6_e3m2 as mxfp6_e3m2
from ._blocks import mxfp8_e4m3 as mxfp8_e4m3
from ._blocks import mxfp8_e5m2 as mxfp8_e5m2
from ._blocks import mxint8 as mxint8
from ._blocks import nvfp4 as nvfp4
from ._codebooks import Codebook as Codebook
from ._codebooks import binary as binary
from ._codebooks import nf4 as nf4
from ._exact import power_of_two as power_of_two
from ._exact import round_to_integer as round_to_integer
from ._exact import step_of as step_of
from ._lookup import format_of as format_of
from ._minifloats import Minifloat as Minifloat
from ._minifloats import Specials as Specials
from ._minifloats import float6_e2m3fn as float6_e2m3fn
from ._minifloats import float6_e3m2fn as float6_e3m2fn
from ._qtype import Integer as Integer
from ._qtype import QType as QType
from ._qtype import int3 as int3
from ._qtype import int5 as int5
from ._qtype import int6 as int6
from ._qtype import int7 as int7
from ._qtype import ternary as ternary
from ._qtype import uint3 as uint3
from ._qtype import uint5 as uint5
from ._qtype import uint6 as uint6
from ._qtype import uint7 as uint7
from ._runtimes import Numerics as Numerics
from ._runtimes import SymmetricRange as SymmetricRange
from ._runtimes import ngraph as ngraph
from ._runtimes import onednn as onednn
from ._runtimes import onednn_runtime as onednn_runtime
from ._runtimes import onnx as onnx
from ._runtimes import openvino as openvino
from ._runtimes import qwix as qwix
from ._runtimes import tflite as tflite
from ._runtimes import torchao as torchao

if not _typing.TYPE_CHECKING:  # so that type checkers report unknown names
    __getattr__ = _unknown(__name__)
