"""What is done for the sake of XLA on CPU alone, and could go when XLA does it.

Each entry is the name of a test in `tests/contractions/test_xla_cpu.py`, `test_` before it, that
fails when a new XLA needs the workaround no more. Measured with jaxlib 0.10.2.
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
        ("_integers._products.rows_product", "_integers._products.needs_shape"),
    ),
    "a_left_operand_that_is_not_in_order_is_multiplied_as_int32": Workaround(
        "So does one whose left operand is not contracted along its last axes. So it is turned, "
        "with a row of zeros below that XLA does not undo.",
        ("_integers._products.must_turn", "_integers._products.rows_product"),
    ),
    "sixteen_bit_floats_are_multiplied_in_some_layouts_alone": Workaround(
        "A product of 16-bit floats in other layouts is one of float32, of copies of both. So they "
        "are widened before.",
        ("_how._tiles.tiles", "_how._convert.convert_wide"),
    ),
}
