"""How much memory a card must have beyond what a calibration's tensors take, by the rules of PyTorch's CUDA allocator.

    python benchmarks/full_card.py [--budgets none 293 80]    # a minute each on a CPU

There is no GPU in it. A run on the CPU says what it asks a device for: what computes, and on a stream of its own what
is copied there (activations beyond --budgets MiB wait in host memory, as do weights). That is replayed within a limit,
at which free memory is given back before a request fails, with segments of fixed size (PyTorch's default) and with one
segment per stream that expands (`PYTORCH_ALLOC_CONF=expandable_segments:True`). Llama-3-8B's proportions at a quarter
of the width (1024, 3584 inside, vocabulary 32064, 3 layers; 16 batches of 4096 tokens), `w4a16_gptq`; so bytes and the
allocator's own sizes are a sixteenth. After `c10/cuda/CUDACachingAllocator.cpp`.
"""

import argparse
import bisect
import weakref
from collections import deque
from dataclasses import dataclass, field
from itertools import count, groupby
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_compress.calibration.batches import collect
from lightning_compress.calibration.loop import calibrate
from lightning_compress.calibration.prepare import calibrating
from lightning_compress.export.writer import Unwritten
from lightning_compress.memory.activations import ActivationCache
from lightning_compress.memory.tracker import LiveMemory
from lightning_compress.memory.transfer import Lane, Sent
from lightning_compress.plugin.job import Job, prepare_job
from lightning_compress.plugin.settings import Settings
from lightning_compress.recipe.load import load_recipe

SCALE = 16  # 4 x 4
ROUND, SMALL, MEDIUM = 512, (1 << 20) // SCALE, (10 << 20) // SCALE
SMALL_PAGE, PAGE = (2 << 20) // SCALE, (20 << 20) // SCALE
COPIES = 10**9  # numbers of storages that are copies

Events = list[tuple[int, int]]


def prepared() -> Job:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=32064,
    )
    data = collect([{"input_ids": torch.randint(0, 32064, (4, 1024))} for _ in range(16)])
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    return prepare_job(model, data, Settings(load_recipe("w4a16_gptq"), None), torch.device("cpu"))


def requests(job: Job, budget: int | None) -> Events:
    """What a run asks a device for, with so many bytes of activations there."""
    memory, numbers, at_home = LiveMemory(), count(COPIES), WeakIdKeyDictionary()

    def is_away(_: Lane, tensor: Tensor) -> bool:
        return tensor.untyped_storage() in at_home

    def copied(tensor: Tensor) -> Tensor:
        with _disable_current_modes():
            copy = tensor.detach().clone()
        memory.ignore(copy)
        return copy

    def fetch(_: Lane, tensor: Tensor, *, wait: bool = False) -> Tensor:
        copy = copied(tensor)
        at_home[copy.untyped_storage()] = True
        return copy

    def send(lane: Lane, tensor: Tensor) -> Sent:
        if not is_away(lane, tensor):
            return Sent(tensor)
        copy, number = copied(tensor), next(numbers)
        size = copy.untyped_storage().nbytes()
        memory.events.append((number, size))
        weakref.finalize(copy.untyped_storage(), lambda: memory.events.append((number, -size)))
        return Sent(copy)

    def drop(cache: Any, value: object) -> None:  # as the cache's own, which tells homes by their device
        for leaf in cache._leaves(value):
            leaf.held.readers -= 1
            if not leaf.held.readers:
                cache._sent.pop(leaf.held, None)
                size = leaf.held.nbytes
                at = "_on_host" if leaf.held.place.untyped_storage() in at_home else "_on_device"
                setattr(cache, at, getattr(cache, at) - size)

    root, cache = job.target.root, job.run.flow.cache
    cache._device_budget = budget
    for tensor in (*root.parameters(), *root.buffers()):
        memory.ignore(tensor)
        at_home[tensor.untyped_storage()] = True
    with (
        patch.object(Lane, "is_away", is_away),
        patch.object(Lane, "send", send),
        patch.object(Lane, "fetch", fetch),
        patch.object(ActivationCache, "_drop", drop),
        calibrating(root),
        job.modules.in_place(),
        memory,
    ):
        deque(calibrate(job.run, Unwritten()), maxlen=0)
    return memory.events


class NoRoomError(Exception):
    """A request that the card cannot serve, whatever is given back."""


@dataclass
class Segment:
    """Of one stream and one kind of requests. `free`: (address, bytes), in order; `pages`: what is there of it."""

    page: int
    end: int = 0
    free: list[tuple[int, int]] = field(default_factory=list)
    pages: set[int] = field(default_factory=set)

    def range(self, start: int, size: int) -> range:
        """Pages that hold any of it."""
        return range(start // self.page, -(-(start + size) // self.page))

    def missing(self, start: int, size: int) -> set[int]:
        return set(self.range(start, size)) - self.pages

    def take(self, start: int, size: int) -> None:
        place = bisect.bisect_right(self.free, (start, 1 << 62)) - 1
        address, length = self.free[place]
        rest = [(address, start - address), (start + size, address + length - start - size)]
        self.free[place : place + 1] = [each for each in rest if each[1]]

    def give(self, start: int, size: int) -> None:
        """Free neighbours become one."""
        bisect.insort(self.free, (start, size))
        joined: list[tuple[int, int]] = []
        for address, length in self.free:
            if joined and sum(joined[-1]) == address:
                joined[-1] = (joined[-1][0], joined[-1][1] + length)
            else:
                joined.append((address, length))
        self.free = joined

    def idle(self) -> set[int]:
        """Pages of which nothing is in use."""
        inside = (range(-(-start // self.page), (start + size) // self.page) for start, size in self.free)
        return self.pages & {page for pages in inside for page in pages}

    def there(self) -> list[tuple[int, int]]:
        """Free ranges all of whose pages are there."""
        found: list[tuple[int, int]] = []
        for start, size in self.free:
            for has, pages in groupby(self.range(start, size), lambda page: page in self.pages):
                run = list(pages)
                first, last = max(start, run[0] * self.page), min(start + size, (run[-1] + 1) * self.page)
                if has and last > first:
                    found.append((first, last - first))
        return found


class Expanding:
    """One segment per stream and kind, of pages that come and go."""

    def __init__(self, limit: int) -> None:
        self.limit, self.allocated, self.most = limit, 0, 0
        self.segments: dict[object, list[Segment]] = {}
        self.blocks: dict[int, tuple[Segment, int, int]] = {}

    @property
    def reserved(self) -> int:
        return sum(len(each.pages) * each.page for found in self.segments.values() for each in found)

    def allocate(self, number: int, size: int) -> None:
        size = -(-size // ROUND) * ROUND
        pool = self.segments.setdefault((number >= COPIES, size <= SMALL), [])
        segment, start = self.place(pool, size)
        segment.take(start, size)
        self.blocks[number] = segment, start, size
        self.allocated += size
        self.most = max(self.most, self.allocated)

    def place(self, pool: list[Segment], size: int) -> tuple[Segment, int]:
        if not pool:
            pool.append(Segment(SMALL_PAGE if size <= SMALL else PAGE))
        (segment,) = pool
        fitting = [(length, start) for start, length in segment.there() if length >= size]
        if fitting:
            return segment, min(fitting)[1]
        last = segment.free[-1][0] if segment.free and sum(segment.free[-1]) == segment.end else segment.end
        starts = [start for start, length in segment.free if length >= size]
        start = min([*starts, last], key=lambda start: len(segment.missing(start, size)))
        self.make_room(
            len(segment.missing(start, size)) * segment.page, lambda: self.missing_bytes(segment, start, size)
        )
        end = max(segment.end, -(-(start + size) // segment.page) * segment.page)
        if end > segment.end:
            segment.give(segment.end, end - segment.end)
            segment.end = end
        segment.pages |= segment.missing(start, size)
        return segment, start

    @staticmethod
    def missing_bytes(segment: Segment, start: int, size: int) -> int:
        return len(segment.missing(start, size)) * segment.page

    def make_room(self, more: int, again: Any) -> None:
        """Give back what is idle where `more` bytes would be too many; `again`: how many they are then."""
        if self.reserved + more <= self.limit:
            return
        for found in self.segments.values():
            for segment in found:
                segment.pages -= segment.idle()
        if self.reserved + again() > self.limit:
            raise NoRoomError

    def free(self, number: int) -> None:
        segment, start, size = self.blocks.pop(number)
        segment.give(start, size)
        self.allocated -= size


class Fixed(Expanding):
    """Segments as large as what they were made for; one is given back as a whole."""

    def place(self, pool: list[Segment], size: int) -> tuple[Segment, int]:
        fitting = [
            (length, index, start)
            for index, segment in enumerate(pool)
            for start, length in segment.free
            if length >= size and segment.pages
        ]
        if fitting:
            _, index, start = min(fitting)
            return pool[index], start
        whole = SMALL_PAGE if size <= SMALL else PAGE if size < MEDIUM else -(-size // SMALL_PAGE) * SMALL_PAGE
        self.make_room(whole, lambda: whole)
        pool.append(Segment(whole, end=whole, free=[(0, whole)], pages={0}))
        return pool[-1], 0


def replayed(events: Events, kind: type[Expanding], limit: int) -> Expanding:
    allocator = kind(limit)
    for number, size in events:
        if size > 0:
            allocator.allocate(number, size)
        elif number in allocator.blocks:
            allocator.free(number)
    return allocator


def least(events: Events, kind: type[Expanding], allocated: int) -> float:
    """The smallest card on which all requests are served, over what is allocated at most, in steps of a hundredth."""
    for hundredths in count(100):
        try:
            replayed(events, kind, allocated * hundredths // 100)
        except NoRoomError:
            continue
        return hundredths / 100
    raise AssertionError


def main() -> None:
    """Print a row for each budget."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budgets", nargs="+", default=["none", "293", "80", "0"])
    print(f"{'on the device, MiB':20}{'tensors, MiB':>14}{'fixed segments':>16}{'expanding':>12}")
    for text in parser.parse_args().budgets:
        events = requests(prepared(), None if text == "none" else int(text) << 20)
        allocated = replayed(events, Expanding, 1 << 60).most
        ratios = [least(events, kind, allocated) for kind in (Fixed, Expanding)]
        print(f"{text:20}{allocated / 2**20:14.0f}{ratios[0]:16.2f}{ratios[1]:12.2f}", flush=True)


if __name__ == "__main__":
    main()
