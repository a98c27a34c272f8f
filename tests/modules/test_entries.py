"""Entries by key as nested dicts: laws."""

import hypothesis
from hypothesis import strategies as st

from jqx._src.modules.quantized_function import flatten, nest, overlay, split, without

NAMES = st.sampled_from(["a", "b", "kernel", "layers_0"])
KEYS = st.builds(
    lambda path, rest: "/".join(path) + rest,
    st.lists(NAMES, max_size=3),
    st.sampled_from([":weight", ":dot_general:lhs", ":dot_general#1:lhs"]),
)
ENTRIES = st.dictionaries(KEYS, st.integers(), max_size=6)
TREES = st.recursive(
    st.integers(), lambda inner: st.dictionaries(NAMES, inner, max_size=3), max_leaves=8
).filter(lambda tree: isinstance(tree, dict))


def leaves(tree, before=()):
    """Leaves by path; empty dicts have none."""
    if not isinstance(tree, dict):
        return {before: tree}
    return {k: v for name, x in tree.items() for k, v in leaves(x, (*before, name)).items()}


@hypothesis.given(ENTRIES)
def test_flatten_inverts_nest(entries):
    assert flatten(nest(entries)) == entries


def test_an_entry_is_next_to_its_weight():
    nested = nest({"block/query/kernel:dot_general:lhs": 1, ":dot_general:lhs": 2})
    assert nested == {"block": {"query": {"kernel:dot_general:lhs": 1}}, ":dot_general:lhs": 2}


@hypothesis.given(TREES, ENTRIES)
def test_split_parts_what_overlay_joins(params, entries):
    hypothesis.assume(not any(isinstance(x, int) for x in params.values()))
    try:
        joined = overlay(params, nest(entries))
    except TypeError:
        hypothesis.reject()
    kept, found = split(joined)
    assert flatten(found).keys() <= entries.keys()
    assert leaves(kept).items() <= leaves(joined).items()
    assert leaves(kept).keys() | leaves(found).keys() == leaves(joined).keys()
    assert not leaves(kept).keys() & leaves(found).keys()


@hypothesis.given(TREES, TREES)
def test_overlay_has_the_leaves_of_what_is_above(below, above):
    joined = leaves(overlay(below, above))
    assert leaves(above).items() <= joined.items()
    assert joined.keys() <= leaves(below).keys() | leaves(above).keys()


@hypothesis.given(TREES, TREES)
def test_without_drops_the_leaves_of_the_other(tree, gone):
    kept, dropped = leaves(without(tree, gone)), leaves(gone)
    assert kept.items() <= leaves(tree).items()
    assert not kept.keys() & dropped.keys()
