"""Workarounds for XLA on CPU only, which can be removed once XLA no longer needs them.

Each entry is named after a test in `tests/test_xla_cpu.py`, without `test_`, that fails when a new
XLA no longer needs the workaround. Measured with jaxlib 0.10.2. Code that is written in some way
only for speed is not listed, because benchmarks measure it. Neither is `numerics/exact.py`,
arithmetic that XLA must not rearrange on any device, which has its own tests.
"""

from typing import NamedTuple


class Workaround(NamedTuple):
    """A workaround.

    Attributes:
      what: what XLA does, and the workaround.
      where: the functions with the workaround, as `folder.file.function`.
    """

    what: str
    where: tuple[str, ...]


WORKAROUNDS = {
    "one_row_or_column_is_multiplied_as_int32": Workaround(
        "A product of int8 with one row or column leaves the int8 library: both operands are "
        "copied to int32. So a row, or a column, is added.",
        (
            "contractions.integer_products.rows_product",
            "contractions.integer_products.needs_shape",
        ),
    ),
    "a_left_operand_that_is_not_in_order_is_multiplied_as_int32": Workaround(
        "The same happens if the left operand is not contracted along its last axes. So it is "
        "transposed, with a row of zeros below that XLA does not undo.",
        (
            "contractions.integer_products.needs_transpose",
            "contractions.integer_products.rows_product",
        ),
    ),
    "sixteen_bit_floats_are_multiplied_in_some_layouts_alone": Workaround(
        "A product of 16-bit floats in other layouts is computed in float32, with copies of both. "
        "So they are widened before.",
        ("contractions.plain.tiles", "contractions.plain.convert_wide"),
    ),
    "a_transposed_product_of_sixteen_bit_floats_cannot_run": Workaround(
        "A product of 16-bit floats into float32 is merged with transposes of its operands and its "
        "result, and the merged one mostly cannot run. So barriers keep them apart.",
        ("contractions.dot_general.rows_product",),
    ),
    "padding_is_folded_into_an_int8_convolution_that_then_sums_wrongly": Workaround(
        "Whether the int8 library sums a convolution is decided before padding is folded into its "
        "window: a window that extends beyond the image is then summed wrongly. So a barrier keeps "
        "the padding separate.",
        ("contractions.conv_general_dilated._int8_conv",),
    ),
    "a_sum_of_codes_beside_their_product_holds_them_as_int32": Workaround(
        "A sum of int8 codes that a product or a convolution also reads holds all of them in "
        "int32. So they are summed by a product with ones.",
        (
            "contractions.conv_general_dilated._kernel_sums",
            "contractions.integer_products._sums_of_rows",
        ),
    ),
    "a_loop_over_narrow_codes_converts_all_of_them_before_it": Workaround(
        "Slices of 8-bit floats or 4-bit codes that a loop converts are slices of a copy of all, "
        "converted before it. So codes are tied to its steps.",
        ("contractions.blocks._tied",),
    ),
    "the_largest_of_many_floats_is_no_NaN": Workaround(
        "The maximum of some thousand floats is a number even if one of them is NaN. So magnitudes "
        "are compared as integers, and NaN is detected separately.",
        ("statistics.granularity.Groups", "statistics.calibrators.Delayed"),
    ),
    "codes_that_the_backward_pass_reads_are_kept_as_quotients": Workaround(
        "Codes that a backward pass reads again are kept as the quotients that were rounded, four "
        "times as large, and barriers are removed before. So a condition that it cannot evaluate "
        "keeps them.",
        ("transforms.convert.as_stored", "train.products._forward"),
    ),
    "bits_of_a_transposed_constant_in_a_loop_are_masked_wrongly": Workaround(
        "A loop that calls a jitted function with a transposed constant gets other bits of it, if "
        "the function masks them. So the sign of a magnitude is cleared before its bits are read.",
        ("statistics.granularity.magnitude_bits",),
    ),
    "joining_codes_of_two_bits_ends_the_process": Workaround(
        "A program that joins arrays of 2-bit integers aborts the process while it is compiled. So "
        "they are joined as bytes.",
        ("tensor.views._joined",),
    ),
    "a_bitcast_of_four_bit_floats_in_a_loop_is_not_compiled": Workaround(
        "A program that casts the bits of 4-bit floats to integers inside a loop does not compile. "
        "So their bits are computed from their values.",
        ("numerics.minifloats.Minifloat",),
    ),
}
