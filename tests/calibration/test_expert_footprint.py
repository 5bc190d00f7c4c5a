"""What is foreseen of a run with experts, against what it takes, storage by storage."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import prepare, recipe
from test_footprint import foreseen, table_of, taken
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from lightning_compress.algorithms.gptq import Gptq
from lightning_compress.algorithms.tiling import ON_CPU, ON_GPU
from lightning_compress.calibration import footprint
from lightning_compress.calibration.amounts import calls_beside_batch, work_of_solves
from lightning_compress.calibration.footprint import _Meter
from lightning_compress.calibration.solve import stacked_groups
from lightning_compress.plugin.job import Job


def job_of_experts(schedule: str, rows: int = 8, num_layers: int = 2, **settings: Any) -> Job:
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 128, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
    config = Qwen3MoeConfig(**sizes, **heads, num_hidden_layers=num_layers, num_experts=8, num_experts_per_tok=2)
    batches = [{"input_ids": torch.randint(0, 64, (rows, 128))} for _ in range(3)]
    return prepare(Qwen3MoeForCausalLM(config).eval(), batches, recipe(4, group_size=64), schedule=schedule, **settings)


def test_what_experts_are_solved_together() -> None:
    """As many as have the rows that go through the channels together (256 of gates and ups, of downs too), and
    Grams (of 256 channels, of 128) that may be there at once."""
    job = job_of_experts("staged", num_layers=1)
    root, resolved = job.run.flow.root, job.run.resolved
    with job.modules.in_place():
        steps = [step.solve for part in job.run.flow.subgraphs for step in part.steps]
        sizes = {
            tiling: [len(each) for groups in steps for each in stacked_groups(groups, root, resolved, tiling)]
            for tiling in (
                ON_CPU,
                ON_GPU,
                replace(ON_GPU, stacked_rows=800, stacked_weights=0),
                replace(ON_GPU, joined=3 << 16),
            )
        }
    assert list(sizes.values()) == [[1, 1, 8, 8], [1, 1, 8, 8], [1, 1, 3, 3, 2, 3, 3, 2], [1, 1, 3, 3, 2, 8]]


def test_linears_of_experts_are_calls_of_python() -> None:
    """Those of gates and ups; downs of a last layer are not run. Seen to fail: with an experts' node as one."""
    job = job_of_experts("staged", num_layers=1)
    steps = [step for part in job.run.flow.subgraphs for step in part.steps]
    nodes = sum(len(step.nodes) for step in steps)
    observed = 2 + 2 * 8  # what q, k and v, and what o reads; of every expert what gate and up, and what down reads
    assert sum(map(calls_beside_batch, steps)) == 14 * (nodes + observed + 2 * 8)


def test_packing_and_records_are_calls_of_python() -> None:
    """Of every group on each rank, which puts all modules in place. Seen to fail: with the algorithm's calls alone."""
    gptq, shape = Gptq(), (256, 128)
    alone, shared = (work_of_solves(gptq, *shape, ON_GPU, 8, 2, ranks) for ranks in (1, 2))
    beside = 8 * (55 + 2 * 190)
    assert alone["call"] == gptq.calls(*shape, ON_GPU, 8) + beside
    assert shared["call"] == gptq.calls(*shape, ON_GPU, 4) + beside
    assert (alone["packing"], shared["packing"]) == (8 * 256 * 128, 4 * 256 * 128)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", ["staged", "block"])
def test_never_less_than_the_run_takes_and_not_much_more(schedule: str) -> None:
    """Batches go to the experts in equal parts as far as tensors without values can tell. Seen to fail: without the
    statistics of experts."""
    job = job_of_experts(schedule)
    with job.modules.in_place():
        table = table_of(job)
        ours, theirs = foreseen(table, 0, [0] * len(table)), taken(job)
    assert all(one >= other for one, other in zip(ours, theirs, strict=True)), (ours, theirs)
    assert max(ours) <= 1.25 * max(theirs), (ours, theirs)


@pytest.mark.parametrize("rows", [8, 7])
def test_experts_that_are_alike_are_run_once(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table is the one of running all. Seen to fail: with the work of one for that of all."""
    job = job_of_experts("staged", rows)
    with job.modules.in_place():
        once = table_of(job)
        monkeypatch.setattr(footprint, "one_of_each", lambda sources, values: [(s, 1) for s in sources if s.rows])
        every = table_of(job)
    assert [row.moments for row in once] == [row.moments for row in every]


@pytest.mark.slow
def test_layers_in_parts_that_are_alike_are_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several subgraphs each. Seen to fail: with the subgraph before taken for the one that is like it."""
    job = job_of_experts("staged", num_layers=5, expert_parts=3)
    repeated: list[int] = []
    repeats = _Meter.repeats

    def counted(meter: _Meter, index: int) -> int:
        repeated.append(repeats(meter, index))
        return repeated[-1]

    with job.modules.in_place():
        monkeypatch.setattr(_Meter, "repeats", counted)
        table = table_of(job)
        monkeypatch.setattr(_Meter, "repeats", lambda *_: 0)
        assert table == table_of(job)
    assert [row.name for row in table] == [part.name for part in job.run.flow.subgraphs]
    assert repeated.count(4) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["staged", "block"])
def test_parts_take_what_is_foreseen(schedule: str) -> None:
    """But for what one part is given more of the tokens than another, which no fake tensor tells."""
    job = job_of_experts(schedule, expert_parts=4)
    with job.modules.in_place():
        table = table_of(job)
        ours, theirs = foreseen(table, 0, [0] * len(table)), taken(job)
    assert all(one >= 0.95 * other for one, other in zip(ours, theirs, strict=True)), (ours, theirs)
    assert max(ours) <= 1.25 * max(theirs), (ours, theirs)


@pytest.mark.filterwarnings("ignore:.*were lent what all")
def test_what_experts_are_lent_is_foreseen() -> None:
    """A matrix as large as a Gram, for few wide rows. Seen to fail: without it."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 1024, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    config = Qwen3MoeConfig(**sizes, **heads, num_hidden_layers=1, num_experts=4, num_experts_per_tok=2)
    batches = [{"input_ids": torch.randint(0, 64, (2, 16))} for _ in range(2)]
    job = prepare(Qwen3MoeForCausalLM(config).eval(), batches, recipe(4, group_size=32))
    with job.modules.in_place():
        table = table_of(job)
        ours, theirs = foreseen(table, 0, [0] * len(table)), taken(job)
    assert all(one >= other for one, other in zip(ours, theirs, strict=True)), (ours, theirs)
    assert max(ours) <= 1.25 * max(theirs), (ours, theirs)
