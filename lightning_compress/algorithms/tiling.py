"""How many rows of a weight are solved at a time: the unit that ranks share, and how many units go together.

A *row tile* is the unit. Its height depends on the number of rows and the kind of device alone, never on who solves it:
products are made tile by tile, and the same matrix shapes give the same last bits, so ranks can share the tiles of one
weight and end in the codes that one rank finds. What is done element by element takes several tiles together.

On a GPU tiles are higher, and more of them go together: there a launch takes as long for a few rows as for thousands.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import final

import torch

_UNIT = 32  # heights are multiples of it, but for the last


@final
@dataclass(frozen=True)
class Tiling:
    """Sizes that suit a kind of device.

    Attributes:
        most_rows: of a tile.
        least_rows: of a tile where a weight has up to four.
        stacked_rows, stacked_weights: what is solved together has at most so many rows, or weights, whichever is more.
        joined: entries of the Grams of weights that are solved together, at most; those of one alone may have more.
        searched: weights of which scales are searched at a time, with several copies of them in float32.
        copies_factor: the factor of a Gram is not made in its place.
    """

    most_rows: int
    least_rows: int
    stacked_rows: int
    stacked_weights: int
    joined: int
    searched: int
    copies_factor: bool

    def row_tiles(self, num_rows: int) -> list[slice]:
        """Tiles of nearly equal height that cover the rows; a function of their number alone.

        A power of two, or a multiple of eight of them, so that the usual numbers of ranks share them evenly: as few as
        keep them to `most_rows`, but up to four while they have `least_rows`.

        >>> tiles = ON_CPU.row_tiles
        >>> [tile.stop for tile in tiles(768)], len(tiles(4096)), len(tiles(9000)), tiles(200)
        ([384, 768], 8, 24, [slice(0, 200, None)])
        """
        least = max(-(-num_rows // self.most_rows), min(num_rows // self.least_rows, 4), 1)
        number = next((power for power in (8, 4, 2, 1) if power <= least), 1)
        if num_rows > number * self.most_rows:
            number = 2 * number if number < 8 else -(-least // 8) * 8
        units = -(-num_rows // _UNIT)
        bounds = [min(units * tile // number * _UNIT, num_rows) for tile in range(number + 1)]
        return [slice(start, stop) for start, stop in pairwise(bounds)]

    def stack_rows(self, num_channels: int) -> int:
        """At most so many rows are solved at a time: enough to amortize the cost of a call per channel, and where
        channels are few, as many as take no more memory.

        >>> ON_CPU.stack_rows(14336), ON_CPU.stack_rows(512)
        (2048, 6144)
        """
        return max(self.stacked_rows, self.stacked_weights // num_channels)

    def joined_weights(self, num_rows: int, num_channels: int) -> int:
        """At most so many weights [O, I], each with a Gram of its own, are solved together.

        >>> ON_GPU.joined_weights(1536, 2048), ON_GPU.joined_weights(2048, 768), ON_GPU.joined_weights(4096, 14336)
        (8, 42, 1)
        """
        return max(min(self.stack_rows(num_channels) // num_rows, self.joined // num_channels**2), 1)


ON_CPU = Tiling(512, 384, 2048, 3 << 20, 48 << 20, 1 << 18, copies_factor=False)
ON_GPU = Tiling(2048, 1536, 8192, 64 << 20, 32 << 20, 16 << 20, copies_factor=True)


def tiling_of(device: torch.device) -> Tiling:
    """The sizes for a device."""
    return ON_CPU if device.type == "cpu" else ON_GPU
