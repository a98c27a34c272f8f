"""The subscripts of an einsum: a label for each axis of each operand, and of the result."""

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, NoReturn

from ..._errors import fail

Label = Any
"""The user's label of an axis; for an axis of an ellipsis, `("...", its place from the last)`."""

Labels = tuple[Label, ...]


class Subscripts(NamedTuple):
    """Subscripts as written: `...` is an item, and the result may be left out.

    Attributes:
      terms: the items of each operand.
      output: the items of the result, or `None`.
    """

    terms: tuple[tuple[Any, ...], ...]
    output: tuple[Any, ...] | None

    def __str__(self) -> str:
        """The string form."""
        terms = ",".join(map(_show, self.terms))
        return terms if self.output is None else f"{terms}->{_show(self.output)}"


def read(subscripts: Any, operands: Sequence[Any]) -> tuple[Subscripts, tuple[Any, ...]]:
    """Returns subscripts and operands, from either of the two forms that an einsum accepts."""
    if isinstance(subscripts, str):
        return _read_string(subscripts), tuple(operands)
    items = (subscripts, *operands)
    pairs = len(items) // 2
    lists, output = items[1 : 2 * pairs : 2], items[2 * pairs :]
    terms = [_read_list(term) for term in (*lists, *output)]
    return Subscripts(tuple(terms[:pairs]), terms[-1] if output else None), items[0 : 2 * pairs : 2]


def _read_string(subscripts: str) -> Subscripts:
    left, *right = "".join(subscripts.split()).split("->")
    if len(right) > 1:
        _refuse("there are two arrows.", repr(subscripts), "at most one '->'", "drop one.")
    items = [_items(subscripts, term) for term in (*left.split(","), *right)]
    output = items.pop() if right else None
    return Subscripts(tuple(items), output)


def _items(subscripts: str, term: str) -> tuple[Any, ...]:
    before, dots, after = term.partition("...")
    items = (*before, *([...] if dots else []), *after)
    for item in items:
        if item is not ... and not item.isalnum():
            _refuse(
                f"{item!r} is not a label.",
                repr(subscripts),
                "letters, at most one '...' in a term, ',' between terms and one '->'",
                "name each axis by a letter, as in 'bij,jk->bik'.",
            )
    return items


def _read_list(term: Any) -> tuple[Any, ...]:
    hashable = isinstance(term, Sequence) and all(isinstance(item, Hashable) for item in term)
    if not hashable or sum(item is ... for item in term) > 1:
        _refuse(
            "an operand is not followed by its labels.",
            f"an object of type {type(term).__name__}",
            "a string first, or after each operand a list of labels with at most one `...`",
            "write einsum('ij,jk', x, y), or einsum(x, [0, 1], y, [1, 2]).",
            error=ValueError if hashable else TypeError,
        )
    return tuple(term)


def labels_of(
    subscripts: Subscripts, shapes: Sequence[tuple[int, ...]]
) -> tuple[list[Labels], Labels]:
    """Returns the labels of each operand and of the result."""
    if len(subscripts.terms) != len(shapes):
        _refuse(
            "the numbers of operands and terms differ.",
            f"{len(shapes)} operands for '{subscripts}'",
            f"{len(subscripts.terms)} operands",
            "write one term for each operand, with ',' between them.",
        )
    terms = [
        _spelt_out(subscripts, i, term, len(shape))
        for i, (term, shape) in enumerate(zip(subscripts.terms, shapes, strict=True))
    ]
    count = Counter(label for term in terms for label in term)
    widest = max((label[1] for label in count if _is_dots(label)), default=0)
    dots = tuple(("...", place) for place in range(widest, 0, -1))
    if subscripts.output is None:
        once = [label for label in count if count[label] == 1 and not _is_dots(label)]
        return terms, (*dots, *_in_order(once))
    output = _put_for_dots(subscripts.output, dots)
    for label in output:
        if label not in count or output.count(label) > 1:
            _refuse(
                f"the result cannot have the label {_show([label])!r}"
                + (" twice." if label in count else ": no operand has it."),
                f"'{subscripts}'",
                "labels of the operands, each once",
                "give every axis of the result a different label of the operands.",
            )
    return terms, output


def _spelt_out(subscripts: Subscripts, i: int, term: tuple[Any, ...], rank: int) -> Labels:
    """Returns the labels of an operand, with one for each axis that its ellipsis stands for."""
    rest = rank - sum(item is not ... for item in term)
    if rest < 0 or (rest and ... not in term):
        _refuse(
            f"operand {i} does not have as many axes as its term has labels.",
            f"rank {rank} for the term {_show(term)!r} of '{subscripts}'",
            f"rank {rank - rest}" + (" or more" if ... in term else ""),
            "name each axis once, or write '...' for those without a name.",
        )
    return _put_for_dots(term, tuple(("...", place) for place in range(rest, 0, -1)))


def _put_for_dots(term: tuple[Any, ...], dots: Labels) -> Labels:
    return tuple(label for item in term for label in (dots if item is ... else (item,)))


def _in_order(labels: list[Any]) -> Labels:
    try:
        return tuple(sorted(labels))
    except TypeError:
        _refuse(
            "the labels cannot be sorted, which is needed if the result is left out.",
            f"labels of types {sorted({type(label).__name__ for label in labels})}",
            "labels that can be sorted",
            "pass the labels of the result.",
            error=TypeError,
        )


def sizes_of(terms: Sequence[Labels], shapes: Sequence[tuple[int, ...]]) -> dict[Label, int]:
    """Returns the size of each label; axes of size 1 broadcast to those of other operands."""
    sizes: dict[Label, int] = {}
    for i, (term, shape) in enumerate(zip(terms, shapes, strict=True)):
        own: dict[Label, int] = {}
        for label, n in zip(term, shape, strict=True):
            first, before = own.setdefault(label, n), sizes.get(label, 1)
            if n != first or (n != 1 and before != 1 and n != before):
                _refuse(
                    f"axes of label {_show([label])!r} have different sizes.",
                    f"{first if n != first else before} and {n}, in operand {i} of shapes "
                    f"{[tuple(shape) for shape in shapes]}",
                    "one size, or 1 in other operands",
                    "use the same label only for axes of the same size.",
                )
            sizes[label] = n if before == 1 else before
    return sizes


def _is_dots(label: Any) -> bool:
    return isinstance(label, tuple) and label[:1] == ("...",)


def _show(items: Sequence[Any]) -> str:
    parts = ["..." if item is ... or _is_dots(item) else str(item) for item in items]
    short = all(len(part) == 1 or part == "..." for part in parts)
    return ("" if short else " ").join(parts)


def _refuse(
    problem: str, given: str, expected: str, fix: str, error: type[Exception] = ValueError
) -> NoReturn:
    raise fail("einsum", problem, given=given, expected=expected, fix=fix, error=error)
