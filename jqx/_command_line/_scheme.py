"""How a scheme is written on the command line: `int4:group=32`, `nf4:block=64`, `float`.

    scheme = "float" | format { ":" option }
    option = "group=N" | "block=N" | "tensor" | "asymmetric" | "calibrator=NAME" | "contract=AXES"

A format is a dtype of JAX or a name of `jqx.numerics`. One scale a channel is used, of a block
format one a block, unless `group` (or `block`: the same) gives the elements of a group along the
contracted axes, or `tensor` asks for one scale in all. `asymmetric` means zero points,
`calibrator` is a name of `jqx.calibrators`, and `contract` names the axes that the weight's product
sums over, such as `contract=0` or `contract=0,1`, where the layout does not tell.
"""

import re
from typing import Any, NamedTuple

import jax.numpy as jnp

from .. import calibrators, numerics
from .._errors import message
from ..calibrators import Calibrator, absmax, minmax
from ..calibrators._shared import per_channel, per_group, per_tensor
from ..numerics import Block, QType, format_of
from ..tensor import QSpec

_RULE = re.compile(r"(.+?)=([a-z][a-z0-9_]*(?::[a-z]+(?:=[^:=]+)?)*)", re.DOTALL)
_CALIBRATORS = {n: c for n, c in vars(calibrators).items() if isinstance(c, Calibrator)}
_FORMATS = {name: q for name, q in vars(numerics).items() if isinstance(q, QType)}
_FORMATS |= {name: jnp.dtype(name) for name in numerics._shared.DTYPES}

_OPTIONS = {
    "group": True,
    "block": True,
    "tensor": False,
    "asymmetric": False,
    "calibrator": True,
    "contract": True,
}
"""Which options there are, and whether they have a value."""


class Scheme(NamedTuple):
    """How a tensor of a file is quantized.

    Attributes:
      spec: `None` leaves it in float.
      contract: the axes that are contracted; `None` leaves that to the layout.
    """

    spec: QSpec | None
    contract: tuple[int, ...] | None = None


class FileRule(NamedTuple):
    """A scheme for the tensors whose names match a regular expression in full."""

    pattern: re.Pattern[str]
    scheme: Scheme
    text: str


def parse_rule(text: str) -> FileRule:
    """Returns the rule that `regex=scheme` says.

    Raises:
      ValueError: it is not of this form.

    Example:
      >>> rule = parse_rule("layers.[0-9]+.*=int4:group=32")
      >>> rule.pattern.pattern, str(rule.scheme.spec)
      ('layers.[0-9]+.*', 'int4 per_group(32, tail=True)')
    """
    found = _RULE.fullmatch(text)
    if found is None:
        raise _wrong("the rule is not regex=scheme.", text, "such as '.*mlp.*=int4:group=32'")
    try:
        pattern = re.compile(found[1])
    except (re.error, OverflowError) as error:
        raise _wrong(
            f"the rule has no valid regular expression: {error}.", text, "a pattern of Python's re"
        ) from None
    return FileRule(pattern, parse_scheme(found[2]), text)


def parse_scheme(text: str) -> Scheme:
    """Returns what a scheme says.

    Raises:
      ValueError: a name or option is unknown, or they do not fit each other.

    Example:
      >>> str(parse_scheme("uint4:group=64:asymmetric").spec)
      'uint4 per_group(64, tail=True) asymmetric minmax'
      >>> parse_scheme("float").spec is None
      True
    """
    name, *options = text.split(":")
    given: dict[str, str] = {}
    for option in options:
        key, _, value = option.partition("=")
        if key in given or _OPTIONS.get(key) is not bool(value):
            raise _wrong(
                f"the option {option!r} is unknown, lacks a value, or is there twice.",
                text,
                ", ".join(f"{key}=..." if valued else key for key, valued in _OPTIONS.items()),
            )
        given[key] = value
    if name == "float":
        if given:
            raise _wrong("`float` has no options.", text, "float")
        return Scheme(None)
    if name not in _FORMATS:
        raise _wrong("the format is unknown.", name, f"float, or one of {', '.join(_FORMATS)}")
    qtype = _FORMATS[name]
    spec = QSpec(
        qtype,
        _granularity(text, qtype, given),
        symmetric="asymmetric" not in given,
        calibrator=_calibrator(text, given),
    )
    contract = given.get("contract")
    axes = None if contract is None else tuple(_integer(text, n) for n in contract.split(","))
    return Scheme(spec, axes)


def _granularity(text: str, qtype: Any, given: dict[str, str]) -> Any:
    sizes = [given[name] for name in ("group", "block") if name in given]
    if len(sizes) + ("tensor" in given) > 1:
        raise _wrong("the scheme says twice who shares a scale.", text, "group, block or tensor")
    if sizes:
        return per_group(_integer(text, sizes[0]), tail=True)
    if "tensor" in given:
        return per_tensor()
    form = format_of(qtype)
    return per_group(form.size, tail=True) if isinstance(form, Block) else per_channel()


def _calibrator(text: str, given: dict[str, str]) -> Calibrator:
    name = given.get("calibrator")
    if name is None:
        return minmax if "asymmetric" in given else absmax
    if name not in _CALIBRATORS:
        raise _wrong("the calibrator is unknown.", text, f"one of {', '.join(_CALIBRATORS)}")
    return _CALIBRATORS[name]


def _integer(text: str, number: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,9}", number):
        raise _wrong("a number of the scheme is none.", text, "such as group=32 or contract=0,1")
    return int(number)


def _wrong(problem: str, given: str, expected: str) -> ValueError:
    mend = "see the README, Files and command line."
    return ValueError(message("scheme", problem, given=given, expected=expected, mend=mend))
