"""What was published of generating with offloading on one T4: sizes, the machine, policies and throughputs.

Sources, all of Sheng et al., "FlexGen" (arXiv 2303.06865): throughputs of table 2; policies of appendix A.4, as in
`benchmark/flexgen/bench_suite.py` and `benchmark/hf_ds/bench_hf.py` of FMInference/FlexLLMGen; the machine of table 1
and section 6; rates that its authors fitted to runs on it (`experimental/cost_model.py` there).
"""

from dataclasses import dataclass, replace
from typing import final

from lightning_compress.foresight.generation_cost import FRACTIONS, Hardware, Schedule, Task, Transformer

GIB = 1 << 30
OPT = {
    "OPT-6.7B": Transformer(layers=32, hidden=4096, intermediate=16384, heads=32, outside_bytes=2 * 4096 * 50272),
    "OPT-30B": Transformer(layers=48, hidden=7168, intermediate=28672, heads=56, outside_bytes=2 * 7168 * 50272),
    "OPT-175B": Transformer(layers=96, hidden=12288, intermediate=49152, heads=96, outside_bytes=2 * 12288 * 50272),
}
"""Zhang et al., "OPT" (arXiv 2205.01068), table 1; embeddings are tied, and in 16 bits as all else."""

_FITTED = Hardware(
    device_bytes=int((15 * GIB - (600 << 20)) / 1.08),  # as `planned.tensors_on`
    host_bytes=int(0.8 * 204 * GIB),
    disk_bytes=int(0.8 * 1500 * GIB),
    to_device=12.89 * GIB,
    to_host=4.82 * GIB,
    cache_to_host=0.97 * GIB,
    disk_read=0.473 * GIB,
    disk_write=0.746 * GIB,
    prefill_products=21.24e12,
    decode_products=4.3e12,
    prefill_attention=9.97e12,
    decode_attention=0.079e12,
    gpu_memory=0.8 * 320e9,  # four fifths of the data sheet's, as `machine` assumes
    cpu_attention=0.0123e12,
)
"""The authors' fit, with their share of host memory and disk; the GPU's is this project's assumption."""

MACHINES = {
    "the paper's disk": replace(_FITTED, disk_read=2e9, disk_write=1e9),
    "the fitted disk": _FITTED,
}
"""One machine, its disk once as section 6 has it ("about 2GB/s" and "about 1GB/s"), once as it was fitted."""


@final
@dataclass(frozen=True)
class Published:
    """A system's run.

    Attributes:
        system: "FlexGen" (without compression) or "Accelerate" (Hugging Face's, 0.15).
        model: of `OPT`.
        prompt_length: tokens; 32 new ones are generated.
        tokens_per_s: new tokens, over the seconds of prefill and decoding.
        schedule, percent: its policy, and what of weights, cache and hidden states is on the GPU and on the CPU.
    """

    system: str
    model: str
    prompt_length: int
    tokens_per_s: float
    schedule: Schedule
    percent: tuple[int, int, int, int, int, int]

    @property
    def task(self) -> Task:
        """What was generated."""
        return Task(self.prompt_length, 32)

    @property
    def fractions(self) -> dict[str, float]:
        """By the names of `FRACTIONS`."""
        pairs = zip(self.percent[::2], self.percent[1::2], strict=True)
        shares = [part / 100 for gpu, cpu in pairs for part in (gpu, cpu, 100 - gpu - cpu)]
        return dict(zip(FRACTIONS, shares, strict=True))


def _rows(batch_size: int) -> Schedule:
    return Schedule(batch_size, 1, cpu_attention=False, overlaps=False)


_GPU, _CPU, _DISK = (100, 0, 100, 0, 100, 0), (0, 100, 100, 0, 100, 0), (0, 0, 100, 0, 100, 0)
RUNS = (
    Published("FlexGen", "OPT-6.7B", 512, 25.26, _rows(2), _GPU),
    Published("FlexGen", "OPT-30B", 512, 7.32, Schedule(48, 3, cpu_attention=True), (20, 80, 0, 100, 0, 100)),
    Published("FlexGen", "OPT-175B", 512, 0.69, Schedule(32, 8, cpu_attention=True), (0, 50, 0, 0, 0, 100)),
    Published("Accelerate", "OPT-6.7B", 512, 25.12, _rows(2), _GPU),
    Published("Accelerate", "OPT-30B", 512, 0.62, _rows(8), _CPU),
    Published("Accelerate", "OPT-175B", 512, 0.01, _rows(2), _DISK),
    Published("FlexGen", "OPT-6.7B", 1024, 13.72, _rows(1), _GPU),
    Published("FlexGen", "OPT-30B", 1024, 3.50, Schedule(20, 4, cpu_attention=True), (4, 96, 0, 100, 0, 100)),
    Published("FlexGen", "OPT-175B", 1024, 0.35, Schedule(12, 12, cpu_attention=True), (0, 50, 0, 0, 0, 100)),
    Published("Accelerate", "OPT-6.7B", 1024, 13.01, _rows(1), _GPU),
    Published("Accelerate", "OPT-30B", 1024, 0.31, _rows(4), _CPU),
    Published("Accelerate", "OPT-175B", 1024, 0.01, _rows(1), _DISK),
)
"""FlexGen ran OPT-6.7B without overlapping, as all is on the GPU."""
