"""A rule for each primitive that holds no functions, by name; one that is not here is unknown."""

from ._interval_arrays import ARRAYS
from ._interval_elementwise import ELEMENTWISE
from ._interval_rule import Rule, any_of

RULES: dict[str, Rule] = {
    **ELEMENTWISE,
    **ARRAYS,
    **dict.fromkeys(
        "random_bits random_seed random_wrap random_unwrap random_fold_in random_split "
        "random_clone threefry2x32 bitcast_convert_type erf_inv nextafter axis_index "
        "debug_callback debug_print pure_callback io_callback empty".split(),
        any_of,
    ),
}
