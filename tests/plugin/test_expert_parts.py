"""Experts of a layer in parts: what that costs and saves, and who decides on how many."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import compress, contents, prepare, recipe, run, saved, tiny_mixtral, token_batches
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from lightning_compress.calibration.batches import collect
from lightning_compress.distributed.collective import SingleProcess
from lightning_compress.errors import BudgetError, CompressionError, OutputDirectoryError, SolveError
from lightning_compress.foresight.planned import card_for, tensors_on
from lightning_compress.memory import files
from lightning_compress.memory.placement import MemoryConfig
from lightning_compress.memory.tracker import LiveMemory
from lightning_compress.plugin.job import prepare_job
from lightning_compress.plugin.layout import _doubled
from lightning_compress.plugin.run import run_job
from lightning_compress.plugin.settings import Settings
from lightning_compress.recipe.load import load_recipe

from .conftest import Command, refused

pytestmark = pytest.mark.filterwarnings("ignore::lightning_compress.report.experts.ExpertCoverageWarning")
HOW = recipe(4, group_size=64)
STATIC = {
    "weights": {"num_bits": 8, "strategy": "channel"},
    "input_activations": {"num_bits": 8, "strategy": "tensor", "dynamic": False},
}


def model_of(num_layers: int = 2, num_experts: int = 8, hidden_size: int = 256, width: int = 64) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": hidden_size, "intermediate_size": 64, "moe_intermediate_size": width, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
    experts = {"num_experts": num_experts, "num_experts_per_tok": 2}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, **experts, num_hidden_layers=num_layers)).eval()


def batches(rows: int = 8, length: int = 128) -> list[Any]:
    torch.manual_seed(1)
    return [{"input_ids": torch.randint(0, 64, (rows, length))} for _ in range(3)]


def test_the_same_weights_in_parts(tmp_path: Path) -> None:
    """But for the last bits: sums are kept on the grid of a part's largest, and added up part by part. Every expert saw
    more tokens than it has channels. Seen to fail: with the experts' outputs of the last part only."""
    alone, parted = model_of(hidden_size=64), model_of(hidden_size=64)
    whole = compress(alone, batches(), HOW, tmp_path / "one", verify=False)
    report = compress(parted, batches(), HOW, tmp_path / "three", expert_parts=3)
    assert [part.name for part in report.subgraphs][1:5] == [
        "model.layers.0",
        *(f"model.layers.0.mlp.experts[{part}]" for part in ("0:2", "2:5", "5:8")),
    ]
    assert all(record.num_lent in (None, 0) for record in report.modules)
    assert report.verification is not None
    assert report.verification.passed
    first = "model.layers.0.mlp.experts"
    for name, value in parted.state_dict().items():
        if name.startswith(first):
            torch.testing.assert_close(value, alone.state_dict()[name], rtol=1e-2, atol=1e-5)
    errors = {record.module: record.error for record in whole.modules}
    for record in report.modules:  # later layers read other last bits, and what is on a border goes to the other side
        assert record.error == pytest.approx(errors[record.module], rel=0.05), record.module


@pytest.mark.slow
def test_a_budget_asks_for_parts(tmp_path: Path) -> None:
    """The experts' Grams of a part and its values are all that is there; seen to fail: with those of all."""
    model = model_of(num_experts=32)
    job = prepare(model, batches(), HOW, memory=MemoryConfig(device_budget="20MiB"))
    assert job.memory is not None
    assert job.memory.notes[-1] == "The experts of a layer are onloaded and solved in 4 parts."
    assert job.expert_parts == 4
    memory = LiveMemory()
    memory.ignore(*model.parameters(), *model.buffers())
    with memory:
        report = run(job)
    assert memory.peak_bytes <= 20 << 20
    assert "in 4 parts" in report.summary()
    whole = prepare(model_of(num_experts=32), batches(), HOW, memory=MemoryConfig(device_budget="100MiB"))
    assert whole.expert_parts == 1
    assert whole.memory is not None
    assert whole.memory.device_bytes > 20 << 20


class Others(SingleProcess):
    """A rank that is told what others need."""

    def gather(self, value: Any, what: str) -> list[Any]:
        return [value, 4] if what == "comparing the parts of experts" else [value, value]


@pytest.mark.slow
def test_all_ranks_have_as_many_parts_as_one_of_them_needs() -> None:
    """Seen to fail: with the fewest."""
    settings = Settings(load_recipe(HOW), None, memory=MemoryConfig(device_budget="100MiB"))
    for collective, number in ((SingleProcess(), 1), (Others(), 4)):
        data = collect(batches())
        job = prepare_job(model_of(num_experts=32), data, settings, torch.device("cpu"), collective)
        assert job.expert_parts == number


@pytest.mark.slow
def test_a_budget_that_no_parts_can_keep() -> None:
    with pytest.raises(BudgetError, match=r"smallest that can is .* is with the experts of a layer in \d+ parts\.$"):
        prepare(model_of(1), batches(), HOW, memory=MemoryConfig(device_budget="4MiB"))
    with pytest.raises(BudgetError, match=r"or more expert_parts, where these are experts"):
        prepare(model_of(1, 32), batches(1), HOW, memory=MemoryConfig(device_budget="4MiB"), expert_parts=1)


def test_numbers_that_make_no_sense() -> None:
    for wrong in (0, -1, "4", 2.0, True):
        with pytest.raises(CompressionError, match=r"expert_parts=.* is no whole number of at least 1"):
            prepare(model_of(1), batches(1), HOW, expert_parts=wrong)
    assert prepare(model_of(1), batches(1), HOW, expert_parts=100).expert_parts == 8


@pytest.fixture(scope="module")
def in_four_parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What a run that is told so writes."""
    folder = tmp_path_factory.mktemp("parts") / "whole"
    compress(model_of(num_experts=32), batches(), HOW, folder, expert_parts=4, verify=False)
    return contents(folder)


@pytest.mark.slow
@pytest.mark.parametrize("keep", [False, True])
def test_a_run_is_continued_in_the_parts_that_it_began_with(
    keep: bool, in_four_parts: dict[str, bytes], tmp_path: Path
) -> None:
    """Whatever the budget is then. Seen to fail: with as many as the new budget asks for, which is another run."""
    given: dict[str, Any] = {"verify": False, "keep_activations": keep}
    small = MemoryConfig(device_budget="20MiB")
    begun = run_job(prepare(model_of(num_experts=32), batches(), HOW, tmp_path / "out", memory=small, **given))
    for _ in range(4):
        next(begun)
    begun.close()
    job = prepare(model_of(num_experts=32), batches(), HOW, tmp_path / "out", **given)
    assert job.expert_parts == 4
    report = run(job)
    assert report.num_resumed == 4
    assert contents(tmp_path / "out") == in_four_parts
    again = prepare(model_of(num_experts=32), batches(), HOW, tmp_path / "out", **given)
    assert again.expert_parts == 1, "a finished run is replaced by one of its own"


@pytest.mark.slow
def test_weights_come_part_by_part(tmp_path: Path) -> None:
    """From disk, and into a shard of their own each."""
    model = model_of(1)
    empty = saved(model, tmp_path / "weights")
    given: dict[str, Any] = {"expert_parts": 4, "verify": False}
    job = prepare(empty, batches(2), HOW, tmp_path / "disk", weights=tmp_path / "weights", **given)
    experts = [part for part in job.run.flow.subgraphs if "[" in part.name]
    store = job.run.flow.store
    with job.modules.in_place():
        sizes = {store.away_bytes(part.modules, part.tensors) for part in experts}
    assert len(experts) == 4
    assert sizes == {2 * 3 * 64 * 256 * 4}
    run(job)
    compress(model, batches(2), HOW, tmp_path / "memory", **given)
    assert contents(tmp_path / "disk") == contents(tmp_path / "memory")


@pytest.mark.slow
@pytest.mark.usefixtures("rates")
def test_a_plan_in_parts(command: Command, tmp_path: Path) -> None:
    """Where nothing else fits on the card."""
    folder, file = tmp_path / "model", tmp_path / "plan.json"
    model: Any = model_of(1, 32, width=128)
    model.save_pretrained(folder)
    choices = {"batch_size": [2], "schedule": ["staged"], "load": ["disk"], "sequential_targets": ["null"]}
    given = [f"choices.{name}={value}".replace("'", "") for name, value in choices.items()]
    where = (f"model.path={folder}", "data.num_samples=8", "data.max_length=64", "gpu=t4", "host=100GiB", *given)
    needed = {}
    for parts in (1, 8):
        message = refused(command, "plan", *where, "device=600MiB", f"choices.expert_parts=[{parts}]")
        needed[parts] = tensors_on(int(message.partition(" others: device=")[2].split()[0]))
    assert needed[8] < needed[1] / 1.5
    card = card_for((needed[1] + needed[8]) // 2)
    said = command("plan", *where, f"device={card}", "choices.expert_parts=[1,8]", f"json={file}")
    assert "experts of a layer in 8 parts" in " ".join(said.split())
    assert json.loads(file.read_text())["best"]["choice"]["expert_parts"] == 8
    whole = command("plan", *where, f"device={card_for(needed[1] + (1 << 20))}", "choices.expert_parts=[1,8]")
    assert "parts" not in whole


def lopsided(num_experts: int = 4) -> nn.Module:
    """All tokens go to two experts, those of one part."""
    model = tiny_mixtral(2, num_experts)
    with torch.no_grad():
        for layer in range(2):
            model.get_parameter(f"model.layers.{layer}.mlp.gate.weight").zero_()
    return model


def test_a_part_that_no_token_reaches(tmp_path: Path) -> None:
    """Its experts are solved as if all channels were alike and independent. Seen to fail: with nothing to lend."""
    report = compress(lopsided(), token_batches(2), recipe(4), tmp_path, expert_parts=2)
    unseen = [record for record in report.modules if record.num_lent == 32]
    assert {record.module.split(".")[5] for record in unseen} in ({"0", "1"}, {"2", "3"})
    assert all(record.num_tokens == 0 and 0 < record.error < 0.1 for record in unseen)
    assert report.verification is not None
    assert report.verification.passed


def test_a_part_that_no_token_reaches_has_no_static_range() -> None:
    with pytest.raises(SolveError, match=r"No token reached model.layers.0.mlp.experts.*fewer expert_parts"):
        run(prepare(lopsided(), token_batches(2), recipe(scheme=STATIC), expert_parts=2))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::lightning_compress.export.verify.ReadBackWarning")
@pytest.mark.parametrize("family", ["gpt_oss", "llama4_text", "mixtral"])
def test_stacks_on_disk_come_part_by_part(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte is read once, and no more is alive than the part. Seen to fail: with views of whole stacks."""
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "hidden_size": 64, "intermediate_size": 64}
    more = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64}
    config = AutoConfig.for_model(family, **experts, **more, head_dim=32, intermediate_size_mlp=64)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    empty = saved(model, tmp_path / "weights")
    given: dict[str, Any] = {"expert_parts": 4, "verify": False}
    how = recipe(4, group_size=32)
    job = prepare(empty, token_batches(2), how, tmp_path / "disk", weights=tmp_path / "weights", **given)
    flow = job.run.flow
    with job.modules.in_place():
        for part in (part for part in flow.subgraphs if "[" in part.name):
            with flow.store.onload(part.modules, part.tensors):
                modules = [flow.root.get_submodule(name) for name in part.modules]
                tensors = [tensor for module in modules for tensor in module.parameters()]
                storages = {
                    tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors
                }
                needed = sum({id(tensor): tensor.nbytes for tensor in tensors}.values())
                assert sum(storages.values()) <= 1.1 * needed, part.name
    read: list[int] = []
    original = files.read_tensor
    monkeypatch.setattr(files, "read_tensor", lambda stored: read.append(stored.nbytes) or original(stored))
    run(job)
    assert sum(read) <= 1.1 * sum(parameter.nbytes for parameter in model.parameters())
    monkeypatch.undo()
    compress(model, token_batches(2), how, tmp_path / "memory", **given)
    assert contents(tmp_path / "disk") == contents(tmp_path / "memory")


def test_the_search_goes_on_where_the_other_place_is_short() -> None:
    """A need of the host is not compared with one of the device."""
    tried: list[int] = []
    needs = {1: ("host", 30), 2: ("device", 80), 8: ("device", 60)}

    def lay_out(number: int) -> Any:
        tried.append(number)
        if number in needs:
            place, needed = needs[number]
            raise BudgetError(f"{place} {needed}", place, int(needed))
        return number

    needs[4] = ("device", 70)
    found: Any = _doubled(lay_out, 16)
    assert found == 16
    tried.clear()
    needs[4] = ("device", 80)
    with pytest.raises(BudgetError, match=r"device 80 That is with .* in 2 parts"):
        _doubled(lay_out, 16)
    assert tried == [1, 2, 4]


@pytest.mark.slow
def test_other_parts_than_those_of_the_run_that_is_continued(tmp_path: Path) -> None:
    """A smaller budget is refused by its own error; another number, by one that says so."""
    given: dict[str, Any] = {"verify": False}
    begun = run_job(prepare(model_of(num_experts=32), batches(), HOW, tmp_path, **given))
    for _ in range(2):
        next(begun)
    begun.close()
    with pytest.raises(OutputDirectoryError, match="has experts in 1 parts, not 5"):
        prepare(model_of(num_experts=32), batches(), HOW, tmp_path, expert_parts=5, **given)
    with pytest.raises(BudgetError, match="device_budget"):
        prepare(model_of(num_experts=32), batches(), HOW, tmp_path, memory=MemoryConfig(device_budget="20MiB"), **given)
    restarted = MemoryConfig(device_budget="20MiB")
    job = prepare(model_of(num_experts=32), batches(), HOW, tmp_path, memory=restarted, resume=False, **given)
    assert job.expert_parts == 4


def test_schedules_without_parts() -> None:
    with pytest.raises(CompressionError, match="schedule basic has one subgraph"):
        prepare(model_of(1), batches(1), HOW, schedule="basic", expert_parts=2)
    rounding = recipe(4, "rtn", group_size=64)
    memory = MemoryConfig(device_budget="1GiB")
    job = prepare(model_of(1), batches(1), rounding, schedule="datafree", expert_parts=2, memory=memory)
    assert job.expert_parts == 1
    assert job.memory is not None
    assert not job.memory.notes


def test_a_model_that_is_left_unfolded_has_no_parts() -> None:
    """And gets those that the next run asks for."""
    scheme = {
        "weights": {"num_bits": 8, "strategy": "channel"},
        "input_activations": {"num_bits": 8, "strategy": "token", "dynamic": True},
    }
    model = tiny_mixtral(1, 4)
    run(prepare(model, token_batches(2), recipe(scheme=scheme), expert_parts=2))
    experts: Any = model.get_submodule("model.layers.0.mlp.experts")
    assert experts.parts == [range(4)]
    assert not hasattr(experts, "up_1")
    job = prepare(model, token_batches(2), recipe(scheme=scheme), expert_parts=3)
    assert job.expert_parts == 3
    assert len([part for part in job.run.flow.subgraphs if "[" in part.name]) == 3
