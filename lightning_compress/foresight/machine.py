"""How fast a machine is: what turns work and bytes into seconds.

Rates come from a probe of this machine (`probe`), from its cache, or, for a GPU that is only planned for, from its data
sheet with the fractions of `_REACHED`; each says where it comes from.
"""

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from typing import Any, Literal, final

from lightning_compress.errors import CompressionError
from lightning_compress.memory.work import Work

Origin = Literal["measured", "cached", "assumed", "refitted", "given"]
UNITS = {
    "product": "FLOP/s",
    "attention": "FLOP/s",
    "elementwise": "B/s",
    "call": "calls/s",
    "mapping": "B/s",
    "solve": "units/s (see Algorithm.costs)",
    "packing": "weights/s",
    "writing": "B/s",
    "disk_read": "B/s",
    "disk_write": "B/s",
    "scratch_read": "B/s",
    "to_device": "B/s",
    "to_host": "B/s",
    "duplex": "B/s",
    "pinning": "B/s",
    "start": "1/s",
}
"""By the first word of a rate's name; the second is a dtype, or "shards". `mapping` is of memory that a CPU gets from
the system again and again; `solve` is of a CPU, as a GPU's solves are calls and products; `writing` of a shard, until
it is read back and on disk, `writing shards` of several at a time; `disk_read` of weights from a cold disk;
`scratch_read` and `disk_write` of activations; `duplex` of both directions of the link at once; `pinning` of new host
memory that a device can copy from; `start` of what the first subgraph's `run` and the first `solve` take more on a GPU,
whose libraries are loaded when they are used."""

_OF_GPUS = {"to_device", "to_host", "duplex", "pinning", "start"}
UNITS_OF_PLANS = {"between_ranks": "B/s", "cpu_optimizer": "B/s"}
"""Likewise, of what no probe measures and plans of fine-tuning add: `between_ranks` is what a rank sends while it
receives as much, `cpu_optimizer` what the CPU's optimizer steps of all ranks go over."""


@final
@dataclass(frozen=True)
class Rate:
    """An amount per second, and where it is from."""

    value: float
    origin: Origin


@final
@dataclass(frozen=True)
class Machine:
    """One rank's share of a machine.

    Attributes:
        name: of the host, or of the GPU.
        device: where subgraphs run, "cpu" or "cuda".
        rates: by kind of work (see `memory.work.Work`) and by lane.
        device_bytes: of a GPU's memory; None on a CPU.
    """

    name: str
    device: str
    rates: Mapping[str, Rate]
    device_bytes: int | None = None

    def rate(self, kind: str) -> float:
        """Of a kind of work; of products of a dtype that was not measured the slowest."""
        if kind in self.rates:
            return self.rates[kind].value
        family = kind.partition(" ")[0]
        return min(rate.value for name, rate in self.rates.items() if name.partition(" ")[0] == family)

    def seconds(self, work: Work) -> float:
        """How long it takes, one thing after the other.

        >>> Machine("x", "cpu", {"call": Rate(100.0, "assumed")}).seconds({"call": 50})
        0.5
        """
        return sum(amount / self.rate(kind) for kind, amount in work.items() if amount)

    def seconds_of_batches(self, work: Work) -> float:
        """How long batches take: a GPU computes while its next operators are called.

        >>> rates = {"call": Rate(100.0, "assumed"), "elementwise": Rate(10.0, "assumed")}
        >>> work = {"call": 50, "elementwise": 10}
        >>> Machine("x", "cpu", rates).seconds_of_batches(work), Machine("x", "cuda", rates).seconds_of_batches(work)
        (1.5, 1.0)
        """
        calls = {"call": work.get("call", 0)}
        others = {kind: amount for kind, amount in work.items() if kind != "call"}
        both = self.seconds(calls), self.seconds(others)
        return sum(both) if self.device == "cpu" else max(both)

    @property
    def is_complete(self) -> bool:
        """Whether all is known that plans need; what an earlier version measured may not be."""
        families = {name.partition(" ")[0] for name in self.rates}
        beside = _OF_GPUS if self.device == "cpu" else {"mapping", "solve"}
        return families >= UNITS.keys() - beside

    def refitted(self, factors: Mapping[str, float]) -> "Machine":
        """With rates divided by how many times longer than foreseen it took, by the first word of names."""
        rates = {
            name: Rate(rate.value / factors[family], "refitted")
            if (family := name.partition(" ")[0]) in factors
            else rate
            for name, rate in self.rates.items()
        }
        return replace(self, rates=rates)


@final
@dataclass(frozen=True)
class _Sheet:
    """A GPU's data sheet: dense TFLOP/s of products by dtype, memory's and the link's GB/s (one way), and GiB."""

    bfloat16: float
    float16: float
    float32: float
    memory: float
    link: float
    gib: float


SHEETS = {
    "t4": _Sheet(8.1, 65, 8.1, 320, 15.8, 14.56),
    "a10": _Sheet(125, 125, 31.2, 600, 31.5, 21.99),
    "l4": _Sheet(121, 121, 30.3, 300, 31.5, 24),
    "rtx3090": _Sheet(71, 71, 35.6, 936, 31.5, 23.70),
    "rtx4090": _Sheet(165, 165, 82.6, 1008, 31.5, 23.52),
    "rtx5090": _Sheet(209, 209, 104.8, 1792, 63, 31.37),
    "a100-40gb": _Sheet(312, 312, 19.5, 1555, 31.5, 39.50),
    "a100-80gb": _Sheet(312, 312, 19.5, 2039, 31.5, 79.25),
    "l40s": _Sheet(362, 362, 91.6, 864, 31.5, 44.42),
    "h100": _Sheet(989, 989, 66.9, 3350, 63, 80),
    "h200": _Sheet(989, 989, 66.9, 4800, 63, 139.80),
    "b200": _Sheet(2250, 2250, 80, 8000, 63, 180),
}
"""NVIDIA's data sheets; T4 computes bfloat16 at the rate of float32.

GiB are what PyTorch finds of a card (`total_memory`), as its errors told in issues of public repositories: T4
Zheng-Chong/CatVTON#133, A10 zai-org/CogVLM#236, RTX 3090 GaoLii/DSP#10, RTX 4090 Soul-AILab/SoulX-FlashTalk#5, RTX 5090
Wan-Video/Wan2.1#465, A100 TianheWu/CoSeR#10 and levihsu/OOTDiffusion#235, L40S stepfun-ai/Step-Video-T2V#8; H200 as in
many logs. Drivers differ by a tenth or two. Those of L4, H100 and B200 are what the cards are sold as."""
_REACHED = {"product": 0.6, "attention": 0.35, "elementwise": 0.8, "link": 0.8}
"""What of the data sheet's rate is assumed to be reached."""
_PER_PACKED = 230
"""Bytes of memory traffic that packing a weight takes on a GPU (measured on an H100)."""
STARTS = {"start run": Rate(1.0, "assumed"), "start solve": Rate(1.1, "assumed")}
"""As beside an H100: 0.6 to 1.1 s more for the first subgraph's run, 0.7 to 1.0 s for the first solve."""
_ASSUMED = {
    "call": 1e5,
    "writing": 5e8,
    "writing shards": 1e9,
    "disk_read": 2e9,
    "disk_write": 1e9,
    "scratch_read": 2e9,
    "pinning": 2e9,
}
"""Of a host that nothing is known of: a local NVMe disk."""


def named_gpu(name: str, host: Machine | None) -> Machine:
    """A machine with such a GPU, in a host like `host` (None: an assumed one).

    Raises:
        CompressionError: no such name.
    """
    sheet = SHEETS.get(name.lower())
    if sheet is None:
        raise CompressionError(f"gpu={name} is not known; known are {', '.join(SHEETS)}. gpu=null is this machine.")
    rates = {f"product {dtype}": 1e12 * _REACHED["product"] * getattr(sheet, dtype) for dtype in _DTYPES}
    rates |= {f"attention {dtype}": 1e12 * _REACHED["attention"] * getattr(sheet, dtype) for dtype in _DTYPES}
    rates["product float64"] = rates["product float32"] / 2
    link = 1e9 * _REACHED["link"] * sheet.link
    rates |= {
        "elementwise": 1e9 * _REACHED["elementwise"] * sheet.memory,
        "packing": 1e9 * _REACHED["elementwise"] * sheet.memory / _PER_PACKED,
        "to_device": link,
        "to_host": link,
        "duplex": 1.6 * link,
    }
    of_host = {kind: Rate(value, "assumed") for kind, value in _ASSUMED.items()}
    if host is not None:
        measured = {kind: rate for kind, rate in host.rates.items() if kind in of_host and kind != "call"}
        families = {kind.partition(" ")[0] for kind in measured}
        of_host = {kind: rate for kind, rate in of_host.items() if kind.partition(" ")[0] not in families} | measured
    known = {kind: Rate(value, "assumed") for kind, value in rates.items()}
    return Machine(name.lower(), "cuda", {**of_host, **known, **STARTS}, int(sheet.gib * 2**30))


_DTYPES = ("bfloat16", "float16", "float32")


def cache_file(device: str, folder: Path | None = None) -> Path:
    """Where the probe of this host is kept: one file per host and kind of device, as hosts may share a home."""
    base = folder or Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "lightning_compress"
    return base / f"{socket.gethostname()}-{device}.json"


def save_machine(machine: Machine, file: Path) -> None:
    """Write the cache."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(asdict(machine), indent=2) + "\n", encoding="utf-8")


def load_machine(file: Path) -> Machine:
    """What `save_machine` wrote; what was measured is `cached` now.

    Raises:
        CompressionError: it is no such file.
    """
    try:
        found = machine_of(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CompressionError(
            f"{file} is no record of a probe ({type(error).__name__}: {error}); measure again with "
            "`lightning-compress probe`, or delete it."
        ) from error
    cached = {
        kind: Rate(rate.value, "cached") if rate.origin == "measured" else rate for kind, rate in found.rates.items()
    }
    return replace(found, rates=cached)


def machine_of(found: Mapping[str, Any]) -> Machine:
    """A machine from plain data.

    Raises:
        ValueError: a rate that is none; other errors where fields are not what they are to be.
    """
    rates = {kind: Rate(float(rate["value"]), rate["origin"]) for kind, rate in found["rates"].items()}
    if wrong := [f"{kind} is {rate.value}" for kind, rate in rates.items() if not 0 < rate.value < inf]:
        raise ValueError(f"a rate is above zero, and of {', '.join(wrong)}")
    return Machine(found["name"], found["device"], rates, found["device_bytes"])
