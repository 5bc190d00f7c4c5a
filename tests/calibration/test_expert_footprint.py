"""What is foreseen of a run with experts, against what it takes, storage by storage."""

import pytest
import torch
from helpers import prepare, recipe
from test_footprint import foreseen, table_of, taken
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from lightning_compress.calibration import footprint
from lightning_compress.plugin.job import Job


def job_of_experts(schedule: str, rows: int = 8) -> Job:
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 128, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
    config = Qwen3MoeConfig(**sizes, **heads, num_hidden_layers=2, num_experts=8, num_experts_per_tok=2)
    batches = [{"input_ids": torch.randint(0, 64, (rows, 128))} for _ in range(3)]
    return prepare(Qwen3MoeForCausalLM(config).eval(), batches, recipe(4, group_size=64), schedule=schedule)


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
