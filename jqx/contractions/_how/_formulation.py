"""The ways to compute a contraction, in order, and reading back which one was chosen.

The formulations of an operation are a list; of each platform the first that applies is chosen. A
contraction is traced as a call of a jitted function that bears the names of what was chosen, so
that a jaxpr tells how each of its contractions is computed, on which platform.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
from jax import lax

from ... import _compat
from ..._calls import called
from ..._checks import check_instance, require_that
from ..._signatures import P
from ...tensor._shared import alone
from ._derivative import with_derivative

PREFIX = "jqx_"

PLATFORMS = ("cpu", "tpu", "cuda", "rocm", "default")
"""As `jax.lax.platform_dependent` has them; the last is every other one."""

CPU = PLATFORMS[:1]
ELSEWHERE = PLATFORMS[1:]


@dataclasses.dataclass(frozen=True)
class Formulation:
    """One way to compute a contraction.

    Attributes:
      name: what it is called in a jaxpr, behind `jqx_`.
      reason: when it is chosen, and what for.
      platforms: those that it is for, of `"cpu"`, `"tpu"`, `"cuda"`, `"rocm"` and `"default"`,
        which is any other one.
      applies: whether it computes a contraction: `(case) -> bool`, of shapes and formats alone. The
        case has the operands `lhs` and `rhs`, and `how`; see `Product`, `Convolution`, `Groups`.
      compute: `(lhs, rhs, how) -> result`, in a float dtype; `how` is static. Of a `ragged_dot`
        `(lhs, rhs, group_sizes, how)`.
      linear: the same, but linear in either operand, to give the derivative where `compute` rounds
        its float operand or looks at magnitudes; `None` where it is linear itself.
      op: what it computes: `"dot_general"`, `"conv_general_dilated"`, `"ragged_dot"`, or the int32
        sums of the first two, to be requantized: `"dot_general:int32"`,
        `"conv_general_dilated:int32"`; or the codes of such sums, `"dot_general:requantized"`,
        where `compute` is `(lhs, rhs, requantization, how) -> codes`.
      rounds: whether JAX's own derivative of `compute` will not do; by default, where there is a
        `linear`.
      tells_parts: whether `jqx.formulations` tells the contractions that it is made of instead.
      finds: whether `compute` is for kernels that find a weight in a stack; others get a slice.
    """

    name: str
    reason: str
    platforms: tuple[str, ...] = dataclasses.field(compare=False)
    applies: Callable[[Any], bool] = dataclasses.field(compare=False, repr=False)
    compute: Callable[..., Any] = dataclasses.field(repr=False)
    linear: Callable[..., Any] | None = dataclasses.field(default=None, repr=False)
    op: str = "dot_general"
    rounds: bool | None = None
    tells_parts: bool = False
    finds: bool = False

    @property
    def needs_linear(self) -> bool:
        """Whether its derivative is that of `linear` wherever it is chosen."""
        return self.linear is not None if self.rounds is None else self.rounds


FORMULATIONS: dict[str, Formulation] = {}
"""Those of jqx, by name."""


def formulation(
    reason: str,
    platforms: tuple[str, ...],
    applies: Callable[[Any], bool],
    **options: Any,
) -> Callable[[Callable[..., Any]], Formulation]:
    """Makes a function `(lhs, rhs, how)` the formulation of its name."""

    def register(compute: Callable[..., Any]) -> Formulation:
        name = compute.__name__
        FORMULATIONS[name] = Formulation(name, reason, platforms, applies, compute, **options)
        return FORMULATIONS[name]

    return register


OPS: set[str] = set()
"""What there are formulations of."""

_ADDED = jax.make_user_context(())
"""Formulations of users, each with all that tells it from another of its name: this is a part of
what `jax.jit` looks its compiled functions up by.
"""


@contextlib.contextmanager
def using(*formulations: Formulation) -> Iterator[None]:
    """Tries formulations before those of jqx, in the order given, for what is traced inside.

    Where one applies, on its platforms, it computes the contraction; all else stays as it was. Only
    this thread is concerned, and nothing is left behind: a jitted function that was traced outside
    is traced anew inside, and the other way round. `jqx.formulations` tells what was chosen.

    Args:
      *formulations: see `Formulation`. For two QTensors of which jqx dequantizes one, one must be
        given for every platform.

    Raises:
      TypeError: one is no `Formulation`.
      ValueError: its operation or a platform is unknown, or its name is no name, or one of jqx's.

    Gradient: that of `compute`, or of `linear` where there is one.
    NaN and infinities: as `compute` has them.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> from jqx.contractions import Formulation, using
      >>> def by_hand(x, q, how):
      ...     return jnp.dot(x, q.dequantize())
      >>> mine = Formulation(
      ...     name="by_hand",
      ...     reason="an example: a single row beside a matrix",
      ...     platforms=("cpu",),
      ...     applies=lambda case: case.is_beside_floats and case.rows == 1,
      ...     compute=by_hand,
      ... )
      >>> w = jqx.QTensor.quantize(jnp.ones((256, 256)), jqx.QSpec(jnp.int8, jqx.per_axis(1)))
      >>> with using(mine):
      ...     (chosen,) = jqx.formulations(jqx.matmul)(jnp.ones((1, 256)), w)
      >>> chosen.cpu.name, chosen.elsewhere.name
      ('by_hand', 'convert')
    """
    for mine in formulations:
        _check(mine)
    added = tuple((mine, mine.platforms, mine.applies) for mine in formulations)
    with _ADDED((*added, *_ADDED.value)):
        yield


def _check(mine: Any) -> None:
    mend = "make one: jqx.contractions.Formulation(name, reason, platforms, applies, compute)."
    check_instance("contractions.using", "formulation", mine, Formulation, mend=mend)
    require_that(
        mine.op in OPS,
        error=ValueError,
        function="contractions.using",
        problem="a formulation is of an unknown operation.",
        given=f"op == {mine.op!r}",
        expected=f"one of {', '.join(map(repr, sorted(OPS)))}",
        mend="name what it computes.",
    )
    platforms = mine.platforms
    known = isinstance(platforms, tuple) and platforms and {*platforms} <= {*PLATFORMS}
    require_that(
        known,
        error=ValueError,
        function="contractions.using",
        problem="`platforms` of a formulation are not known.",
        given=f"platforms == {platforms!r}",
        expected=f"a tuple of {', '.join(map(repr, PLATFORMS))}",
        mend='name those that it is for, such as platforms=("cuda",).',
    )
    require_that(
        isinstance(mine.name, str) and mine.name.isidentifier() and mine.name not in FORMULATIONS,
        error=ValueError,
        function="contractions.using",
        problem="a formulation has no name of its own.",
        given=f"name == {mine.name!r}",
        expected="a Python name that no formulation of jqx has",
        mend="give it another.",
    )


class Planner:
    """The formulations of an operation, in the order in which they are tried."""

    def __init__(self, op: str, *formulations: Formulation):
        self.op, self.formulations = op, formulations
        OPS.add(op)

    def choose(self, case: Any) -> "Choice | None":
        """Returns the first formulation that applies, for each platform; `None` where a platform
        has none.
        """
        added = [form for form, *_ in _ADDED.value if form.op == self.op]
        left, found = {*PLATFORMS}, {}
        for form in (*added, *self.formulations):
            here = left.intersection(form.platforms)
            if here and form.applies(case):
                found.update(dict.fromkeys(here, form))
                left -= here
            if not left:
                return Choice(**found)
        return None

    def compute(self, case: Any, *operands: Any) -> Any:
        """Computes a contraction as it is chosen; there is a formulation for every one."""
        choice = self.choose(case)
        assert choice is not None
        return choice.compute(*(operands or (case.lhs, case.rhs)), case.how)


class Choice(NamedTuple):
    """The formulation for each platform."""

    cpu: Formulation
    tpu: Formulation
    cuda: Formulation
    rocm: Formulation
    default: Formulation

    @property
    def elsewhere(self) -> Formulation:
        """The formulation for platforms that have none of their own."""
        return self.default

    @property
    def own(self) -> dict[str, Formulation]:
        """The formulations for platforms that have another than all others."""
        forms = zip(PLATFORMS, self, strict=True)
        return {platform: form for platform, form in forms if form != self.default}

    def compute(self, *operands: Any) -> Any:
        """Computes the contraction of operands, of which the last is how, under its name; the
        platform decides when it is lowered.
        """
        *arrays, how = operands
        return _named(self)(how, *arrays)


_CHOICES: dict[str, Choice] = {}
"""What was chosen, by the name of the jitted function that computes it."""


@functools.cache
def _named(choice: Choice) -> Callable[..., Any]:
    def contract(how: Any, *arrays: Any) -> Any:
        compute = _by_platform(choice, how, _compute)
        if any(form.needs_linear for form in choice):
            compute = with_derivative(compute, _by_platform(choice, how, _linear))
        elif choice.own:
            # Outside of the choice of platform, which would keep converted codes.
            compute = jax.checkpoint(compute)
        return compute(*arrays)

    name = PREFIX + choice.cpu.name
    if choice.cpu != choice.default:
        name += f"_else_{choice.default.name}"
    for platform, form in choice.own.items():
        name += "" if platform == "cpu" else f"_on_{platform}_{form.name}"
    while name in _CHOICES:  # two formulations of one name
        name += "_"
    _CHOICES[name] = choice
    contract.__name__ = name
    return jax.jit(contract, static_argnums=0)


def _compute(form: Formulation) -> Callable[..., Any]:
    return form.compute if form.finds else of_slices(form.compute)


def _linear(form: Formulation) -> Callable[..., Any]:
    return _compute(form) if form.linear is None else of_slices(form.linear)


def of_slices(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Lets a function of QTensors take those that are one of a stack, as slices."""
    return lambda *operands: compute(*map(alone, operands))


def _by_platform(
    choice: Choice, how: Any, part: Callable[[Formulation], Callable[..., Any]]
) -> Callable[..., Any]:
    """Returns a function of arrays that computes on each platform what its formulation does."""
    own = {platform: functools.partial(_last, part(f), how) for platform, f in choice.own.items()}
    default = functools.partial(_last, part(choice.default), how)
    if not own:
        return default
    return lambda *arrays: lax.platform_dependent(*arrays, default=default, **own)


def _last(f: Callable[..., Any], how: Any, *arrays: Any) -> Any:
    y, dtype = f(*arrays, how), getattr(how, "dtype", None)
    return y if dtype is None else y.astype(dtype)  # one for all platforms


class Chosen(NamedTuple):
    """A contraction in a traced function, and how it is computed.

    Attributes:
      choice: the formulation on each platform.
      operands: types of the arrays that it reads.
      result: type of the result.
      times: how often it runs, where it stands in a scan.
    """

    choice: Choice
    operands: tuple[str, ...]
    result: str
    times: int

    @property
    def cpu(self) -> Formulation:
        """The formulation on CPU."""
        return self.choice.cpu

    @property
    def elsewhere(self) -> Formulation:
        """The formulation on platforms that have none of their own."""
        return self.choice.default

    def __str__(self) -> str:
        times = f" ({self.times} times)" if self.times > 1 else ""
        head, own = f"{' x '.join(self.operands)} -> {self.result}{times}", self.choice.own
        forms: Mapping[str, Formulation] = {**own, "elsewhere": self.elsewhere}
        tell = "  {0}: {1.name}: {1.reason}" if own else "  {1.name}: {1.reason}"
        return "\n".join([head, *(tell.format(*item) for item in forms.items())])


@called("formulations")
def formulations(f: Callable[P, Any]) -> Callable[P, list[Chosen]]:
    """Returns a function of the arguments of `f` that tells how jqx computes its contractions.

    Args:
      f: any JAX function that calls contractions of jqx; it is traced, not run.

    Returns:
      `chosen(*args, **kwargs) -> list`, one entry for each contraction with a QTensor, in order;
      its `cpu.name` and `cpu.reason` (and `elsewhere`) say what was chosen and why, `choice` what
      on each platform, and `str` of it says all.

    Raises:
      What `f` raises when traced.

    Gradient: none; nothing is computed.
    NaN and infinities: nothing is computed.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> w = jqx.QTensor.quantize(jnp.ones((256, 256)), jqx.QSpec(jnp.int8, jqx.per_axis(1)))
      >>> (chosen,) = jqx.formulations(jqx.matmul)(jnp.ones((1, 256)), w)
      >>> chosen.cpu.name, chosen.elsewhere.name
      ('digits', 'convert')
    """

    def chosen(*args: P.args, **kwargs: P.kwargs) -> list[Chosen]:
        jaxpr, _ = _compat.open_jaxpr(jax.make_jaxpr(f)(*args, **kwargs))
        return _read(jaxpr, 1)

    return chosen


def _read(jaxpr: Any, times: int) -> list[Chosen]:
    found = []
    for eqn in jaxpr.eqns:
        choice = _CHOICES.get(_compat.name_of_jit(eqn))
        if choice is not None and not choice.cpu.tells_parts:
            operands = tuple(_type(v) for v in eqn.invars)
            result = ", ".join(_type(v) for v in eqn.outvars)
            found.append(Chosen(choice, operands, result, times))
            continue
        inner_times = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
        for inner in _compat.sub_jaxprs(eqn):
            found += _read(inner, inner_times)
    return found


def _type(atom: Any) -> str:
    return atom.aval.str_short(short_dtypes=True)
