"""`lightning-compress plan` and `probe`, and compressions that follow a plan."""

import json
import re
import shutil
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import prepare, run, tiny_llama, token_batches
from hydra import initialize_config_dir
from omegaconf import OmegaConf
from torch import nn
from transformers import LlamaConfig, T5Config, T5ForConditionalGeneration

from lightning_compress.calibration.target import find_target
from lightning_compress.command import plan as plan_module
from lightning_compress.command.chosen import _shipped
from lightning_compress.command.measure import measured
from lightning_compress.command.plan import record_of
from lightning_compress.command.planned_run import with_plan
from lightning_compress.errors import CompressionError
from lightning_compress.foresight import compare
from lightning_compress.foresight.jobs import CalibrationJob
from lightning_compress.foresight.machine import SHEETS, Machine, Rate, named_gpu
from lightning_compress.foresight.plan import Candidate, Choice, Resources, foreseen
from lightning_compress.foresight.planned import load_planned
from lightning_compress.memory.needs import Waiting
from lightning_compress.memory.placement import MemoryConfig
from lightning_compress.recipe.load import config_dir, load_recipe
from lightning_compress.recipe.resolve import resolve

from .conftest import GPTQ, Command, refused

pytestmark = pytest.mark.usefixtures("rates")
DATA = ("data.num_samples=6", "data.max_length=32")


@pytest.fixture(autouse=True)
def figures_drawn_only() -> None:
    """Not here: a page holds all its figures."""


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_a_plan_is_made_kept_and_run(
    command: Command, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, out = tmp_path / "plan.json", tmp_path / "out"
    where = (f"model.path={checkpoint}", *DATA)
    said = command("plan", *where, "choices.batch_size=[2,4]", "host=100GiB", "disk=1GiB", f"json={file}")
    assert "plan: schedule " in said
    assert "bottleneck: " in said
    assert "of 100.00 GiB" in said
    assert said.count("cached") == len(known())
    best = json.loads(file.read_text())["best"]
    said = command("compress", *where, "trainer=cpu", f"plan={file}", f"output_dir={out}")
    assert "plan, run: " in said
    report = json.loads((out / "report.json").read_text())
    assert report["schedule"] == best["choice"]["schedule"]
    assert report["num_batches"] == -(-6 // best["choice"]["batch_size"])
    assert report["plan"]["choice"] == best["choice"]
    rows = {row["name"]: row for row in report["comparison"]}
    assert rows["all subgraphs"]["measured"] == pytest.approx(
        sum(part[phase] for part in report["subgraphs"] for phase in ("onload_s", "run_s", "solve_s", "write_s"))
    )
    assert report["memory"]["host_budget"] == 100 << 30, "what was given for the plan holds for the run"
    page = (out / "report.html").read_text()
    assert page.count("<svg") == 3
    assert "The plan, and what came of it" in page
    assert "These runs are too short to learn from: run (" in refused(command, "probe", f"refit={out / 'report.json'}")
    monkeypatch.setattr(compare, "_LEAST_S", 0.0)
    said = command("probe", f"refit=[{out / 'report.json'}]")
    assert "too short" not in said
    assert said.count("refitted") == sum(not kind.startswith(("disk", "scratch")) for kind in known())
    assert "refitted" in command("probe", f"refit={out / 'report.json'}"), "one path is a list of one"
    check_refit_refuses(command, file, report)
    check_sizes_are_numbers(file)
    again = command("plan", *where, "choices.batch_size=[2,4]", "host=100GiB", f"json={file}")
    assert "refitted" in again
    of_other = (*where[:1], "model.dtype=bfloat16", "data.num_samples=8", "data.max_length=32", "trainer=cpu")
    message = refused(command, "compress", *of_other, f"plan={file}", f"output_dir={out}")
    different = "model.dtype float32 in the plan, bfloat16 here; data.num_samples 6 in the plan, 8 here"
    assert f"is for something else: {different}" in message
    given = (*where, "trainer=cpu", f"plan={file}", f"output_dir={out}")
    message = refused(command, "compress", *given, "data.batch_size=3", "memory.activation_budget=1")
    assert "the command says data.batch_size=3, and the plan " in message
    assert message.endswith(
        "make a plan with choices.batch_size=[3] or leave data.batch_size and memory.activation_budget out."
    )
    assert "batch size 3," in command("plan", *where, "data.batch_size=3", "host=100GiB")
    other = {"memory": "disk", "disk": "memory"}[best["choice"]["load"]]
    assert f"weights from {other}," in command("plan", *where, f"model.load={other}", "host=100GiB"), "what was typed"


def check_refit_refuses(command: Command, plan: Path, report: dict[str, Any]) -> None:
    """What is no report of this version, in a line. Seen to fail: with tracebacks of the last three."""
    no_seconds = {key: value for key, value in report["plan"].items() if key != "prepare_s"}
    reports: list[tuple[Any, str]] = [(json.loads(plan.read_text()), "it has no 'plan'."), ([], "")]
    reports += [({**report, "plan": [1]}, ""), ({**report, "plan": no_seconds}, "prepare_s")]
    for content, said in reports:
        file = plan.with_name("other.json")
        file.write_text(json.dumps(content))
        message = refused(command, "probe", f"refit=[{file}]")
        assert "is no report of a run of this version: " in message
        assert said in message
        assert "\n" not in message


def check_sizes_are_numbers(plan: Path) -> None:
    """Seen to fail: text was taken for one, and the file for a plan."""
    content = json.loads(plan.read_text())
    content["situation"]["host"] = "16GiB"
    other = plan.with_name("other.json")
    other.write_text(json.dumps(content))
    with pytest.raises(
        CompressionError, match=r"other.json is no plan of a compression: its situation has \{'host': '16GiB'\}"
    ):
        load_planned(other)


def known() -> list[str]:
    of_gpus = ("to_", "dup", "pinning", "start")
    return [*(kind for kind in named_gpu("t4", None).rates if not kind.startswith(of_gpus)), "mapping", "solve"]


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_compress_makes_its_own_plan(command: Command, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    given = (f"model.path={checkpoint}", *DATA, "trainer=cpu", "plan=auto", f"output_dir={out}", "model.load=disk")
    said = command("compress", *given, "data.batch_size=3", "calibration.schedule=block")
    assert "plan: schedule block, batch size 3, " in said, "what the user chose is not the plan's to choose"
    message = refused(command, "compress", *given, "memory.activation_budget=0")
    assert "plan=auto chooses memory.activation_budget; leave it out" in message
    report = json.loads((out / "report.json").read_text())
    assert report["plan"]["choice"]["load"] == "disk"
    rows = {row["name"]: row for row in report["comparison"]}
    assert rows["disk_read"]["foreseen"] == rows["disk_read"]["measured"] > 0
    assert report["memory"]["host_budget"] is None, "nobody gave one"
    assert report["memory"]["host_bytes"] > report["memory"]["held_bytes"], "it is foreseen nonetheless"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_what_is_given_in_another_form_is_the_users_too(command: Command, checkpoint: Path, tmp_path: Path) -> None:
    """A mapping, or a file of one's own. Seen to fail: a plan overruled all of it without a word."""
    experiments = {
        "mine": {"calibration": {"schedule": "basic"}, "data": {"batch_size": 3}},
        "waiting": {"memory": {"activation_budget": "1MiB"}},
    }
    for name, content in {f"experiment/{each}": of for each, of in experiments.items()}.items():
        file = tmp_path / "cfg" / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"# @package _global_\n{json.dumps(content)}")
    (tmp_path / "cfg" / "data").mkdir()
    OmegaConf.save({"defaults": ["docs"], "batch_size": 4}, tmp_path / "cfg" / "data" / "few.yaml")
    where = (f"model.path={checkpoint}", *DATA, f"--config-dir={tmp_path / 'cfg'}")
    plan = ("plan", *where, "choices={load: [memory], prefetch_depth: [1]}", f"json={tmp_path / 'plan.json'}")
    assert "batch size 3," in command(*plan, "data={batch_size: 3}")
    assert "batch size 4," in command(*plan, "data=few")
    assert "data.batch_size=2 is not among choices" in refused(
        command, *plan[:-2], "choices={batch_size: [4]}", "data={batch_size: 2}"
    )
    given = ("compress", *where, "trainer=cpu", f"output_dir={tmp_path / 'out'}")
    for waiting in ("memory={activation_budget: 1MiB}", "experiment=waiting"):
        assert "plan=auto chooses memory.activation_budget" in refused(command, *given, "plan=auto", waiting)
    of_file = f"plan={tmp_path / 'plan.json'}"
    assert "calibration.schedule=basic, and" in refused(command, *given, of_file, "calibration={schedule: basic}")
    assert "plan: schedule basic, batch size 3," in command(*given, "plan=auto", "experiment=mine")
    # what a file of one's own has from a shipped one is not chosen; seen to fail: taken for it
    OmegaConf.save({"defaults": ["docs"], "num_samples": 6}, tmp_path / "cfg" / "data" / "more.yaml")
    (tmp_path / "out").rename(tmp_path / "first")
    assert "plan: schedule" in command(*given, "data=more", of_file)


def test_files_of_ones_own_are_compared_with_their_kind() -> None:
    """Seen to fail: with `docs`, of which a batch of images is not."""
    mine = {"data": {"source": "multimodal"}, "job": {"_target_": load_shipped("job", "finetuning")["_target_"]}}
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        found = _shipped(OmegaConf.create({**mine, "choices": {}}), {"data": "mine", "job": "mine"})
    assert found["data"]["batch_size"] == load_shipped("data", "multimodal")["batch_size"] == 1
    assert found["job"]["length"] == load_shipped("job", "finetuning")["length"]


def load_shipped(group: str, name: str) -> Any:
    return OmegaConf.load(config_dir() / group / f"{name}.yaml")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_weights_that_are_elsewhere(command: Command, checkpoint: Path, tmp_path: Path) -> None:
    """Are read from there, layer by layer. Seen to fail: with weights in memory, for there are no files in
    model.path."""
    (tmp_path / "bare").mkdir()
    shutil.copy(checkpoint / "config.json", tmp_path / "bare")
    where = (f"model.path={tmp_path / 'bare'}", f"model.weights={checkpoint}", f"model.tokenizer={checkpoint}")
    given = (*where, *DATA, "trainer=cpu", f"output_dir={tmp_path / 'out'}", "data.batch_size=3")
    assert "weights from disk," in command("compress", *given, "plan=auto", "calibration.schedule=block")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_recipes_that_run_nothing_are_planned_as_such(command: Command, checkpoint: Path, tmp_path: Path) -> None:
    given = (
        "compress",
        f"model.path={checkpoint}",
        *DATA,
        "trainer=cpu",
        "plan=auto",
        f"output_dir={tmp_path / 'out'}",
    )
    assert "plan: schedule datafree," in command(*given, "recipe=w4a16_rtn", "calibration.schedule=datafree")
    assert "Schedule 'datafree' runs nothing, but" in refused(command, *given, "calibration.schedule=datafree")


@pytest.mark.slow
def test_another_machine(command: Command, tmp_path: Path) -> None:
    """With a configuration alone, and with less memory than a layer's batch of 8 takes."""
    LlamaConfig(hidden_size=2048, intermediate_size=4096, num_hidden_layers=2, dtype="bfloat16").save_pretrained(
        tmp_path
    )
    given = ("plan", f"model.path={tmp_path}", "gpu=rtx4090", "host=64GiB", "disk=1TiB", "data.max_length=2048")
    few = ("choices.batch_size=[1,8]", "choices.schedule=[staged]", "choices.prefetch_depth=[0]", "data.num_samples=16")
    roomy = command(*given, *few)
    assert "batch size 8" in roomy
    assert "assumed" in roomy
    assert "a GPU's context is assumed to take 600 MiB" in roomy
    tight = command(*given, *few, "device=1500MiB", f"json={tmp_path / 'plan.json'}")
    assert "batch size 1," in tight
    planned = load_planned(tmp_path / "plan.json")
    config = OmegaConf.create({"memory": {"device_budget": None}})
    # a run counts the workspace of cuBLAS. Seen to fail: it did not fit into the budget that its plan had filled
    assert with_plan(config, planned).memory.device_budget == (planned.situation.device or 0) + (32 << 20)
    message = refused(command, *given, *few, "device=700MiB")
    assert "No plan fits device=0.09 GiB for tensors (of a card 600 MiB and 8% are taken off)" in message
    assert "for device is too little for any. The smallest" in message
    assert "or the algorithm rtn for the widest modules" in message
    of_host = refused(command, *given, *few, "host=1MiB", "recipe=w4a16_rtn")
    assert "host is too little for any" in of_host
    assert "rtn" not in of_host, "of what it has already"
    least = message.partition(" others: device=")[2].split()[0]
    assert "plan: " in command(*given, *few, f"device={least}")
    assert "No plan fits" in refused(command, *given, *few, f"device={int(least) - 4}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["host=24 apples"], "host: '24 apples' is no size"),
        (["gpu=rtx9999"], f"gpu=rtx9999 is not known; known are {', '.join(SHEETS)}"),
        (["device=24GiB"], "device=24GiB is memory of a GPU: name the one to plan for"),
        (["run_on=cuda"], "There is no CUDA device here; name the one to plan for as gpu="),
        (["run_on=tpu"], "run_on=tpu is not known"),
        (["ranks=0"], "ranks=0 is no number of at least 1"),
        (["ranks=1000000000"], "plans are for 65536 ranks at most"),
        (["ranks=3", "nodes=2"], "nodes=2 is no number of nodes with as many of the ranks=3 on each"),
        (["ranks=2", "nodes=2", "job=inference"], "nodes=2: only calibrations are planned for more than one"),
        (
            ["data.batch_size=4", "choices.batch_size=[2,8]"],
            r"data.batch_size=4 is not among choices.batch_size=\[2, 8\]",
        ),
        (["model.load=disk", "choices.load=[memory]"], r"model.load=disk is not among choices.load=\['memory'\]"),
        (["choices.batch_size=[0]"], "choices.batch_size=0: schedules are"),
        (["choices.batch_size=[4096]"], r"choices.batch_size=\[4096\]: no batch can have more than the [0-9]+ samples"),
        (["data.num_samples=0"], "data.num_samples=0 is no whole number of at least 1"),
        (["data.num_samples=16.5"], "data.num_samples=16.5 is no whole number"),
        (["data.max_length=abc"], "data.max_length='abc' is no whole number"),
        (["choices.schedule=staged"], "choices.schedule=staged is no list"),
        (["choices.schedule=[fast]"], "choices.schedule=fast: schedules are staged, recompute, block, basic"),
        (["+choices.speed=[1]"], "choices has no option speed; known are batch_size,"),
        (["disk=1KiB"], r"No plan fits .*disk=1.00 KiB.* The smallest that could do"),
        (["host=1MiB"], "No plan fits host=1.00 MiB"),
        (["json=/dev/null/plan.json"], "json=/dev/null/plan.json cannot be written"),
    ],
)
def test_wrong_input(command: Command, checkpoint: Path, options: list[str], message: str) -> None:
    if options == ["run_on=cuda"] and torch.cuda.is_available():
        pytest.skip("there is one")
    few = [] if any(option.startswith("choices.batch") for option in options) else ["choices.batch_size=[2]"]
    said = refused(command, "plan", f"model.path={checkpoint}", *DATA, *few, *options)
    assert re.search(message, said), said


def test_a_probe_of_a_device_that_is_not_here(command: Command) -> None:
    """Seen to fail: with the advice to name one, which a probe refuses."""
    if not torch.cuda.is_available():
        assert "There is no CUDA device here; use run_on=cpu." in refused(command, "probe", "run_on=cuda")


def test_ranks_write_a_checkpoint_together(command: Command, checkpoint: Path, tmp_path: Path) -> None:
    """What no subgraph holds once, too. Seen to fail: with that once for each rank."""
    sizes = []
    for ranks in (1, 3):
        given = (f"model.path={checkpoint}", "recipe=w4a16_rtn", f"ranks={ranks}", "host=100GiB", "disk=1GiB")
        command("plan", *given, *DATA, f"json={tmp_path / 'plan.json'}")
        sizes.append(json.loads((tmp_path / "plan.json").read_text())["best"]["peaks"]["disk"])
    assert abs(sizes[1] - sizes[0]) <= 1, "but for rounding"


def test_the_disk_has_what_is_written(command: Command, tmp_path: Path) -> None:
    """What tied tensors take once, and codes and scales as files have them. Seen to fail: with the embedding three
    times, and of each row and group what a solved one has in memory."""
    config = T5Config(
        d_model=128,
        d_ff=256,
        d_kv=16,
        num_heads=8,
        num_layers=1,
        vocab_size=512,
        architectures=["T5ForConditionalGeneration"],
    )
    config.save_pretrained(tmp_path / "t5")
    model = T5ForConditionalGeneration(config)
    linears = {module.weight for module in model.modules() if isinstance(module, nn.Linear)} - {model.shared.weight}
    numel = sum(weight.numel() for weight in linears)
    kept = sum(weight.nbytes for weight in model.parameters() if weight not in linears)
    auto_class = "model.auto_class=AutoModelForSeq2SeqLM"
    given = (f"model.config={tmp_path / 't5' / 'config.json'}", auto_class, "choices.batch_size=[2]")
    command("plan", *given, *DATA, "host=100GiB", "disk=1GiB", f"json={tmp_path / 'plan.json'}")
    peaks = json.loads((tmp_path / "plan.json").read_text())["best"]["peaks"]
    assert peaks["disk"] == kept + numel // 2 + 4 * numel // 128


def test_a_gib_more_is_one_of_the_node(
    command: Command, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the budget is. Seen to fail: one for each of its ranks."""
    given = (f"model.path={checkpoint}", "ranks=4", "host=100GiB", "disk=1GiB")
    asked: list[Resources] = []
    monkeypatch.setattr(plan_module, "least_s", lambda _tried, _machine, each, _known: (asked.append(each), 0.0)[1])
    command("plan", *given, *DATA, "choices.schedule=[staged]", "choices.batch_size=[1]")
    assert {each.host for each in asked} == {25 << 30, 101 << 28}


def test_each_kind_of_gpu_has_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of one host. Seen to fail: plans for one by the rates, and with the memory, of the other."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    names = []
    for name, size in (("NVIDIA H100 80GB HBM3", 80 << 30), ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 10 << 30)):
        card = SimpleNamespace(name=name, total_memory=size)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, card=card: card)
        names.append(record_of("cuda").name)
    assert names[0].endswith("-cuda-NVIDIA-H100-80GB-HBM3-81920.json")
    assert len({*names, record_of("cpu").name}) == 3


@pytest.mark.slow
def test_generation_is_planned_too(command: Command, tmp_path: Path) -> None:
    LlamaConfig(hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, dtype="bfloat16").save_pretrained(
        tmp_path
    )
    given = ("plan", f"model.path={tmp_path}", "gpu=t4", "host=64GiB", "disk=1TiB")
    file = tmp_path / "generation.json"
    said = command(*given, "job=inference", "job.context=512", "job.new_tokens=32", f"json={file}")
    assert "tokens/s" in said
    found = json.loads(file.read_text())
    assert (found["task"]["prompt_length"], found["task"]["num_prompts"]) == (512, None)
    assert "positions" not in said
    few = command(*given, "job=inference", "job.context=4096", "job.batch_size=3", f"json={file}")
    found = json.loads(file.read_text())
    assert found["task"]["num_prompts"] == 3 >= found["best"]["schedule"]["gpu_batch_size"], "what was typed"
    assert "4224 tokens are more than the 2048 positions that LlamaForCausalLM is made for." in few
    assert "assumed" in said
    assert "for a calibration (without job), for job=inference and for" in refused(command, *given, "job=calibration")
    assert "for one rank" in refused(command, *given, "job=inference", "job.weight_bits=4")
    assert "there is none here" in refused(command, *given[:2], "job=inference", "run_on=cpu")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            "calibration.schedule=block",
            "calibration.schedule is of `compress`; `plan` has choices.schedule=[...] for it.",
        ),
        ("memory.host_budget=4GiB", "memory.host_budget is of `compress`; `plan` has host=... for it."),
        (
            "memory.scratch_dir=x",
            "memory is nothing that this command has; it has choices, data, device, disk, gpu, host, ",
        ),
        ("experiment=multi_node", "experiment is nothing that this command has; it has choices, data, device"),
        ("job.context=8", "job is not known without the group, which is given as job=..."),
        ("hots=4GiB", "hots is not known; did you mean 'host'?"),
        (
            "frobnicate=1",
            "frobnicate is not known; known are choices, data, device, disk, gpu, host, image_size, interc",
        ),
    ],
)
def test_keys_of_other_commands(given: str, said: str, command: Command, checkpoint: Path) -> None:
    """Known are a command's own. Seen to fail: groups of other commands among them, no word of what a plan has, and
    Hydra's own of a group."""
    message = refused(command, "plan", f"model.path={checkpoint}", given)
    assert message.startswith(f"lightning-compress: {said}")
    assert not {"callbacks", "trainer"} & set(re.findall(r"\w+", message))


def test_a_file_that_is_no_plan(command: Command, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    given = ("compress", f"model.path={checkpoint}", "trainer=cpu", f"output_dir={tmp_path / 'out'}")
    assert "plan.json is no plan of a compression: it has no 'situation'. Make one with" in refused(
        command, *given, f"plan={tmp_path / 'plan.json'}"
    )
    for job, key in (("fine-tuning (job=finetuning)", "itemsize"), ("text generation (job=inference)", "hardware")):
        (tmp_path / "other.json").write_text(json.dumps({key: 1}))
        message = refused(command, *given, f"plan={tmp_path / 'other.json'}")
        assert f"other.json is no plan of a compression: it is one of {job}. Make one with" in message
    assert "none.json is no plan of a compression: no such file or directory. Make one with" in refused(
        command, *given, f"plan={tmp_path / 'none.json'}"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("activations", "schedule"), [*product((0, 800_000), ("staged", "recompute", "block")), (None, "staged")]
)
def test_bytes_that_a_run_moves_are_those_foreseen(schedule: str, activations: int | None) -> None:
    """What waits in the file is a share of all values in the plan, and whole values in the run, which fill memory as
    they come. Seen to fail: with small values, too, taking of the run's budget."""
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512}
    batches = token_batches(num_batches=24, rows=1, length=64)
    job = prepare(
        tiny_llama(3, **sizes), batches, GPTQ, schedule=schedule, memory=MemoryConfig(activation_budget=activations)
    )
    records = run(job).subgraphs
    model = tiny_llama(3, **sizes)
    given = CalibrationJob(num_samples=24, max_length=64, batch_size=1, schedule=schedule)
    target = find_target(model)
    found = measured(target, resolve(load_recipe(GPTQ), target.root), given, torch.device("cpu"), verifies=False)
    rows = tuple(row.__class__(row.name, 0, row.moments) for row in found.table)
    candidate = Candidate(Choice(1, schedule, 1, "memory"), rows, (), 0, 0.0, 0, 0)
    rates = {kind: Rate(1e9, "assumed") for kind in (*known(), "product float32")}
    plan = foreseen(candidate, Machine("x", "cpu", rates), Waiting(0, activations))
    for lane in ("disk_read", "disk_write"):
        ours = [part.moved_bytes[lane] for part in plan.subgraphs]
        theirs = [record.moved_bytes.get(lane, 0) for record in records]
        assert sum(ours) == pytest.approx(sum(theirs), rel=0.15 if activations else 0.001), (ours, theirs)
    assert (sum(ours) > 0) == (activations is not None)


@pytest.mark.slow
@pytest.mark.parametrize("module", ["plan", "estimate"])
def test_what_reading_the_data_leaves_in_the_process_is_foreseen(
    module: str, command: Command, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen to fail: without `READING` in what the process holds."""
    found = []
    where = (f"model.path={checkpoint}", "host=1KiB" if module == "plan" else "device=cpu")
    monkeypatch.setattr(f"lightning_compress.command.{module}.held_bytes", lambda device: 10**9)
    for reading in (0, 10**9):
        monkeypatch.setattr(f"lightning_compress.command.{module}.READING", reading)
        if module == "plan":
            said = refused(command, "plan", *where, *DATA, "choices.batch_size=[2]")
            found.append(int(re.findall(r"host=(\d+)", said)[-1]))
        else:
            file = tmp_path / "estimate.json"
            command("estimate", *where, "job.num_samples=4", "job.max_length=32", f"json={file}")
            rows = json.loads(file.read_text())["rows"]
            found.append(max(row["total"] for row in rows))
    assert found[1] - found[0] == 10**9
