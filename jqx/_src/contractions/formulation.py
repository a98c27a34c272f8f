"""The formulations of contractions, in order, and functions that show which one was chosen.

The formulations of an operation are a list. For each platform, the first one that applies is
chosen. A contraction is traced as a call of a jitted function whose name includes the names of the
chosen formulations, so a jaxpr shows how each contraction is computed on each platform.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax

from .. import compat, package_cpu
from ..checks import called, check_instance
from ..compat_kernels import IN_EXPORTS
from ..errors import fail
from ..signatures import P
from ..tensor.qtensor import QTensor
from ..tensor.segments import without_stack

# Derivatives of products that are computed in another way than they are differentiated.


def with_derivative(
    product: Callable[[Any, Any], Any], linear: Callable[[Any, Any], Any]
) -> Callable[[Any, Any], Any]:
    """Gives a product of an array and a QTensor the derivative of another function, which is linear
    in the array and in the scale. Converted codes are not stored for the backward pass.
    """
    function = jax.custom_jvp(product)
    linear = jax.checkpoint(linear)

    @functools.partial(function.defjvp, symbolic_zeros=True)
    def rule(primals: Any, tangents: Any) -> tuple[Any, Any]:
        (x, q), (dx, dq) = primals, tangents
        y = function(x, q)
        dy = jnp.zeros_like(y)
        if not _is_zero(dx):
            dy = dy + linear(dx, q)
        ds = _of_scale(q.scale, dq.scale)
        if ds is not None:
            dy = dy + linear(x, dataclasses.replace(q, scale=ds))
        return y, dy

    return function


def _of_scale(scale: Any, tangent: Any) -> Any:
    """Returns the tangent of a scale, or of the real values of a quantized scale; `None` if it is
    zero.
    """
    leaves, structure = jax.tree.flatten(tangent, is_leaf=_is_zero)
    if all(_is_zero(x) or x.dtype == jax.dtypes.float0 for x in leaves):
        return None
    if not isinstance(scale, QTensor):
        return tangent
    for i, x in enumerate(leaves):
        if _is_zero(x):
            zeros = np.zeros if x.aval.dtype == jax.dtypes.float0 else jnp.zeros
            leaves[i] = zeros(x.aval.shape, x.aval.dtype)
    return jax.jvp(lambda s: s.dequantize(), (scale,), (structure.unflatten(leaves),))[1]


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, jax.custom_derivatives.SymbolicZero)


PREFIX = "jqx_"

PLATFORMS = ("cpu", "tpu", "cuda", "rocm", "default")
"""As in `jax.lax.platform_dependent`; the last one means every other platform."""

CPU = PLATFORMS[:1]
ELSEWHERE = PLATFORMS[1:]


@dataclasses.dataclass(frozen=True)
class Formulation:
    """One way to compute a contraction.

    Attributes:
      name: its name in a jaxpr, after the prefix `jqx_`.
      reason: when and why it is chosen.
      platforms: its platforms, a tuple of `"cpu"`, `"tpu"`, `"cuda"`, `"rocm"` and `"default"`,
        which means any other one.
      applies: whether it applies to a contraction: `(case) -> bool`, a function of shapes and
        formats only. In a `Family` it is asked after the condition of all. The case has the
        operands `lhs` and `rhs`, and `how`; see `Product`,
        `Convolution`, `Groups`.
      compute: `(lhs, rhs, how) -> result`, in a float dtype; `how` is static. For a `ragged_dot`,
        `(lhs, rhs, group_sizes, how)`.
      linear: the same function, but linear in either operand. It defines the derivative if
        `compute` rounds its float operand or depends on magnitudes; `None` if `compute` is linear.
      op: the operation: `"dot_general"`, `"conv_general_dilated"`, `"ragged_dot"`; or the int32
        sums of the first two, to be requantized: `"dot_general:int32"`,
        `"conv_general_dilated:int32"`; or `"dot_general:float"`, the product of two arrays that a
        converted function leaves in float. Of jqx alone: `"rows"`, several contractions and what is
        computed of each row between them.
      rounds: whether JAX must not differentiate `compute` itself; by default, this is so if
        `linear` is given.
      is_composite: whether `jqx.formulations` lists the contractions inside of it instead.
      reads_stack: whether `compute` reads a weight from a stack by its index; otherwise it gets a
        slice.
    """

    name: str
    reason: str
    platforms: tuple[str, ...] = dataclasses.field(compare=False)
    applies: Callable[[Any], bool] = dataclasses.field(compare=False, repr=False)
    compute: Callable[..., Any] = dataclasses.field(repr=False)
    linear: Callable[..., Any] | None = dataclasses.field(default=None, repr=False)
    op: str = "dot_general"
    rounds: bool | None = None
    is_composite: bool = False
    reads_stack: bool = False

    @property
    def needs_linear(self) -> bool:
        """Whether its derivative is always that of `linear`."""
        return self.linear is not None if self.rounds is None else self.rounds


FORMULATIONS: dict[str, Formulation] = {}
"""The formulations of jqx, by name."""


def formulation(
    reason: str,
    platforms: tuple[str, ...],
    applies: Callable[[Any], bool],
    **options: Any,
) -> Callable[[Callable[..., Any]], Formulation]:
    """Registers a function `(lhs, rhs, how)` as the formulation with its name."""

    def register(compute: Callable[..., Any]) -> Formulation:
        name = compute.__name__
        FORMULATIONS[name] = Formulation(name, reason, platforms, applies, compute, **options)
        return FORMULATIONS[name]

    return register


TARGETS = {"tpu": ("tpu",), "gpu": ("cuda",)}
"""The platforms of the kernels for each target of `pack_for` that has Pallas kernels."""


def formulation_of_kernels(
    reason: str, applies: Callable[[str, Any], bool], **options: Any
) -> Callable[[Callable[..., Any]], tuple[Formulation, ...]]:
    """Registers a function `(target, lhs, rhs, how)` as one formulation for each target, with the
    target at the end of its name. `applies(target, case)` is its condition.
    """

    def register(compute: Callable[..., Any]) -> tuple[Formulation, ...]:
        forms = []
        for target, platforms in TARGETS.items():
            run = functools.partial(compute, target)
            run.__name__ = f"{compute.__name__}_{target}"  # type: ignore[attr-defined]
            condition = functools.partial(applies, target)
            forms.append(
                formulation(reason, platforms, condition, reads_stack=True, **options)(run)
            )
        return tuple(forms)

    return register


OPS: set[str] = set()
"""The operations that have formulations."""

_ADDED = jax.make_user_context(())
"""Formulations of the user, each with everything that distinguishes it from another one with the
same name, because this is part of the cache key of `jax.jit`.
"""


@contextlib.contextmanager
def using(*formulations: Formulation) -> Iterator[None]:
    """Tries formulations before those of jqx, in the given order, in functions traced inside.

    If a formulation applies, it computes the contraction on its platforms; everything else stays
    the same. Only the current thread is affected. Nothing is left behind: a jitted function that
    was traced outside is traced again inside, and vice versa. `jqx.formulations` shows which
    formulation was chosen.

    Args:
      *formulations: see `Formulation`. For two QTensors of which jqx would dequantize one, the
        formulations must cover every platform.

    Raises:
      TypeError: an argument is not a `Formulation`.
      ValueError: its operation or a platform is unknown, or its name is not a Python name, or is
        the name of a formulation of jqx.

    Gradient: that of `linear` if it is given, else that of `compute`.
    NaN and infinities: as in `compute`.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> from jqx.extend import Formulation, using
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


def is_using(op: str) -> bool:
    """Returns whether the caller is inside of `using`, with a formulation of an operation."""
    return any(form.op == op for form, *_ in _ADDED.value)


def _check(mine: Any) -> None:
    fix = "pass jqx.extend.Formulation(name, reason, platforms, applies, compute)."
    check_instance("extend.using", "formulation", mine, Formulation, fix=fix)
    if mine.op not in OPS:
        problem = f"the operation of a formulation is unknown: {mine.op!r}."
        fix = f"pass as op one of {', '.join(map(repr, sorted(OPS)))}."
        raise fail("extend.using", problem, fix=fix)
    platforms = mine.platforms
    if not isinstance(platforms, tuple) or not platforms or {*platforms} - {*PLATFORMS}:
        problem = f"`platforms` of a formulation are not known: {platforms!r}."
        fix = f"pass a tuple of some of {', '.join(map(repr, PLATFORMS))}."
        raise fail("extend.using", problem, fix=fix)
    name = mine.name
    if not isinstance(name, str) or not name.isidentifier() or name in FORMULATIONS:
        problem = f"the name of a formulation is not valid, or is taken: {name!r}."
        fix = "pass a Python name that no formulation of jqx has."
        raise fail("extend.using", problem, fix=fix)


class Family(NamedTuple):
    """Formulations with a common condition, in the order in which they are tried.

    Attributes:
      applies: the condition of all of them, which is asked once.
      formulations: with what else each of them needs.
    """

    applies: Callable[[Any], bool]
    formulations: tuple[Formulation, ...]


class Planner:
    """The formulations of an operation, in the order in which they are tried."""

    def __init__(self, op: str, *families: Family | Formulation):
        self.op, self.families = op, families
        OPS.add(op)

    @property
    def formulations(self) -> tuple[Formulation, ...]:
        """All formulations, in order."""
        families = [[x] if isinstance(x, Formulation) else x.formulations for x in self.families]
        return tuple(form for forms in families for form in forms)

    def choose(self, case: Any) -> "Choice | None":
        """Returns the first formulation that applies, for each platform; `None` if a platform has
        none: a jaxpr is the same on all platforms, so then none is used.
        """
        left, by_platform = {*PLATFORMS}, {}
        added = [form for form, *_ in _ADDED.value if form.op == self.op]
        for family in (*added, *self.families):
            if isinstance(family, Formulation):
                forms: tuple[Formulation, ...] = (family,)
            else:
                forms = family.formulations if family.applies(case) else ()
            for form in forms:
                platforms = left.intersection(form.platforms)
                if platforms and form.applies(case):
                    by_platform.update(dict.fromkeys(platforms, form))
                    left -= platforms
                if not left:
                    return Choice(**by_platform)
        return None

    def compute(self, case: Any, *operands: Any) -> Any:
        """Computes a contraction with the chosen formulations; there is one for every case."""
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
        """The formulation for all platforms without their own formulation."""
        return self.default

    @property
    def own(self) -> dict[str, Formulation]:
        """The formulations of platforms that differ from the default."""
        forms = zip(PLATFORMS, self, strict=True)
        return {platform: form for platform, form in forms if form != self.default}

    def compute(self, *operands: Any) -> Any:
        """Computes the contraction of operands (the last one is `how`) in a jitted function with
        its name. The formulation is selected when the function is lowered for a platform.
        """
        *arrays, how = operands
        return _jitted(self)(how, *arrays)

    def compute_once(self, *operands: Any) -> Any:
        """The same, where no other call has an equal `how`: nothing is kept of it."""
        *arrays, how = operands
        named = _named(self)

        def contract(*arrays: Any) -> Any:
            return named(how, *arrays)

        contract.__name__ = named.__name__
        return jax.jit(contract)(*arrays)


_CHOICES: dict[str, Choice] = {}
"""The choices, by the name of the jitted function that computes them."""


@functools.cache
def _named(choice: Choice) -> Callable[..., Any]:
    def contract(how: Any, *arrays: Any) -> Any:
        compute = _by_platform(choice, how)
        if any([form.needs_linear for form in {*choice}]):
            compute = with_derivative(compute, _by_platform(choice, how, is_linear=True))
        elif len({*choice}) > 1:
            # Outside of `platform_dependent`, which would store converted codes.
            compute = jax.checkpoint(compute)
        return compute(*arrays)

    name = PREFIX + choice.cpu.name
    if choice.cpu != choice.default:
        name += f"_else_{choice.default.name}"
    for platform, form in choice.own.items():
        name += "" if platform == "cpu" else f"_on_{platform}_{form.name}"
    while name in _CHOICES:  # two formulations with the same name
        name += "_"
    _CHOICES[name] = choice
    contract.__name__ = name
    return contract


@functools.cache
def _jitted(choice: Choice) -> Callable[..., Any]:
    return jax.jit(_named(choice), static_argnums=0)


def of_slices(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Lets a function of QTensors accept slices of stacks, as plain QTensors."""
    return lambda *operands: compute(*map(without_stack, operands))


def _by_platform(choice: Choice, how: Any, is_linear: bool = False) -> Callable[..., Any]:
    """Returns a function of arrays that runs, on each platform, the formulation chosen for it, or
    the linear function whose derivative it has.
    """

    def function_of(form: Formulation) -> Callable[..., Any]:
        compute = form.compute if form.reads_stack else of_slices(form.compute)
        if is_linear and form.linear is not None:
            compute = of_slices(form.linear)

        def run(*arrays: Any) -> Any:
            y, dtype = compute(*arrays, how), getattr(how, "dtype", None)
            return y if dtype is None else y.astype(dtype)  # the same dtype on all platforms

        return run

    default = function_of(choice.default)
    if len({*choice}) == 1:
        return default
    per_platform = {platform: function_of(form) for platform, form in choice.own.items()}
    return lambda *arrays: lax.platform_dependent(*arrays, default=default, **per_platform)


class LoweredContraction(NamedTuple):
    """A contraction in a traced function, and how it is computed.

    Attributes:
      choice: the formulation on each platform.
      operands: types of the arrays that it reads.
      result: type of the result.
      times: how often it runs, if it is in a scan.
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
        """The formulation on all platforms without their own formulation."""
        return self.choice.default

    def __str__(self) -> str:
        repeats = f" ({self.times} times)" if self.times > 1 else ""
        head, special = f"{' x '.join(self.operands)} -> {self.result}{repeats}", self.choice.own
        forms: Mapping[str, Formulation] = {**special, "elsewhere": self.elsewhere}
        tell = "  {0}: {1.name}: {1.reason}" if special else "  {1.name}: {1.reason}"
        return "\n".join([head, *(tell.format(*item) for item in forms.items())])


@called("formulations")
def formulations(f: Callable[P, Any]) -> Callable[P, list[LoweredContraction]]:
    """Returns a function that lists how jqx computes the contractions of `f`.

    Args:
      f: any JAX function that calls contractions of jqx; it is traced, not run.

    Returns:
      `chosen(*args, **kwargs) -> list`, with the arguments of `f`. It has one entry for each
      contraction with a QTensor, in order. `cpu.name` and `cpu.reason` (and those of `elsewhere`)
      are the chosen formulation and the reason, `choice` has one for each platform, and `str(...)`
      shows everything.

    Raises:
      Any error that `f` raises when traced.

    Gradient: none; nothing is computed.
    NaN and infinities: nothing is computed.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> w = jqx.QTensor.quantize(jnp.ones((256, 256)), jqx.QSpec(jnp.int8, jqx.per_axis(1)))
      >>> (chosen,) = jqx.formulations(jqx.matmul)(jnp.ones((1, 256)), w)
      >>> chosen.cpu.name, chosen.elsewhere.name
      ('digits', 'convert')
    """

    def chosen(*args: P.args, **kwargs: P.kwargs) -> list[LoweredContraction]:
        jaxpr, _ = compat.open_jaxpr(jax.make_jaxpr(f)(*args, **kwargs))
        return _read(jaxpr, 1)

    return chosen


def _read(jaxpr: Any, repeats: int) -> list[LoweredContraction]:
    contractions = []
    for eqn in jaxpr.eqns:
        choice = _CHOICES.get(compat.name_of_jit(eqn))
        inner_times = repeats * eqn.params["length"] if eqn.primitive.name == "scan" else repeats
        inner: list[LoweredContraction] = []
        if choice is None or any(form.is_composite for form in choice):
            for body in compat.sub_jaxprs(eqn):
                inner += _read(body, inner_times)
        if choice is None or all(form.is_composite for form in choice):
            contractions += inner
            continue
        if len(inner) == 1:  # what is inside of the composite of some platforms
            forms = zip(choice, inner[0].choice, strict=True)
            choice = Choice(*(own if form.is_composite else form for form, own in forms))
        operands = tuple(_type(v) for v in eqn.invars)
        result = ", ".join(_type(v) for v in eqn.outvars)
        contractions.append(LoweredContraction(choice, operands, result, repeats))
    return contractions


def _type(atom: Any) -> str:
    return atom.aval.str_short(short_dtypes=True)


# Kernels of jqx-cpu in functions that `jax.export` serializes.


@contextlib.contextmanager
def kernels_in_exports() -> Iterator[list[export.DisabledSafetyCheck]]:
    """Lets functions that are exported inside of this context call the kernels of jqx-cpu.

    Outside of it, an exported function uses the form of each contraction without kernels, which
    runs everywhere but is slower. A function that is exported inside runs on CPUs where jqx-cpu is
    installed: `import jqx_cpu` registers its kernels with XLA, and jqx itself is not needed. If it
    is missing, XLA reports the missing kernel: `No FFI handler registered for jqx_cpu_...`.
    Contractions with a symbolic size use the form without kernels here too, because kernels need
    known sizes.

    Yields:
      The `disabled_checks` argument for `jax.export.export`, which otherwise rejects custom calls
      without a stability guarantee. The kernels of jqx-cpu belong to one version of jqx.

    Raises:
      ImportError: jqx-cpu is not installed, or its kernels are not used on this processor.

    Gradient: that of the form without kernels.
    NaN and infinities: as in `jqx.dot_general`.

    Example:
      >>> import jax, jqx, jax.numpy as jnp
      >>> def written(x, w):
      ...     with jqx.kernels_in_exports() as checks:
      ...         f = jax.export.export(jax.jit(jqx.matmul), disabled_checks=checks)
      ...         return f(x, w)
      >>> w = jqx.QTensor.quantize(jnp.ones((256, 256)), jqx.QSpec(jnp.int8, jqx.per_axis(1)))
      >>> w = w.pack_for("cpu")
      >>> written(jnp.ones((1, 256)), w).platforms  # doctest: +SKIP
      ('cpu',)
    """
    if not package_cpu.is_installed():
        raise fail(
            "kernels_in_exports",
            "the package jqx-cpu is not installed, or not used on this processor.",
            fix="install it with pip install ./cpu; select its instructions, such as with "
            "JQX_CPU_KERNELS=AVX2; or export without it: that form runs everywhere.",
            error=ImportError,
        )
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in package_cpu.handlers()]
    with IN_EXPORTS(True):
        yield checks
