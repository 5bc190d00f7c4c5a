"""What every algorithm is: a frozen set of options with a pure function (weight, statistics, scheme) -> `Solved`.

Method: solving has a serial part, done once for all output rows (`prepare`: factorize the Gram, choose scales that rows
share), and a part in which every output row is independent of the others (`solve_tiles`). The unit of the second is a
row tile (see `tiling`); what is done element by element takes several together (`stacks`), also of several weights
(experts), which saves the cost of calls.

Alternative not taken: one `solve` per module. Modules that read the same input (q, k, v; gate, up) share their Gram, so
their rows are stacked and the factor is computed once; `split` takes the result apart again.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar, final

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from lightning_compress.algorithms.grids import Grid
from lightning_compress.algorithms.rows import ByRows, here
from lightning_compress.algorithms.scales import Scales, choose_scales, num_groups
from lightning_compress.algorithms.target import Correction
from lightning_compress.algorithms.tiling import Tiling, tiling_of
from lightning_compress.errors import NonFiniteError, SolveError
from lightning_compress.statistics import Drift, InputGram, Statistic

Item = TypeVar("Item")
Kinds = Collection[type[Statistic]]
"""Statistics that there are, whether an algorithm asks for them or not."""


@final
@dataclass(frozen=True)
class Solved:
    """A quantized weight: the value of a code is `(code - zero_point) * scale`.

    Attributes:
        codes: [O, I]: int8, in [-2^(b-1), 2^(b-1) - 1], or float8_e4m3fn (see `Grid.code_dtype`).
        scale: [O, G] in the storage dtype, or float32 where that has fewer bits; [O, 1] per channel and per tensor.
            Rows that share scales have each a copy until `split` reduces these to what is stored: [1] per tensor.
        zero_point: int8, the shape of `scale`; None for symmetric schemes.
        row_error: float64 [O], the error of each output row, (w - q) C (w - q)ᵀ with the Gram C (identity without one);
            where a correction was made, the error against what the original model has there.
        row_energy: float64 [O], w C wᵀ, or the mean square of that.
        damping: what was added to the Gram's diagonal, as a fraction of its mean; 0 where nothing was.
        notes: what the user should know, as sentences.
        rows_together: rows of a module that share scales; None: all.
        global_scale: what scales are stored times, see `Grid`; all modules that are solved together have one.
        correction: what was chosen (see `Correction.record`) where a correction was made.
        row_rounds: int8 [O], how many rounds of refitting were chosen for each row; None: their number was given.
    """

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None
    row_error: Tensor
    row_energy: Tensor
    damping: float = 0.0
    notes: tuple[str, ...] = ()
    rows_together: int | None = 1
    global_scale: float | None = None
    correction: Mapping[str, float] = field(default_factory=dict)
    row_rounds: Tensor | None = None

    @property
    def chosen(self) -> dict[str, float]:
        """What was chosen by batches that were held out, by name; `rounds` is the mean of all rows."""
        rounds = {} if self.row_rounds is None else {"rounds": float(self.row_rounds.float().mean())}
        return {**self.correction, **rounds}

    def to(self, device: torch.device) -> "Solved":
        """The same, on `device`."""
        return replace(
            self,
            codes=self.codes.to(device),
            scale=self.scale.to(device),
            zero_point=None if self.zero_point is None else self.zero_point.to(device),
            row_error=self.row_error.to(device),
            row_energy=self.row_energy.to(device),
            row_rounds=None if self.row_rounds is None else self.row_rounds.to(device),
        )

    @property
    def error(self) -> float:
        """Relative output error tr((W-Q) C (W-Q)ᵀ) / tr(W C Wᵀ); 0 where there is no output at all."""
        error, energy = torch.stack([self.row_error.sum(), self.row_energy.sum()]).tolist()  # a GPU is waited for once
        return float(error / energy) if energy > 0 else 0.0


@final
@dataclass(frozen=True)
class Factor:
    """The Gram C, damped and factorized: H = L Lᵀ with the channels in `order`.

    Attributes:
        order: int64 [I], the channel at each place; channels are quantized from the last place to the first.
        lower: float32 [I, I], L with each column divided by its diagonal entry, so the diagonal is 1.
        pivots: float32 [I], the squared diagonal of L.
        damping: the fraction of the mean diagonal that was added.
        added: what was added to each diagonal entry.
        notes: why `damping` is not what was asked for, if so.
    """

    order: Tensor
    lower: Tensor
    pivots: Tensor
    damping: float
    added: float
    notes: tuple[str, ...] = ()


@final
@dataclass(frozen=True)
class Prepared:
    """What all row tiles of a weight share.

    Attributes:
        grid: of the scheme.
        gram: C, float32 [I, I]; None where the algorithm had none.
        weighting: float32 [I], what an error in each input channel counts when scales are searched; None: all the same.
        scale_search: search scales, instead of covering the whole range.
        known_scales: of all rows, [O, G], where rows share them.
        factor: for algorithms that propagate errors.
        correction: what is quantized in the weight's place; None: the weight.
        notes: see `Solved`.
    """

    grid: Grid
    gram: Tensor | None = None
    weighting: Tensor | None = None
    scale_search: bool = False
    known_scales: Scales | None = None
    factor: Factor | None = None
    correction: Correction | None = None
    notes: tuple[str, ...] = ()

    def scales_of(self, weight: Tensor, rows: slice) -> Scales:
        """The scales of the rows `rows` of the weight, which are `weight` [R, I]."""
        if self.known_scales is not None:
            return self.known_scales.rows(rows)
        return choose_scales(weight, self.weighting, self.grid, self.scale_search)


@final
@dataclass(frozen=True)
class RowTile:
    """A row tile of a weight [O, I], and what is prepared of it."""

    weight: Tensor
    rows: slice
    prepared: Prepared

    @property
    def values(self) -> Tensor:
        """[R, I]."""
        return self.weight[self.rows]

    @property
    def height(self) -> int:
        """R."""
        return int(self.rows.stop - self.rows.start)


@dataclass(frozen=True)
class Algorithm(ABC):
    """A solver. Subclasses are final frozen dataclasses of their options.

    Attributes:
        signed_scales: a searched scale of a symmetric scheme may be negative. Never used where inputs are quantized
            too, because kernels with int8 inputs take scales to be unsigned (vLLM issue 48905).
    """

    signed_scales: bool = field(default=True, kw_only=True)

    @property
    def corrects_residual(self) -> bool:
        """Whether `Drift`, if it is among the statistics, is to count the error of what outputs are added to."""
        return False

    @abstractmethod
    def statistics(self, weights: QuantizationArgs) -> tuple[type[Statistic], ...]:
        """The statistics that `solve` needs for this scheme; none for data-free algorithms."""

    @abstractmethod
    def prepare(
        self,
        weight: Tensor,
        statistics: Mapping[type[Statistic], Statistic],
        args: QuantizationArgs,
        scale_dtype: torch.dtype,
        row_splits: Sequence[int],
        by_rows: ByRows,
    ) -> Prepared:
        """The serial part. The arguments and errors are those of `solve`; `by_rows` fills what can be shared of it."""

    @abstractmethod
    def solve_tiles(self, tiles: Sequence[RowTile]) -> list[Solved]:
        """Solve row tiles of weights that have one scheme and one width, each as it would be without the others."""

    @abstractmethod
    def costs(self, num_rows: int, num_channels: int) -> tuple[float, float]:
        """What every rank that solves rows of a weight [O, I] has to do first, and what all its rows cost then: in time
        relative to one another, and to other algorithms'. On a GPU about float32 FLOP, beside `calls`."""

    @abstractmethod
    def calls(self, num_rows: int, num_channels: int, tiling: Tiling, number: int = 1) -> float:
        """How many operators' time goes by on a GPU until so many weights [O, I] are solved together, beside that of
        large products."""

    @abstractmethod
    def prepare_bytes(
        self, num_rows: int, num_channels: int, args: QuantizationArgs, kinds: Kinds, tiling: Tiling
    ) -> tuple[int, int]:
        """At most alive while `prepare` runs on a weight [O, I], and of that what it returns, beside its arguments."""

    @abstractmethod
    def tiles_bytes(
        self,
        heights: Sequence[int],
        num_channels: int,
        args: QuantizationArgs,
        kinds: Kinds,
        tiling: Tiling,
        number: int = 1,
    ) -> int:
        """At most alive inside `solve_tiles` for tiles of so many rows, of a `number` of weights, with the result,
        beside its arguments."""

    def workspace_bytes(
        self,
        num_rows: int,
        num_channels: int,
        args: QuantizationArgs,
        kinds: Kinds,
        tiling: Tiling,
        number: int = 1,
    ) -> int:
        """At most alive while a `number` of weights [O, I] are solved together, with the results, beside weights and
        statistics.

        A closed form of those above: while the last is prepared; then beside what is prepared a stack of tiles with the
        results of all others, or all results twice, when they are joined.
        """
        of_one = [tile.stop - tile.start for tile in tiling.row_tiles(num_rows)]
        most = tiling.stack_rows(num_channels)
        all_heights = of_one * min(number, most // num_rows + 1)
        heights = max(runs(all_heights, all_heights, most), key=len)
        peak, held = self.prepare_bytes(num_rows, num_channels, args, kinds, tiling)
        tiles = self.tiles_bytes(heights, num_channels, args, kinds, tiling, number)
        others = result_bytes(number * num_rows - sum(heights), num_channels, args)
        joined = 2 * result_bytes(number * num_rows, num_channels, args) if len(of_one) > 1 else 0
        return max((number - 1) * held + peak, number * held + max(tiles + others, joined))

    def solve(
        self,
        weight: Tensor,
        statistics: Mapping[type[Statistic], Statistic],
        args: QuantizationArgs,
        scale_dtype: torch.dtype,
        row_splits: Sequence[int] | None = None,
    ) -> Solved:
        """Quantize `weight` [O, I], the stacked rows of all modules that share an input.

        Args:
            weight: any float dtype; not modified.
            statistics: of the shared input, by class; at least those that `statistics` names.
            args: the scheme of the weights: what `make_grid` takes.
            scale_dtype: the dtype in which scales are stored; they are rounded to it before solving.
            row_splits: the rows of each module, which sum to O; one module by default.

        Raises:
            SolveError: the scheme does not fit the weight, or the Gram cannot be factorized.
            NonFiniteError: NaN or Inf in the weight or the Gram.
        """
        splits = [weight.shape[0]] if row_splits is None else row_splits
        prepared = self.prepare(weight, statistics, args, scale_dtype, splits, here)
        tiles = [RowTile(weight, rows, prepared) for rows in tiling_of(weight.device).row_tiles(len(weight))]
        return join(self.solve_tiles(tiles))


def stacks(tiles: Sequence[RowTile]) -> list[list[RowTile]]:
    """Tiles of one width in runs of at most `stack_rows` (or one tile)."""
    if not tiles:
        return []
    num_channels, tiling = tiles[0].weight.shape[1], tiling_of(tiles[0].weight.device)
    return runs(tiles, [tile.height for tile in tiles], tiling.stack_rows(num_channels))


def runs(items: Sequence[Item], sizes: Sequence[int], limit: int) -> list[list[Item]]:
    """Consecutive items together as long as their sizes sum to at most `limit`; one that is larger is alone.

    >>> runs("abcd", [1, 2, 9, 1], 3)
    [['a', 'b'], ['c'], ['d']]
    """
    found: list[list[Item]] = []
    total = 0
    for item, size in zip(items, sizes, strict=True):
        if not found or total + size > limit:
            found.append([])
            total = 0
        found[-1].append(item)
        total += size
    return found


def result_bytes(num_rows: int, num_channels: int, args: QuantizationArgs) -> int:
    """At most the bytes of the `Solved` of a weight [O, I]: codes, float32 scales, zero-points, and what rows have.

    >>> result_bytes(10, 256, QuantizationArgs(num_bits=4, strategy="group", group_size=128))
    2830
    """
    return num_rows * (num_channels + 5 * num_groups(num_channels, args) + 17)


def join(parts: Sequence[Solved]) -> Solved:
    """One `Solved` from those of consecutive row tiles."""
    if len(parts) == 1:
        return parts[0]
    zero_points = [part.zero_point for part in parts if part.zero_point is not None]
    rounds = [part.row_rounds for part in parts if part.row_rounds is not None]
    return replace(
        parts[0],
        codes=torch.cat([part.codes for part in parts]),
        scale=torch.cat([part.scale for part in parts]),
        zero_point=torch.cat(zero_points) if zero_points else None,
        row_error=torch.cat([part.row_error for part in parts]),
        row_energy=torch.cat([part.row_energy for part in parts]),
        row_rounds=torch.cat(rounds) if rounds else None,
    )


def split(solved: Solved, row_splits: Sequence[int]) -> list[Solved]:
    """The `Solved` of every stacked module; `row_splits` are their rows. Of rows that share scales one copy is left."""
    assert sum(row_splits) == solved.codes.shape[0]
    members = []
    start = 0
    for num_rows in row_splits:
        rows = slice(start, start + num_rows)
        stored = slice(start, start + num_rows, solved.rows_together or num_rows)
        scale, zero_point = solved.scale[stored], None if solved.zero_point is None else solved.zero_point[stored]
        if solved.rows_together is None:
            scale, zero_point = scale.reshape(1), None if zero_point is None else zero_point.reshape(1)
        members.append(
            replace(
                solved,
                codes=solved.codes[rows],
                scale=scale,
                zero_point=zero_point,
                row_error=solved.row_error[rows],
                row_energy=solved.row_energy[rows],
                row_rounds=None if solved.row_rounds is None else solved.row_rounds[rows],
            )
        )
        start += num_rows
    return members


def check_weight(weight: Tensor, args: QuantizationArgs) -> None:
    """Raise `NonFiniteError` for NaN or Inf, `SolveError` for what is no matrix or holds no rows."""
    if weight.ndim != 2 or weight.numel() == 0 or not weight.is_floating_point():
        raise SolveError(f"The weight {tuple(weight.shape)}, {weight.dtype}, is no floating-point matrix [out, in].")
    if not is_finite(weight):
        raise NonFiniteError(
            f"The weight {tuple(weight.shape)} holds NaN or Inf, so {args.num_bits}-bit codes cannot be found for it; "
            "repair the checkpoint or exclude the module with `ignore`."
        )


def is_finite(tensor: Tensor) -> bool:
    """Whether there is neither NaN nor Inf in it; ten times as fast as looking at every value (on a CPU)."""
    values = tensor.float() if tensor.itemsize == 1 else tensor  # of float8 torch finds no ends
    return values.numel() == 0 or bool(torch.isfinite(torch.stack(values.aminmax())).all())


def input_gram(statistics: Mapping[type[Statistic], Statistic]) -> InputGram | None:
    """The `InputGram` among `statistics`, by itself or in a `Drift`, or None."""
    drift = drift_of(statistics)
    gram = statistics.get(InputGram) if drift is None else drift.inputs
    assert gram is None or isinstance(gram, InputGram)
    return gram


def drift_of(statistics: Mapping[type[Statistic], Statistic]) -> Drift | None:
    """The `Drift` among `statistics`, in whichever form, or None."""
    return next((statistic for statistic in statistics.values() if isinstance(statistic, Drift)), None)
