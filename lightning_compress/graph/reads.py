"""Modules whose weights are read by code that does not call them (`F.linear(x, self.dt_proj.weight)`).

Nobody can watch what such a weight is multiplied with, and readers of compressed checkpoints, which replace what a call
does, cannot serve it.
"""

import re
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import nn

from lightning_compress.graph.restore import assigned
from lightning_compress.recipe.forms import reader

_NUMBER = re.compile(r"\d+")
_PASSING_ON = ("__getattr__", "attribute_of_either", "passing_on")
"""Functions that are asked in a reader's name: of a subclass, and of `observed.observe`."""


@dataclass
class Reads:
    """Names of modules whose weight was read: by their own `forward` (or their `reader`'s), or by other code."""

    called: set[str] = field(default_factory=set)
    read: set[str] = field(default_factory=set)

    def without_call(self, names: Collection[str]) -> tuple[str, ...]:
        """Of `names` those that are read and not called. Repeated layers run once while a graph is recorded, so names
        that differ in numbers alone count as one."""
        alike = {like(name) for name in self.read} - {like(name) for name in self.called}
        return tuple(name for name in names if like(name) in alike)


def like(name: str) -> str:
    """
    >>> like("layers.3.experts.expert_12.wi")
    'layers.*.experts.expert_*.wi'
    """
    return _NUMBER.sub("*", name)


@contextmanager
def watching(root: nn.Module, names: Collection[str]) -> Iterator[Reads]:
    """Within: note whose weights are read, by whom."""
    reads = Reads()
    watched = {id(root.get_submodule(name)): name for name in names}
    usual = nn.Module.__getattr__

    def read(module: nn.Module, key: str) -> object:
        if key == "weight" and id(module) in watched:
            caller = sys._getframe(1)
            while caller.f_code.co_name in _PASSING_ON and caller.f_back is not None:
                caller = caller.f_back
            own = caller.f_locals.get("self") if caller.f_code.co_name == "forward" else None
            is_own = own is not None and own in (module, reader(module))
            (reads.called if is_own else reads.read).add(watched[id(module)])
        return usual(module, key)

    with assigned(nn.Module, __getattr__=read):
        yield reads
