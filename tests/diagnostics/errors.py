"""How exactly an error can be measured."""


def near(error, layers, terms):
    """How far two programs may be apart in an error that both measure, relative to it.

    A `relative_error` is the square of a difference of two results, over that of their size. Each
    result sums `terms` products in each of its layers, off by half a unit in the last place each;
    two programs so differ by four times that.
    """
    return 2 * 4 * layers * terms * 2.0**-25 / error**0.5
