"""What algorithms share with their users: chains of them, errors for their options, and reports."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np

from ..checks import Rule, called, check_fields, choice, flag, instance, nothing, shown
from ..errors import fail
from ..files import as_path
from ..statistics.calibrators import Calibrator
from ..statistics.statistics import check_weight
from ..table import Printed, Table, Tabular
from ..transforms.algorithm import has
from ..transforms.plan import Plan, Site
from ..transforms.stats import flags_of

if TYPE_CHECKING:  # only a part of the algorithms has intermediate values
    from .store import Memory

# Several algorithms, run one after another.


@dataclasses.dataclass(frozen=True, init=False)
class chain:
    """Runs several algorithms of `jqx.ptq` in order.

    First come those that change weights. Then at most one chooses codes; without one, weights are
    rounded to nearest. Last come those that correct the remaining error. The report is a tuple of
    their reports.

    Attributes:
      algorithms: the algorithms in order.

    Raises:
      TypeError: an argument is not an algorithm.
      ValueError: there are no algorithms, or they are in the wrong order.

    Example:
      >>> import jqx
      >>> algorithms = jqx.algorithms.awq(), jqx.algorithms.gptq()
      >>> [type(x).__name__ for x in jqx.algorithms.chain(*algorithms).algorithms]
      ['awq', 'gptq']
    """

    algorithms: tuple[Any, ...]

    def __init__(self, *algorithms: Any) -> None:
        name = "algorithms.chain"
        for i, algorithm in enumerate(algorithms):
            is_one = callable(algorithm) or has(algorithm, "run") or _kind(algorithm) != 1
            if not is_one or isinstance(algorithm, (type, chain)):
                problem = f"argument {i} is not an algorithm, such as jqx.algorithms.awq()."
                fix = "call the class; pass the algorithms of an inner chain directly."
                raise fail(name, problem, given=shown(algorithm), fix=fix, error=TypeError)
        kinds = list(map(_kind, algorithms))
        if not algorithms or kinds != sorted(kinds) or kinds.count(1) > 1:
            problem = "the algorithms are in the wrong order." if algorithms else "there is none."
            detail = ", ".join(type(x).__name__ for x in algorithms) or "no argument"
            fix = "pass those that change weights, then at most one that chooses codes, then "
            fix += "those that correct: chain(smooth_quant(), gptq(), bias_correction())."
            raise fail(name, problem, given=detail, fix=fix)
        object.__setattr__(self, "algorithms", algorithms)


def _kind(algorithm: Any) -> int:
    """Returns the position of an algorithm in a chain."""
    return 0 if has(algorithm, "rewrite") else 2 if has(algorithm, "correct") else 1


# Rounding to nearest, for when `ptq` should not choose an algorithm itself.


@called("algorithms.nearest", "it has no options: jqx.algorithms.nearest().")
@dataclasses.dataclass(frozen=True)
class nearest:
    """Rounds weights to nearest, and changes nothing else: an algorithm of `jqx.ptq`. Without an
    algorithm, `jqx.ptq` takes the one that measured best for the plan.

    It reads batches only if activations have static scales.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> f, policy = lambda w, x: x @ w, jqx.Policy({".*": "int4"})
      >>> quantize = jqx.ptq(f, policy, jqx.algorithms.nearest(), progress=False)
      >>> quantize(jnp.array([[7.0], [2.4]]), [jnp.ones((1, 2))]).params.dequantize()[:, 0]
      Array([7., 2.], dtype=float32)
    """

    lazy: ClassVar[bool] = True

    def __call__(self, plan: Plan, params: Any, stats: Any) -> Any:
        """Returns the parameters unchanged; weights without chosen codes are rounded later."""
        return params


# Errors for options under the names of other libraries, or that the policy or the call has.


_SIZE = (
    "the policy sets the size of groups: jqx.presets.w4a16(block=32), or the scheme "
    "'int4:group=32'."
)
_FORMAT = "the policy sets the format: jqx.presets.w4a16(), or jqx.Policy({'.*': 'int4'})."
_BATCHES = "pass batches to the result: jqx.ptq(f, policy, algorithm)(params, batches)."
_INSTEAD = {
    **dict.fromkeys(("group_size", "groupsize", "block_size", "blocksize", "group"), _SIZE),
    **dict.fromkeys(("bits", "wbits", "w_bit", "nbits", "n_bits", "qtype", "dtype"), _FORMAT),
    **dict.fromkeys(("sym", "symmetric", "zero_point", "asymmetric"), _FORMAT),
    **dict.fromkeys(("dataset", "calib_data", "data", "samples", "nsamples", "batches"), _BATCHES),
    **dict.fromkeys(("percdamp", "damp_percent", "dampening_frac"), "write damping=."),
    **dict.fromkeys(("desc_act", "act_order", "actorder"), "write order='activation'."),
    **dict.fromkeys(("alpha", "smoothing_strength", "migration_strength"), "write strength=."),
    **dict.fromkeys(("iters", "iterations", "n_iter", "epochs"), "write steps=."),
    **dict.fromkeys(("lr", "minmax_lr"), "write learning_rate=."),
    **dict.fromkeys(("r", "lora_rank", "low_rank"), "write rank=."),
}


def algorithm(name: str, fix: str) -> Callable[[Any], Any]:
    """Returns the decorator of a public algorithm, as `called` does."""

    def decorate(kind: Any) -> Any:
        fields = getattr(kind, "__dataclass_fields__", {})

        def instead(option: str) -> str | None:
            text = _INSTEAD.get(option)
            field = text.removeprefix("write ").partition("=")[0] if text else ""
            is_other = text is not None and text.startswith("write ") and field not in fields
            return None if is_other else text

        return called(f"algorithms.{name}", fix, instead)(kind)

    return decorate


def check_options(name: str, options: Any, **rules: Rule) -> None:
    """Checks the options of an algorithm that chooses codes: those that all of them have, and
    others by rules.
    """
    calibrator, offload = instance(Calibrator) | nothing(), flag() | choice("disk")
    fix = "leave it out for the default."
    check_fields(name, options, fix, calibrator=calibrator, offload=offload, **rules)
    if getattr(options, "checkpoint", None) is not None:
        as_path(name, options.checkpoint)
    check_weight(name, options.weight)


# Reports of algorithms on the matrices of weights, and on blocks.


def name_of(sites: Sequence[str], step: Sequence[int]) -> str:
    """Returns the name that reports use for the matrix of some sites, at an index of a stack."""
    index = f"[{', '.join(map(str, step))}]" if step else ""
    return f"{' and '.join(sites)}{index}"


@dataclasses.dataclass(frozen=True)
class MatrixReport:
    """The report of one matrix.

    Attributes:
      sites: the names of the sites that multiply by it.
      step: the number of the step in each scan over the weight around the site, such as a layer.
      at: the index among matrices that are multiplied by at once, such as an expert or a group of
        a convolution; `()` if there is only one.
      path: path of the weight.
      shape: (rows, columns): what the product keeps and what it sums over.
      before: the objective of rounding to nearest with the same scales, per input.
      after: that of the chosen codes.
      damping: what was added to the diagonal of the Hessian, relative to its mean; `None` if the
        matrix was rounded to nearest.
      inputs: number of inputs.
      dead: number of columns that no input reached.
      kept: number of rows that are rounded to nearest, because that has a smaller error.
      seconds: run time.
      why: why it was rounded to nearest without its inputs; empty if it was not.
      rank: the effective rank of the Hessian `H`, the sum of `x x'` over the inputs `x`:
        `trace(H)^2 / sum(H^2)`, with the squares of all entries. It is the number of columns if
        these are equally large and not correlated, and 1 if all inputs are multiples of one. A mean
        that inputs share, or a large column, makes it small, however many inputs there are. 0 if
        there are none.
      effective_inputs: the effective number of inputs: `trace(H)^2 / sum(|x|^4)`, where `trace(H)`
        is the sum of `|x|^2`. It is the number of inputs if these are equally long, and 1 if one
        is far longer than all others; never below `rank`, but for rounding. 0 if there are none,
        or if they are beyond the range of float32 (longer than 4e9, or all shorter than 1e-10).
    """

    sites: tuple[str, ...]
    step: tuple[int, ...]
    at: tuple[int, ...]
    path: str
    shape: tuple[int, int]
    before: float
    after: float
    damping: float | None
    inputs: int
    dead: int
    kept: int
    seconds: float
    why: str = ""
    rank: float = 0.0
    effective_inputs: float = 0.0

    @property
    def name(self) -> str:
        """Its name in the table."""
        return name_of(self.sites, (*self.step, *self.at))

    @property
    def layer(self) -> str:
        """Its name in the table, shared with the matrices that are multiplied by at once."""
        return name_of(self.sites, self.step)


def left_rounded(
    sites: tuple[str, ...],
    step: tuple[int, ...],
    index: tuple[int, ...],
    path: str,
    shape: tuple[int, int],
    reason: str,
) -> MatrixReport:
    """Returns the report of a matrix that is rounded to nearest without its inputs."""
    return MatrixReport(sites, step, index, path, shape, 0.0, 0.0, None, 0, 0, 0, 0.0, reason)


def effective(total: float, squares: float) -> float:
    """Returns how many equal numbers have the same sum, and the same sum of squares, as some
    numbers; 0 if these are zeros, or if a sum is not finite.
    """
    is_known = np.isfinite(total) and np.isfinite(squares) and squares > 0
    return float(total**2 / squares) if is_known else 0.0


def not_chosen(report: Any) -> tuple[list[tuple[str, str]], int]:
    """Returns the matrices of a report that were rounded to nearest for want of inputs, each with
    the reason, and how many it has. Sites that an algorithm does not support are not among them.
    """
    if isinstance(report, AlgorithmReport):
        entries = [(x.name, x.why) for x in report if x.why and x.why != UNKNOWN]
        return entries, len(report)
    if isinstance(report, BlocksReport):
        entries = [(name, reason) for name, reason in report.nearest if reason == NOT_REACHED]
        return entries, len(report.nearest) + sum(len(x.sites) for x in report)
    return [], 0


UNKNOWN = "its inputs cannot be observed"
"""Why a matrix is rounded to nearest whose site is not supported."""

NOT_REACHED = "which no batch has reached"
"""Why the weights of a site are rounded to nearest that no block has learned."""

_DEAD = 0.1
"""The part of the columns of a matrix from which on dead columns are reported below the table. Less
is common: borders of images, and channels that a ReLU holds at 0.
"""

_HEAD = (
    "matrix",
    "shape",
    "error rounded",
    "error chosen",
    "damping",
    "inputs",
    "effective",
    "rank",
    "dead columns",
    "rounded rows",
    "seconds",
)


Entry = TypeVar("Entry")


class Entries(Sequence[Entry]):
    """A report that is the sequence of its entries."""

    entries: tuple[Entry, ...]

    def __getitem__(self, index: Any) -> Any:
        return self.entries[index]

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)


@dataclasses.dataclass(frozen=True)
class AlgorithmReport(Tabular, Entries[MatrixReport]):
    """The entries of all matrices, in the order in which they were quantized.

    It prints as a table. Matrices that are multiplied by at once share one line, with the largest
    damping, the least and the most inputs, the least effective inputs and rank, and sums of
    everything else.

    Attributes:
      entries: one for each matrix.
      memory: the memory of the run, as estimated before it; `None` for one pass.
    """

    entries: tuple[MatrixReport, ...]
    memory: "Memory | None" = None

    @property
    def calibration(self) -> tuple[str, ...]:
        """What the inputs were too few for, as text; empty if they were enough.

        It counts matrices whose codes were chosen by their inputs, and names the worst:

        - those with fewer inputs than columns. Some changes of a row then change none of its
          products, so that the inputs do not decide between them.
        - those of the others with fewer `effective_inputs` than columns, and than half of their
          inputs. The longest inputs dominate the error, and the codes are fitted to these.
        - those with a tenth or more of their columns dead. Other inputs may reach these columns.

        A small `rank` is no fault by itself. In SmolLM2, with 4,096 inputs, it is 1 to 201, of 576
        or 1,536 columns.
        """
        fitted = [x for x in self.entries if not x.why]
        short = [(x.inputs, x) for x in fitted if x.inputs < x.shape[1]]
        led = [(x.effective_inputs, x) for x in fitted if x.inputs >= x.shape[1]]
        led = [(count, x) for count, x in led if 0 < count < min(x.shape[1], x.inputs / 2)]
        dead = [(x.dead, x) for x in fitted if x.dead and x.dead >= _DEAD * x.shape[1]]
        notes = []
        for matrices, pick, template in (
            (short, min, "is small: {} have fewer inputs than columns (least: "),
            (
                led,
                min,
                "is dominated by a few: {} have fewer effective inputs than columns (least: ",
            ),
            (dead, max, "leaves columns out: {} have a tenth or more dead (most: "),
        ):
            if matrices:
                count, x = pick(matrices, key=lambda item: item[0] / item[1].shape[1])
                text = template.format(f"{len(matrices)} of {len(fitted)} matrices")
                notes.append(f"calibration {text}{x.name}, {count:,.0f} of {x.shape[1]:,})")
        return tuple(notes)

    def table(self) -> Table:
        """Returns the rows as text, with `calibration` below."""
        lines: dict[Any, list[MatrixReport]] = {}
        for entry in self.entries:
            lines.setdefault((entry.layer, entry.path, entry.shape), []).append(entry)
        rows, below = tuple(map(_row, lines.values())), "\n".join(self.calibration)
        return Table(_HEAD, rows, below, texts=len(_HEAD))


def _row(entries: Sequence[MatrixReport]) -> tuple[str, ...]:
    head, several = entries[0], len(entries) > 1
    shape = f"{head.shape[0]} x {head.shape[1]}"
    damping = [entry.damping for entry in entries if entry.damping is not None]
    inputs = sorted({entry.inputs for entry in entries})
    total = {
        field: sum(getattr(entry, field) for entry in entries)
        for field in ("before", "after", "dead", "kept", "seconds")
    }
    return (
        head.layer if several else head.name,
        f"{len(entries)} x ({shape})" if several else shape,
        f"{total['before']:.4g}",
        f"{total['after']:.4g}",
        f"{max(damping):g}" if len(damping) == len(entries) else "rounded",
        f"{inputs[0]:,}" if len(inputs) == 1 else f"{inputs[0]:,} to {inputs[-1]:,}",
        f"{min(entry.effective_inputs for entry in entries):,.0f}",
        f"{min(entry.rank for entry in entries):,.1f}",
        f"{total['dead']:,}",
        f"{total['kept']:,}",
        f"{total['seconds']:.2f}",
    )


@dataclasses.dataclass(frozen=True)
class BlockReport:
    """The report of one block.

    Attributes:
      sites: the names of its sites.
      step: the number of the step in each scan around it, such as a layer.
      before: the loss of rounding to nearest: the squared error of each result of the block,
        relative to its squares, summed; the mean over batches.
      after: the final loss.
      best: the number of steps after which it was found; 0 is rounding to nearest.
      seconds: run time.
    """

    sites: tuple[str, ...]
    step: tuple[int, ...]
    before: float
    after: float
    best: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class BlocksReport(Printed, Entries[BlockReport]):
    """The entries of all blocks, in the order in which they were learned. Prints as a table.

    Attributes:
      entries: one for each block.
      nearest: the names of sites whose weights were rounded to nearest, with the reason.
    """

    entries: tuple[BlockReport, ...]
    nearest: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        lines = [f"{'loss before':>11} {'after':>10} {'best step':>9} {'seconds':>8}  block"]
        for x in self.entries:
            suffix = f" and {len(x.sites) - 1} more" if len(x.sites) > 1 else ""
            lines.append(
                f"{x.before:11.4g} {x.after:10.4g} {x.best:9} {x.seconds:8.2f}  "
                f"{name_of(x.sites[:1], x.step)}{suffix}"
            )
        lines += [f"rounded to nearest: {name}, {reason}" for name, reason in self.nearest]
        return "\n".join(lines)


# Matrices that few rows reached, such as experts with few tokens. Chance decides what few rows
# have in common, so no algorithm fits a matrix to them: rounding to nearest would lose less.


Array = np.ndarray

UNREACHED = "no batch has reached it"
"""Why a matrix is not fitted that has no inputs."""

_KNOWN = ("dot_general", "ragged_dot")
"""Operations whose rows are rows of the operand."""


def why_few(rows: float, channels: int) -> str:
    """Returns why a matrix is not fitted to its inputs."""
    return f"{rows:.0f} inputs of {channels} channels are too few" if rows else UNREACHED


def reached(flags: Any, op: str) -> Array | None:
    """Returns how many rows of an operand reached each matrix of its site, and how many there are:
    [*steps, *matrices, 2]; `None` if that is not known. Rows of zeros do not reach a matrix: they
    are those of other experts.
    """
    return None if flags is None or op not in _KNOWN else np.asarray(flags)[..., 2:]


def is_few(counts: Array, channels: int) -> Array:
    """Returns which matrices only some rows reached, and fewer than they have channels."""
    rows, total = counts[..., 0], counts[..., 1]
    return (rows == 0) | ((rows < total) & (rows < channels))


class Few:
    """The matrices that few rows reached, and their names with the reason, as far as they are asked
    for.
    """

    def __init__(self, stats: Mapping[str, Any]):
        self._flags = flags_of(stats)
        self.why: dict[str, str] = {}

    def share(self, site: Site, key: str, steps: tuple[int, ...] = ()) -> Array:
        """Returns the part of the rows of an operand that reaches each matrix of a site,
        [*matrices], in some steps of its scans; 1 if that is not known, or if there is no row.
        """
        counts = reached(self._flags.get(key), site.op)
        if counts is None:
            return np.ones(())
        rows, total = counts[steps][..., 0], counts[steps][..., 1]
        return np.where(rows > 0, rows, 1) / np.where(rows > 0, total, 1)

    def at(self, site: Site, key: str, channels: int, steps: tuple[int, ...] = ()) -> Any:
        """Returns which matrices of a site only few rows reached, [*matrices], in some steps of its
        scans; `False` if that is not known.
        """
        counts = reached(self._flags.get(key), site.op)
        if counts is None:
            return np.zeros((), bool)
        has_few = is_few(counts[steps], channels)
        for index in np.argwhere(has_few):
            rows = float(counts[(*steps, *index, 0)])
            self.why[name_of([site.name], (*steps, *index.tolist()))] = why_few(rows, channels)
        return has_few
