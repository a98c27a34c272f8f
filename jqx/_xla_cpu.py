"""What is done for the sake of XLA on CPU alone, and could go when XLA does it.

Each entry is the name of a test in `tests/test_xla_cpu.py`, `test_` before it, that fails when a
new XLA needs the workaround no more. Measured with jaxlib 0.10.2. What is written one way for speed
alone is not listed: benchmarks measure it. Neither is `numerics/_exact.py`, arithmetic that XLA
must leave alone on any device, which has tests of its own.
"""

from typing import NamedTuple


class Workaround(NamedTuple):
    """A workaround.

    Attributes:
      what: what XLA does.
      where: what works around it: functions, as `folder.file.function`.
    """

    what: str
    where: tuple[str, ...]


WORKAROUNDS = {
    "one_row_or_column_is_multiplied_as_int32": Workaround(
        "A product of int8 with one row or column leaves the int8 library: both operands are "
        "copied to int32. So a row, or a column, is added.",
        (
            "contractions._integers._products.rows_product",
            "contractions._integers._products.needs_shape",
        ),
    ),
    "a_left_operand_that_is_not_in_order_is_multiplied_as_int32": Workaround(
        "So does one whose left operand is not contracted along its last axes. So it is turned, "
        "with a row of zeros below that XLA does not undo.",
        (
            "contractions._integers._products.must_turn",
            "contractions._integers._products.rows_product",
        ),
    ),
    "sixteen_bit_floats_are_multiplied_in_some_layouts_alone": Workaround(
        "A product of 16-bit floats in other layouts is one of float32, of copies of both. So they "
        "are widened before.",
        ("contractions._how._tiles.tiles", "contractions._how._convert.convert_wide"),
    ),
    "padding_is_folded_into_an_int8_convolution_that_then_sums_wrongly": Workaround(
        "Whether the int8 library sums a convolution is decided before padding is folded into its "
        "window: a window that reaches beyond the image is then summed wrongly. So a barrier keeps "
        "the padding apart.",
        ("contractions._how._conv._int8_conv",),
    ),
    "a_sum_of_codes_beside_their_product_holds_them_as_int32": Workaround(
        "A sum of int8 codes that a product or a convolution reads too holds all of them in int32. "
        "So they are summed by a product with ones.",
        ("contractions._how._conv._kernel_sums", "contractions._integers._products._sums_of_rows"),
    ),
    "a_loop_over_narrow_codes_converts_all_of_them_before_it": Workaround(
        "Slices of 8-bit floats or 4-bit codes that a loop converts are slices of a copy of all, "
        "converted before it. So codes are tied to its steps.",
        ("contractions._how._slices._tied",),
    ),
    "the_largest_of_many_floats_is_no_NaN": Workaround(
        "The maximum of some thousand floats is a number where one of them is NaN. So magnitudes "
        "are compared as integers, and NaN is looked for apart.",
        ("calibrators._groups.Groups", "calibrators._delayed.Delayed"),
    ),
    "codes_that_the_backward_pass_reads_are_kept_as_quotients": Workaround(
        "Codes that a backward pass reads again are kept as the quotients that were rounded, four "
        "times as large; a barrier is removed before. So a condition that it cannot decide keeps "
        "them.",
        ("transforms._simulate._kept",),
    ),
    "joining_codes_of_two_bits_ends_the_process": Workaround(
        "A program that joins arrays of 2-bit integers ends the process while it is compiled. So "
        "they are joined as bytes.",
        ("tensor._select._joined",),
    ),
    "a_bitcast_of_four_bit_floats_in_a_loop_is_not_compiled": Workaround(
        "A program that casts the bits of 4-bit floats to integers inside a loop is not compiled. "
        "So their bits are computed from their values.",
        ("numerics._minifloats.Minifloat",),
    ),
}
