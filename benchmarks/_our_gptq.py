"""Our side of `gptq_vs_llmcompressor.py` and `accuracy.py`: everything up to the quantized weights in the model.

`--scales minmax` sets every group's scale from its range, `weighted` searches it against the Gram's diagonal (the
default of the `gptq` algorithm). Packing and writing are left out on both sides.
"""

import torch
from _gptq_case import Batch, Case, read_case, run
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from lightning_compress.calibration.batches import collect
from lightning_compress.calibration.loop import calibrate
from lightning_compress.calibration.prepare import calibrating
from lightning_compress.calibration.quantized import QuantizedModule, Restored
from lightning_compress.calibration.records import SubgraphRecord
from lightning_compress.graph.stages import Schedule, Subgraph
from lightning_compress.memory.placement import MemoryConfig
from lightning_compress.plugin.job import prepare_job
from lightning_compress.plugin.settings import Settings
from lightning_compress.recipe.load import load_recipe


class Unpacked:
    """Takes the quantized weights and does nothing with them."""

    finished: tuple[SubgraphRecord, ...] = ()

    def restore(self, index: int, module: str) -> Restored:
        raise AssertionError("nothing is finished")

    def pack(self, quantized: QuantizedModule) -> int:
        return 0

    def commit(self, subgraph: Subgraph, record: SubgraphRecord) -> SubgraphRecord:
        return record


def solve(model: PreTrainedModel, loader: DataLoader[Batch], case: Case) -> dict[str, object]:
    scheme = case.preset or {"weights": case.weights, "input_activations": case.input_activations}
    modifier = {"algorithm": case.algorithm, "scheme": scheme, "ignore": ["lm_head"]}
    if case.algorithm == "gptq":
        modifier |= {
            "damping": case.dampening,
            "block_size": 128,
            "scale_search": {"minmax": False, "weighted": True}[case.scales],
            "correct": case.correct,
            "refit": case.refit,
        }
    settings = Settings(
        load_recipe({"modifiers": [modifier]}),
        output_dir=None,
        schedule=Schedule(case.schedule),
        memory=MemoryConfig(
            activation_budget=case.activation_budget,
            host_budget=case.host_budget,
            device_activation_budget=case.device_activation_budget,
        ),
    )
    job = prepare_job(model, collect(loader), settings, torch.device(case.device))
    with calibrating(job.target.root), job.modules.in_place():
        records = list(calibrate(job.run, Unpacked()))
    phases = [[record.name, record.onload_s, record.run_s, record.solve_s] for record in records]
    on_device = {"peak_device_bytes": max(record.peak_bytes for record in records)} if case.device == "cuda" else {}
    return {"phases": phases, **on_device}


if __name__ == "__main__":
    run("lightning_compress", read_case(), solve)
