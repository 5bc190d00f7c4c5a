"""The report says what happened: as data, as a table, in a few lines, and in one file that needs nothing else."""

import json
import re
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from helpers import compress, compress_in_memory, modifier, padded, recipe, tiny_llama, token_batches
from rich.console import Console

from lightning_compress.calibration.quantized import describe_scheme
from lightning_compress.errors import RunWarning
from lightning_compress.graph.fallback import OF_ONE_SIZE, Fallback
from lightning_compress.recipe.load import load_recipe
from lightning_compress.report.figures import error_figure, lanes_figure
from lightning_compress.report.html import render_html
from lightning_compress.report.report import Report

MIXED = {"modifiers": [modifier(4, ignore=["lm_head", "re:.*o_proj"]), modifier(8, "rtn", targets=["re:.*down_proj"])]}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, Path]:
    """A run with padding, two schemes, dead channels and something ignored."""
    model = tiny_llama(2)
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight[3] = 0
    directory = tmp_path_factory.mktemp("report") / "out"
    return compress(model, padded(token_batches()), MIXED, directory), directory


def test_every_module_has_its_record(saved: tuple[Report, Path]) -> None:
    report, _ = saved
    assert len(report.modules) == 2 * 6
    for record in report.modules:
        assert 0 < record.error < 0.2, record
        assert record.num_calls == 1
        assert record.num_tokens in (4 * 2 * 16, 0)
        assert record.bytes_before == 4 * record.shape[0] * record.shape[1]
        assert 0 < record.bytes_after < record.bytes_before
        assert record.subgraph == ".".join(record.module.split(".")[:3])
    by_name = {record.module: record for record in report.modules}
    assert by_name["model.layers.0.self_attn.q_proj"].solved_with == (
        "model.layers.0.self_attn.k_proj",
        "model.layers.0.self_attn.v_proj",
    )
    assert by_name["model.layers.1.mlp.down_proj"].algorithm == "Rtn"
    assert by_name["model.layers.1.mlp.down_proj"].scheme == "W8A16 group 16"
    assert by_name["model.layers.0.self_attn.q_proj"].damping == pytest.approx(0.01)


def test_whole_run(saved: tuple[Report, Path]) -> None:
    report, directory = saved
    assert (report.model, report.schedule, report.device, report.num_batches) == (
        "LlamaForCausalLM",
        "staged",
        "cpu",
        4,
    )
    assert report.has_padding
    assert not report.is_partial
    assert report.output_dir == str(directory)
    assert report.total_s > report.trace_s > 0
    assert {entry.module for entry in report.excluded} == {
        "model.embed_tokens", "lm_head", "model.layers.0.self_attn.o_proj", "model.layers.1.self_attn.o_proj",
    }  # fmt: skip
    assert load_recipe(report.recipe) == load_recipe(MIXED)
    assert [subgraph.name for subgraph in report.subgraphs] == [
        "model.embed_tokens",
        "model.layers.0",
        "model.layers.1",
    ]
    assert all(
        subgraph.num_subgraphs == 3 and subgraph.index == number for number, subgraph in enumerate(report.subgraphs)
    )
    assert all(
        min(subgraph.onload_s, subgraph.run_s, subgraph.solve_s, subgraph.peak_bytes) >= 0
        for subgraph in report.subgraphs
    )


def test_bytes_are_those_of_the_state_dict(saved: tuple[Report, Path]) -> None:
    report, _ = saved
    before = sum(parameter.nbytes for parameter in tiny_llama(2).parameters())
    saving = sum(record.bytes_before - record.bytes_after for record in report.modules)
    assert report.bytes_before == before
    assert report.bytes_after == before - saving


def test_tied_weights_count_once() -> None:
    model = tiny_llama(1, tie_word_embeddings=True)
    report = compress_in_memory(model, None, recipe(4, "rtn"))
    assert report.bytes_before == sum(parameter.nbytes for parameter in model.parameters())


def test_json(saved: tuple[Report, Path]) -> None:
    report, directory = saved
    content = json.loads((directory / "report.json").read_text())
    assert content == json.loads(json.dumps(report.to_dict()))
    assert (content["verified"], content["num_modules"]) == (True, 12)
    assert content["subgraphs"][1]["modules"][0]["module"] == "model.layers.0.self_attn.q_proj"


def test_html_is_self_contained(saved: tuple[Report, Path]) -> None:
    """Nothing is fetched from anywhere, and every module is in it."""
    report, directory = saved
    html = (directory / "report.html").read_text()
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!#|data:)[^"']+""", html)
    assert "@import" not in html
    assert "<svg" in html
    for record in report.modules:
        assert record.module in html
    assert "always zero" in html


def test_a_strategy_that_follows_from_the_group_size_is_named_as_one_that_is_given() -> None:
    scheme = (
        load_recipe({"modifiers": [{"algorithm": "rtn", "scheme": {"weights": {"num_bits": 4, "group_size": 8}}}]})
        .modifiers[0]
        .scheme
    )
    assert describe_scheme(scheme) == "W4A16 group 8"


def test_a_narrow_table_breaks_names_of_modules_alone(saved: tuple[Report, Path]) -> None:
    report, _ = saved
    notes = ("a note of some words that takes more room than there is",)
    parts = [
        replace(part, modules=tuple(replace(each, notes=(*notes, each.module)) for each in part.modules))
        for part in report.subgraphs
    ]
    name = "model.layers.11.block_sparse_moe.experts.*.down_proj (64)"
    module = replace(report.modules[0], module=name, scheme="W4A16 group 128", notes=notes)
    parts[1] = replace(parts[1], modules=(module, *parts[1].modules))
    console = Console(width=80)
    with console.capture() as capture:
        console.print(replace(report, subgraphs=tuple(parts)).table())
    printed = capture.get()
    assert "W4A16 group 128" in printed
    for record in report.modules:
        assert f"{record.error:.2e}" in printed
    assert "\N{HORIZONTAL ELLIPSIS}" not in printed


def test_summary(saved: tuple[Report, Path]) -> None:
    report, directory = saved
    summary = report.summary()
    assert "12 modules quantized" in summary
    assert "(staged on cpu, 4 batches)" in summary
    assert "lm_head (ignored by the recipe (lm_head))" in summary
    assert "read back with transformers LlamaForCausalLM.from_pretrained: identical" in summary
    assert summary.endswith(f"checkpoint: {directory}")
    worst = max(report.modules, key=lambda record: record.error)
    assert f"largest {worst.error:.2e} ({worst.module})" in summary


def test_sizes_of_a_small_model_are_none_of_zero(saved: tuple[Report, Path]) -> None:
    """Seen to fail: "0.0 MB -> 0.0 MB"."""
    report = replace(saved[0], bytes_before=7_200, bytes_after=900)
    assert "all weights: 7.2 kB -> 900 bytes" in report.summary()
    assert "7.2 kB &rarr; 900 bytes" in render_html(report.to_dict())
    assert "all weights: 141.1 GB -> " in replace(report, bytes_before=141_107_000_000).summary()


def test_errors_of_modules_with_quantized_inputs_are_of_their_weights() -> None:
    """Seen to fail: with an error that seems to be of both."""
    inputs = {"input_activations": {"num_bits": 8, "strategy": "token", "dynamic": True}}
    for of_inputs, is_said in ((inputs, True), ({}, False)):
        scheme = {"weights": {"num_bits": 8, "strategy": "channel"}, **of_inputs}
        report = compress_in_memory(tiny_llama(1), token_batches(), recipe(algorithm="rtn", scheme=scheme))
        assert ("relative output error of the weights, with inputs as they are: mean" in report.summary()) == is_said


@pytest.mark.parametrize(("most", "said"), [(0.0, "changes no output"), (0.25, "changes outputs by up to 0.25")])
def test_what_differing_buffers_change_is_said(saved: tuple[Report, Path], most: float, said: str) -> None:
    verification = saved[0].verification
    assert verification is not None
    found = replace(verification, different_buffers=("inv_freq",), max_abs_difference_as_loaded=most)
    assert (
        f"inv_freq differ after loading (a checkpoint does not store them), which {said}"
        in replace(saved[0], verification=found).summary()
    )


def test_table(saved: tuple[Report, Path]) -> None:
    report, _ = saved
    console = Console(width=240, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(report.table())
    text = console.export_text()
    console.file.close()
    assert all(record.module in text for record in report.modules)
    assert "1 of 32 input channels were always zero" in text
    assert "64x32" in text


def test_a_note_of_all_modules_is_told_once(saved: tuple[Report, Path]) -> None:
    report, _ = saved
    parts = [
        replace(part, modules=tuple(replace(each, notes=("of all",)) for each in part.modules))
        for part in report.subgraphs
    ]
    other = replace(parts[1].modules[0], notes=("of one", "of all"))
    for modules, heading in (((parts[1].modules), 0), ((other, *parts[1].modules[1:]), 1)):
        console = Console(width=120)
        with console.capture() as capture:
            console.print(replace(report, subgraphs=(replace(parts[1], modules=modules), *parts[2:])).table())
        printed = capture.get()
        assert printed.count("of all") == 1
        assert "all modules: of all" in printed
        assert printed.count("of one") == printed.count("notes") == heading


def test_partial_runs_say_so() -> None:
    report = compress_in_memory(tiny_llama(1), token_batches(), recipe(4))
    assert report.verification is None
    assert report.output_dir is None
    assert "checkpoint" not in report.summary()
    assert "nothing was written (output_dir is None)" in report.summary()
    assert "PARTIAL" in Report(**{**vars(report), "is_partial": True}).summary()
    assert report.to_dict()["verified"] is None


def test_the_report_says_of_what_it_is(saved: tuple[Report, Path]) -> None:
    report, directory = saved
    html, content = (directory / "report.html").read_text(), json.loads((directory / "report.json").read_text())
    assert (report.num_samples, report.num_tokens) == (
        8,
        sum(int(b["attention_mask"].sum()) for b in padded(token_batches())),
    )
    assert content["date"] == report.date
    assert content["versions"]["torch"] == version("torch")
    for fact in (report.date, f"transformers {version('transformers')}", f"{report.num_samples} samples"):
        assert fact in html


@pytest.mark.parametrize(("num_batches", "said"), [(0, "none was needed"), (3, "<dd>3 batches")])
def test_of_what_has_no_tokens_no_number_is_said(saved: tuple[Report, Path], num_batches: int, said: str) -> None:
    """Seen to fail: "0 samples, 0 tokens" of images."""
    page = render_html(replace(saved[0], num_samples=None, num_tokens=None, num_batches=num_batches).to_dict())
    assert said in page
    assert "tokens, " not in page


def test_samples_beyond_the_positions_are_told_of(tmp_path: Path) -> None:
    with pytest.warns(RunWarning, match="16 tokens are more than the 12 positions that LlamaForCausalLM is made for"):
        report = compress(tiny_llama(1, max_position_embeddings=12), token_batches(), recipe(4), tmp_path / "out")
    assert len(report.notes) == 1
    assert f"note: {report.notes[0]}" in report.summary()


def test_the_finished_checkpoint_of_another_run_is_not_replaced_silently(tmp_path: Path) -> None:
    first = compress(tiny_llama(1), token_batches(), recipe(4), tmp_path / "out")
    again = compress(tiny_llama(1), token_batches(), recipe(4), tmp_path / "out")
    other = compress(tiny_llama(1), token_batches(), recipe(8), tmp_path / "out")
    assert first.notes == again.notes == ()
    assert "held the finished checkpoint of another run" in other.summary()


def test_writing_and_reading_back_draw_no_bars(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    compress(tiny_llama(1), token_batches(), recipe(4), tmp_path / "out")
    assert "0it" not in (printed := capfd.readouterr().err)
    assert "%|" not in printed


def test_names_that_are_no_text(saved: tuple[Report, Path], tmp_path: Path) -> None:
    """Bytes of a file name that are no UTF-8. Seen to fail: an error behind the finished checkpoint."""
    report, _ = saved
    as_json, as_html = replace(report, model_path="u\udce9", output_dir="u\udce9").save(tmp_path)
    assert json.loads(as_json.read_text(encoding="utf-8"))["output_dir"] == "u\udce9"
    assert r"u\udce9" in as_html.read_text(encoding="utf-8")


def test_weights_are_read_before_the_run_that_needs_them() -> None:
    """In the picture of a plan's lanes. Seen to fail: with reading drawn from the run on, and without lanes of
    `mapping` and `pinning`."""
    axes = pytest.importorskip("matplotlib.figure").Figure().add_subplot()
    lanes = {"disk": 4.0, "pinning": 0.1, "compute": 1.0, "mapping": 0.5, "writing": 0.5}
    seconds = {"run_s": 1.0, "solve_s": 0.0, "write_s": 0.5}
    subgraphs = [{"onload_s": 4.0, **seconds, "lanes": lanes}, {"onload_s": 2.5, **seconds, "lanes": lanes}]
    lanes_figure.__wrapped__(axes, subgraphs, [])  # type: ignore[attr-defined]
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "disk",
        "pinning",
        "compute",
        "mapping",
        "writing",
    ]
    disk = [bar for bar in axes.patches if bar.get_y() == -0.4]
    assert [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in disk] == [(0.0, 4.0), (4.0, 8.0)]
    assert axes.get_xlim()[0] == 0


def test_modules_of_any_name_are_in_the_legend() -> None:
    """Seen to fail: without `_proj`, and with a warning where all are such; with an error about `$_$_$`."""
    figure = pytest.importorskip("matplotlib.figure").Figure
    for names in (["a._proj"], ["a._proj", "a.$_$_$", "b.fc"]):
        axes = figure().add_subplot()
        error_figure.__wrapped__(axes, [(name, 0.1) for name in names])  # type: ignore[attr-defined]
        assert [text.get_text().strip() for text in axes.get_legend().get_texts()] == [name[2:] for name in names]
        assert error_figure([(name, 0.1) for name in names]).count("<svg") == 1


def test_what_is_of_some_batches_only_was_not_run_as_a_whole(saved: tuple[Report, Path]) -> None:
    """Seen to fail: `run as a whole: `, of the model."""
    whole = Fallback("layers.0", "recorded as a single call: it loops")
    one_size = Fallback("", "the graph serves batches of one size only", how=OF_ONE_SIZE)
    report = replace(saved[0], fallbacks=(whole, one_size))
    lines = report.summary().splitlines()
    assert "run as a whole: layers.0 (recorded as a single call: it loops)" in lines
    assert "recorded for batches of one size: the model (the graph serves batches of one size only)" in lines
    page = render_html(report.to_dict())
    assert "<h2>Run as a whole</h2>" in page
    assert "<h2>Recorded for batches of one size</h2>" in page
    assert page.index("layers.0</td>") < page.index("<h2>Recorded for") < page.index("<td>the model</td>")
