from jqx._src.transforms.views import Origin, close_over_merges


def sets(*groups):
    return [frozenset(group) for group in groups]


def test_an_axis_is_kept_where_it_lies_in_kept_axes_alone():
    origin = Origin("w", tuple(sets({0}, {1}, {1})))
    assert origin.kept((1, 2), rank=2) == {1}
    assert origin.kept((0, 1), rank=2) == {0}


def test_merged_axes_are_kept_together_or_not_at_all():
    assert close_over_merges(frozenset({0, 2}), sets({0, 1})) == {2}
    assert close_over_merges(frozenset({0, 1, 2}), sets({0, 1})) == {0, 1, 2}


def test_merges_that_overlap_fall_together():
    assert close_over_merges(frozenset({0, 1, 2}), sets({0, 1}, {1, 2}, {2, 3})) == frozenset()
