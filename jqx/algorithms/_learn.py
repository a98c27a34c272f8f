"""Learns the rounding of weights block by block, from the results of each block."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import fail, message
from ..tensor import QSpec
from ..transforms import Plan, Site
from ..transforms._shared import (
    Address,
    Chosen,
    Inapplicable,
    OnNonfinite,
    TracedOnce,
    check_mode,
    look_at_batches,
    progress_bar,
)
from ._blocks import labels_of
from ._descent import descended
from ._distance import distance
from ._few import Few
from ._grids import Grids
from ._leaves import Leaves
from ._offload import Offload, Where, on_device
from ._once import apart, bodies_of
from ._report import NOT_REACHED, BlockReport, BlocksReport, name_of
from ._sequential import Pairs, Stream, Walk
from ._shelf import InMemory
from ._shifts import Shifts, moved, nearest, rounded
from ._stages import Replaced, Scope, Stage, Steps
from ._tiles import Given, Tile
from ._traced import Traced

Array = np.ndarray

_FUNCTION = "algorithms.auto_round"


class Options(Protocol):
    """Options of learning; see `auto_round`."""

    @property
    def steps(self) -> int: ...
    @property
    def learning_rate(self) -> float | None: ...
    @property
    def blocks(self) -> str | None: ...
    @property
    def ranges(self) -> bool: ...
    @property
    def weight(self) -> Callable[..., Any] | None: ...
    @property
    def offload(self) -> Where: ...
    @property
    def seed(self) -> int: ...

    def spec_of(self, spec: QSpec) -> QSpec:
        """Returns a spec with the calibrator that computes the initial ranges."""
        ...


def learned(
    options: Options,
    f: Callable[..., Any],
    plan: Plan,
    params: Any,
    batches: Iterable[Any],
    *,
    progress: bool = False,
    on_nonfinite: OnNonfinite = "error",
) -> Chosen:
    """Returns the parameters with codes that are learned block by block.

    Args:
      options: the options of learning.
      f: the function.
      plan: the plan.
      params: its parameters, in float.
      batches: as in `calibrate_batches`; all are held.
      progress: whether to show a progress bar.
      on_nonfinite: as in `calibrate_batches`.
    """
    every, ignores = list(batches), check_mode(_FUNCTION, on_nonfinite)
    f = TracedOnce(f)
    few = Few(look_at_batches(_FUNCTION, f, plan, params, every, on_nonfinite))
    traced = Traced.of(f, plan, params, every, options.weight, ignores=ignores)
    plan, bodies = traced.plan, bodies_of(traced.plan, traced.calls[0].jaxpr)
    sites = [site for site in plan.sites if site.address in bodies]
    labels = labels_of(sites, bodies, options.blocks)
    if options.blocks is not None and not any(label != here for here, label in labels.items()):
        raise fail(
            _FUNCTION,
            "`blocks` matches nothing.",
            given=f"blocks == {options.blocks!r}; paths such as {[x.path for x in sites[:3]]}",
            expected="a pattern that matches in paths of weights",
            fix="print the plan: it shows all paths.",
        )
    own = apart(plan, traced.groups, traced.elements, labels) & {*labels}
    walk = _Learning(options, traced, own, few)
    scopes = traced.scopes(lambda site: site.address in own, labels)
    both = walk.current, dict(traced.originals)
    offload = Offload(options.offload)
    streams = [Stream(Leaves(x), offload) for x in both]
    walk.bar = progress_bar("auto_round", "block") if progress else None
    walk.go(traced.frames(scopes, streams))
    if walk.bar is not None:
        walk.bar.close()
    report = BlocksReport(tuple(walk.entries), tuple(walk.nearest()))
    codes = InMemory(walk.grids).quantized()
    chosen = plan.map_weights(lambda weight, _: codes[weight.path], params)
    return Chosen(chosen, report, few=few.why)


@dataclasses.dataclass(frozen=True, eq=False)
class _Block:
    """A block in one step of the scans around it.

    Attributes:
      stages: its stage and scope for each batch.
      steps: the numbers of the steps.
      tiles: the tiles of its weights.
      inputs: its inputs for each batch, as they are kept.
      targets: its results in float, likewise.
      decided: the integers that it computes from floats.
      batches: the indices of the batches.
    """

    stages: list[tuple[Stage, Scope]]
    steps: Steps
    tiles: list[Tile]
    inputs: list[list[Any]]
    targets: list[list[Any]]
    decided: list[Any]
    batches: list[int]

    @property
    def given(self) -> list[Given]:
        """The numbers of its tiles."""
        return [tile.given for tile in self.tiles]


class _Learning(Walk):
    """Runs blocks with weights in float and with learned ones, and learns the latter.

    Attributes:
      current: the leaves of the parameters as they are at each stage, by index.
      grids: the grids of all weights.
      entries: the entries of the report.
      bar: shows how many blocks are done, or `None`.
    """

    def __init__(self, options: Options, traced: Traced, own: set[Address], few: Few):
        super().__init__(traced.plan, self._alone)
        self._few = few
        self._kinds["block"] = self._block
        self._options, self._traced, self._own = options, traced, own
        self.current, self.grids = dict(traced.originals), traced.grids(options.spec_of)
        self.entries: list[BlockReport] = []
        self.bar: Any = None
        self._programs: dict[Any, Any] = {}
        # Weights that are not learned must be rounded before a block gets its inputs.
        for site in self.plan.sites:
            if site.address not in own:
                for path in self.plan.weights_in(site):
                    self._round(path)

    def _round(self, path: str) -> None:
        grids = self.grids[self._traced.group_of(path).path]
        part = next(x for x in grids.parts if x.path == path)
        place, own = self._traced.places[path], part.elements
        leaf = self._traced.originals[place]
        values = grids.values(np.arange(own.start, own.stop)).reshape(leaf.shape)
        self.current[place] = jnp.asarray(values, leaf.dtype)

    def nearest(self) -> Iterable[tuple[str, str]]:
        """Yields the sites whose weights were rounded to nearest, with the reason."""
        reached = {name for entry in self.entries for name in entry.sites}
        for site in self.plan.sites:
            if not any(self.plan.weight_at(x.path) for x in site.operands):
                continue
            if site.address not in self._own:
                yield site.name, "whose weight other blocks or steps of a loop share"
            elif site.name not in reached:
                yield site.name, NOT_REACHED
        yield from self._few.why.items()

    def _alone(self, *_: Any) -> None:
        """Does nothing: all sites belong to blocks."""
        raise AssertionError

    def _block(self, pairs: Pairs, steps: Steps) -> None:
        start, sites = time.perf_counter(), self._sites(pairs[0][0])
        block = self._prepared(pairs, steps, self._tiles(sites, steps))
        entry, found = self._learned(block)
        for tile, one in zip(block.tiles, found, strict=True):
            values, affine = rounded(tile.rounding, tile.given, one)
            tile.write(np.asarray(values), affine)
            leaf, mask = self.current[tile.place], tile.given.own
            self.current[tile.place] = Replaced(leaf, values, mask, tile.index, False).whole()
        for (stage, (own, exact)), target in zip(pairs, block.targets, strict=True):
            own.run(stage, steps)
            exact.put(stage, list(map(on_device, target)))
        names, seconds = tuple(site.name for site in sites), time.perf_counter() - start
        self.entries.append(BlockReport(names, steps, *entry, seconds))
        if self.bar is not None:
            self.bar.update()

    def _learned(self, block: _Block) -> tuple[tuple[float, float, int], list[Shifts]]:
        """Returns the loss of rounding to nearest, the least loss, after how many steps it was
        found, and what was learned then.
        """
        options = self._options
        rate = options.learning_rate or 1 / options.steps
        losses: dict[int, Any] = {}

        def step(found: list[Shifts], i: int, length: float) -> list[Shifts]:
            found, losses[i] = self._call("step", block, i, found, rate * length)
            return found

        found = descended(
            [nearest(tile.rounding, tile.given, options.ranges) for tile in block.tiles],
            options.steps,
            len(block.stages),
            options.seed,
            lost=lambda found, i: self._call("lost", block, i, found),
            moved=step,
            refuse=lambda lost, _: self._not_finite(block, lost, None),
        )
        for i, lost in losses.items():
            if not np.isfinite(lost):
                raise self._not_finite(block, float(lost), block.batches[i])
        return (found.before, found.after, found.best), found.kept

    def _sites(self, stage: Stage) -> list[Site]:
        return [
            site
            for site in self.plan.sites
            if site.address in self._own
            and any(site.address[: len(here)] == here for here in stage.inside)
        ]

    def _tiles(self, sites: Sequence[Site], steps: Steps) -> list[Tile]:
        """Returns the parts of weights that some sites multiply by."""
        numbers: dict[str, list[Array]] = {}
        fixed: dict[str, list[Array]] = {}
        for site in sites:
            for operand in site.operands:
                if operand.path is not None:
                    path = self._traced.group_of(self.plan.weights_in(site)[0]).path
                    own = self._traced.elements[operand.key][steps]
                    numbers.setdefault(path, []).append(own.ravel())
                    key = next(x.key for x in site.operands if x.path is None)
                    few = self._few.at(site, key, own.shape[-1], steps)
                    few = np.broadcast_to(few, own.shape[:-2])
                    fixed.setdefault(path, []).append(own[few].ravel())
        tiles = []
        for path, each in numbers.items():
            grids: Grids = self.grids[path]
            every, few = np.concatenate(each), np.concatenate(fixed[path])
            for part in grids.parts:
                mine = part.elements
                own = every[(every >= mine.start) & (every < mine.stop)]
                if own.size:
                    tiles.append(Tile.of(self._traced.places[part.path], grids, part, own, few))
        return tiles

    def _prepared(self, pairs: Pairs, steps: Steps, tiles: list[Tile]) -> _Block:
        """Runs the block in float, with the integers that it decides on the quantized inputs."""
        block = _Block([], steps, tiles, [], [], [], [own.batch for _, (own, _) in pairs])
        for stage, (own, exact) in pairs:
            read = [own.values[x] for x in stage.reads]
            given = list(map(on_device, read))
            _, made = own.scope.run(stage, self.current, steps, given, None, True)
            floats = [on_device(exact.values[x]) for x in stage.reads]
            results, _ = own.scope.run(stage, self._traced.originals, steps, floats, made)
            block.stages.append((stage, own.scope))
            block.inputs.append(read)
            block.targets.append(list(map(exact.stream.offload.kept, results)))
            block.decided.append(made)
        return block

    def _call(self, name: str, block: _Block, i: int, *given: Any) -> Any:
        """Calls a program on one batch."""
        stage, scope = block.stages[i]
        inputs, targets = (list(map(on_device, x[i])) for x in (block.inputs, block.targets))
        at = [tile.index for tile in block.tiles], block.steps
        program, batch = (
            self._program(name, block, stage, scope),
            (inputs, targets, block.decided[i]),
        )
        try:
            return program(block.given, self.current, at, batch, *given)
        except ValueError as error:
            if "differentiation" not in str(error):
                raise
            raise Inapplicable(self._refusal(block, error)) from error

    def _name(self, block: _Block) -> str:
        sites = [site.name for site in self._sites(block.stages[0][0])]
        return f"the block of {name_of(sites[:1], block.steps)}"

    def _refusal(self, block: _Block, error: Exception) -> str:
        return message(
            _FUNCTION,
            "a block cannot be differentiated.",
            given=f"{self._name(block)}: {error}",
            expected="no loop of unknown length in a block",
            fix="use smaller blocks, such as blocks='.*', where each weight is a block.",
        )

    def _not_finite(self, block: _Block, lost: float, batch: int | None) -> ValueError:
        where = f"{len(block.stages)} batches" if batch is None else f"batch {batch}"
        text = message(
            _FUNCTION,
            f"the loss of {self._name(block)} is not finite.",
            given=f"a loss of {lost} on {where}",
            expected="finite results, also with rounded weights",
            fix="leave such batches out, or pass on_nonfinite='ignore', which leaves out rows "
            "that are not finite.",
        )
        return ValueError(text)

    def _program(self, name: str, block: _Block, stage: Stage, scope: Scope) -> Any:
        """Returns the program of a loss or a step, compiled once for equal blocks."""
        kinds = [(x.place, x.rounding, x.index == tuple(block.steps)) for x in block.tiles]
        key = name, id(stage), tuple(kinds)
        if key in self._programs:
            return self._programs[key]

        def lost(given: Any, params: Any, at: Any, batch: Any, found: list[Shifts]) -> jax.Array:
            indices, steps = at
            own = dict(params)
            each = zip(kinds, given, indices, found, strict=True)
            for (place, rounding, stepped), x, index, one in each:
                values, _ = rounded(rounding, x, one)
                where = steps if stepped else index
                own[place] = Replaced(own[place], values, x.own, where, stepped)
            inputs, targets, decided = batch
            results, _ = scope.run(stage, own, steps, inputs, decided)
            return distance(results, targets)

        def step(*given: Any) -> tuple[list[Shifts], jax.Array]:
            *values, found, rate = given
            now, slope = jax.value_and_grad(partial(lost, *values))(found)
            return moved(found, slope, rate, given[0]), now

        self._programs[key] = jax.jit({"lost": lost, "step": step}[name])
        return self._programs[key]
