"""An interrupted run is continued to the very bytes of an uninterrupted one.

Seen to fail: with activations of the unquantized prefix, without the quantized inputs of finished modules, without the
statistics that later subgraphs share, with files that a killed process leaves in the folder, with shards of what no
subgraph holds that are not in the manifest or begin anew, with a source that is not asked where it ends, with a
read-ahead that fails before its turn, and with what the first of two passes saw of a value used in a later subgraph.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    UNREAD_BY_OLDER,
    Skipping,
    compress,
    contents,
    manifest,
    padded,
    prepare,
    recipe,
    run,
    saved,
    tiny_llama,
    token_batches,
)
from processes import Script
from torch import Tensor, nn
from transformers import AlbertConfig, AlbertModel, AutoModelForCausalLM, T5Config, T5ForConditionalGeneration

from lightning_compress.calibration.boundary import FOLDER
from lightning_compress.calibration.resume import MANIFEST
from lightning_compress.errors import CompressionError, OutputDirectoryError
from lightning_compress.export import shards
from lightning_compress.export.checkpoint import INCOMPLETE
from lightning_compress.export.packed import load_compressed
from lightning_compress.memory.files import INDEX
from lightning_compress.plugin import run as run_module
from lightning_compress.plugin.job import Job
from lightning_compress.plugin.run import run_job

STATIC = {"num_bits": 8, "strategy": "tensor", "dynamic": False}


def stopped(job: Job, num_subgraphs: int) -> None:
    """Run so many subgraphs, then end as if told to."""
    generator = run_job(job)
    for _ in range(num_subgraphs):
        next(generator)
    with pytest.raises(StopIteration):
        generator.send(True)


def t5() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_decoder_layers": 3, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=64, decoder_start_token_id=0, **sizes))


def t5_batches() -> list[Any]:
    return [{**batch, "decoder_input_ids": batch["input_ids"][:, :6]} for batch in padded(token_batches(length=9))]


def albert() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"embedding_size": 8, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    return AlbertModel(AlbertConfig(vocab_size=64, intermediate_size=16, **sizes))


def dense_batches() -> list[Any]:
    return list(torch.randn(4, 3, 9, 32, generator=torch.Generator().manual_seed(0)))


WHERE = ["memory", "disk"]
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], list[Any]], dict[str, Any], str]] = {
    "staged": (lambda: tiny_llama(3), token_batches, {}, "staged"),
    "recompute": (lambda: tiny_llama(3), token_batches, {}, "recompute"),
    "block": (lambda: tiny_llama(3), token_batches, {}, "block"),
    "bf16": (lambda: tiny_llama(3, dtype=torch.bfloat16), token_batches, {}, "staged"),
    "static inputs": (
        lambda: tiny_llama(3),
        token_batches,
        {"scheme": {"weights": {"num_bits": 8, "strategy": "channel"}, "input_activations": STATIC}},
        "staged",
    ),
    "floats under a global scale": (
        lambda: tiny_llama(3, dtype=torch.bfloat16),
        token_batches,
        {"scheme": "NVFP4"},
        "staged",
    ),
    "corrected": (lambda: tiny_llama(3), lambda: padded(token_batches()), {"correct": "residual"}, "staged"),
    "corrected block": (lambda: tiny_llama(3), token_batches, {"correct": "residual", "refit": 1}, "block"),
    "gptaq": (lambda: tiny_llama(3), token_batches, {"correct": "gptaq"}, "staged"),
    "corrected behind shared layers": (albert, token_batches, {"group_size": 8, "correct": "residual"}, "staged"),
    "one statistic for many subgraphs": (t5, t5_batches, {"group_size": 16}, "staged"),
    "shared layers": (albert, token_batches, {"group_size": 8}, "staged"),
    "a skip connection": (Skipping, dense_batches, {"group_size": 16}, "block"),
}
ON_DISK = [("staged", "disk"), ("corrected", "disk"), ("block", "disk"), ("shared layers", "disk")]


def with_weights(where: str, build: Callable[[], nn.Module], folder: Path) -> Callable[..., Job]:
    """`helpers.prepare` for a model in memory or, with weights in `folder`, on disk."""
    if where == "memory":
        return lambda *args, **settings: prepare(build().eval(), *args, **{"verify": False, **settings})
    empty = saved(build().eval(), folder, max_shard_size="2KB")
    return lambda *args, **settings: prepare(empty, *args, weights=folder, **settings)


@pytest.mark.sampled(9)
@UNREAD_BY_OLDER
@pytest.mark.filterwarnings("ignore:.* is called several times")
@pytest.mark.parametrize(("case", "where"), [*((case, "memory") for case in CASES), *ON_DISK])
def test_stopped_after_every_subgraph(case: str, where: str, tmp_path: Path) -> None:
    build, batches, options, schedule = CASES[case]
    given = recipe(4, **options) if "scheme" not in options else recipe(**options)
    make = with_weights(where, build, tmp_path / "weights")

    def job(folder: str) -> Job:
        return make(batches(), given, tmp_path / folder, schedule=schedule)

    whole = run(job("whole"))
    expected = contents(tmp_path / "whole")
    for number in range(1, len(whole.subgraphs)):
        folder = tmp_path / str(number)
        stopped(job(str(number)), number)
        assert (folder / INCOMPLETE).is_file()
        assert not (folder / "config.json").exists()
        again = job(str(number))
        report = run(again)
        assert report.num_resumed == number
        assert [record.module for record in report.modules] == [record.module for record in whole.modules]
        assert [record.error for record in report.modules] == [record.error for record in whole.modules]
        assert contents(folder) == expected
        assert manifest(folder) == manifest(tmp_path / "whole")
        assert not (folder / INCOMPLETE).exists()


def test_the_model_in_memory_is_the_checkpoint_after_resuming(tmp_path: Path) -> None:
    """Also where all that was left to do was the last step."""
    for number in (2, 4):
        out = tmp_path / str(number)
        generator = run_job(prepare(tiny_llama(3), token_batches(), recipe(4), out))
        for _ in range(number):
            next(generator)
        generator.close()
        report = compress(tiny_llama(3), token_batches(), recipe(4), out)
        assert report.verification is not None
        assert report.verification.passed
        assert (f"had finished {number} subgraphs" if number == 2 else "all subgraphs had been") in report.summary()


def test_a_run_of_something_else_is_not_continued(tmp_path: Path) -> None:
    out = tmp_path / "out"
    stopped(prepare(tiny_llama(2), token_batches(), recipe(4), out), 2)
    before = contents(out)
    others = {
        "recipe": (tiny_llama(2), token_batches(), recipe(3), {}),
        "layout": (tiny_llama(2), token_batches(), recipe(4), {"schedule": "block"}),
        "model": (tiny_llama(2, seed=1), token_batches(), recipe(4), {}),
        "data": (tiny_llama(2), token_batches(seed=1), recipe(4), {}),
    }
    for name, (model, batches, given, settings) in others.items():
        with pytest.raises(OutputDirectoryError, match=rf"differs in {name}, so .* resume='never' .* to start over"):
            compress(model, batches, given, out, **settings)
        assert contents(out) == before
    report = compress(tiny_llama(2), token_batches(), recipe(3), out, resume=False)
    assert report.num_resumed == 0
    assert AutoModelForCausalLM.from_pretrained(out) is not None


class Chain(nn.Module):
    """Computes something else with the same weights."""

    def __init__(self, factor: float = 1.0, is_residual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.register_buffer("factor", torch.tensor(factor), persistent=False)
        self.is_residual = is_residual

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * self.factor + (x if self.is_residual else 0)
        return x


@pytest.mark.parametrize(
    ("begun", "other", "batches"),
    [
        (lambda: tiny_llama(2), lambda: tiny_llama(2, rms_norm_eps=0.1), token_batches()),
        (Chain, lambda: Chain(factor=2.0), [torch.ones(2, 16)]),
        (Chain, lambda: Chain(is_residual=True), [torch.ones(2, 16)]),
    ],
    ids=["configuration", "buffer", "code"],
)
def test_a_model_that_computes_something_else_is_not_continued(
    begun: Callable[[], nn.Module], other: Callable[[], nn.Module], batches: list[Any], tmp_path: Path
) -> None:
    """Its weights are the same. Seen to fail: half of the checkpoint was made for one model, half for the other."""
    given = {"sequential_targets": ["Linear"]} if begun is Chain else {}
    stopped(prepare(begun(), batches, recipe(4), tmp_path / "out", **given), 2)
    with pytest.raises(OutputDirectoryError, match="differs in model"):
        compress(other(), batches, recipe(4), tmp_path / "out", **given)
    assert compress(begun(), batches, recipe(4), tmp_path / "out", **given).num_resumed == 2


def test_a_line_that_was_cut_off_does_not_count(tmp_path: Path) -> None:
    run(prepare(tiny_llama(2), token_batches(), recipe(4), tmp_path / "whole"))
    stopped(prepare(tiny_llama(2), token_batches(), recipe(4), tmp_path / "out"), 2)
    manifest = tmp_path / "out" / MANIFEST
    manifest.write_bytes(manifest.read_bytes()[:-20])
    report = run(prepare(tiny_llama(2), token_batches(), recipe(4), tmp_path / "out"))
    assert report.num_resumed == 1
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_line_that_was_damaged(tmp_path: Path) -> None:
    """The last one as if it were cut off, which a power failure may do; others are named."""
    run(prepare(tiny_llama(2), token_batches(), recipe(4), tmp_path / "whole"))
    out = tmp_path / "out"
    stopped(prepare(tiny_llama(2), token_batches(), recipe(4), out), 2)
    manifest = out / MANIFEST
    whole = manifest.read_bytes()
    header, first, second = whole.splitlines(keepends=True)
    for damaged, message in (
        (header + b"\0\0\0\n" + second, rf"Line 2 of {manifest} is damaged \(JSONDecodeError: .*resume='never'"),
        (b"", rf"{manifest} cannot be read \(JSONDecodeError: .*resume='never'"),
        (b"[]\n" + first, rf"{manifest} cannot be read \(TypeError"),
        (whole + second * 2, rf"Line 4 of {manifest} is damaged \(ValueError: .* subgraph 1; did two runs write here"),
    ):
        manifest.write_bytes(damaged)
        with pytest.raises(OutputDirectoryError, match=message):
            run(prepare(tiny_llama(2), token_batches(), recipe(4), out))
    manifest.write_bytes(header + first + b"\0" * len(second) + b"\n")
    assert run(prepare(tiny_llama(2), token_batches(), recipe(4), out)).num_resumed == 1
    assert contents(out) == contents(tmp_path / "whole")


def test_a_finished_run_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have been killed behind its last file, or a queue starts it twice. Seen to fail: computed anew, and with a
    file left that one was killed over."""
    out = tmp_path / "out"

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run_module, "_verified", killed)
        with pytest.raises(KeyboardInterrupt):
            compress(tiny_llama(2), token_batches(), recipe(4), out)
    assert not (out / INCOMPLETE).exists()
    assert not (out / "report.json").exists()
    before = {file: (file.stat().st_ino, file.stat().st_mtime_ns) for file in out.glob("*.safetensors")}
    content = contents(out)
    (out / ".0123.partial").touch()  # another was killed when it looked whether it can write here
    report = compress(tiny_llama(2), token_batches(), recipe(4), out)
    assert report.num_resumed == len(report.subgraphs)
    assert "all subgraphs had been finished by an earlier run" in report.summary()
    assert report.verification is not None
    assert report.verification.passed
    assert (out / "report.json").is_file()
    assert {file: (file.stat().st_ino, file.stat().st_mtime_ns) for file in out.glob("*.safetensors")} == before
    assert contents(out) == content
    assert compress(tiny_llama(2), token_batches(), recipe(4), out, resume=False).num_resumed == 0


def test_a_shard_of_a_finished_checkpoint_is_made_anew(tmp_path: Path) -> None:
    """With all behind it, as the error of a damaged one says. Seen to fail: everything was computed anew, and the
    checkpoint was called one of another run."""
    out = tmp_path / "out"
    compress(tiny_llama(3), token_batches(), recipe(4), out)
    content = contents(out)
    shard = out / json.loads((out / MANIFEST).read_text().splitlines()[3])["shards"][0]["name"]
    shard.write_bytes(shard.read_bytes()[:-5])
    with pytest.raises(OutputDirectoryError, match="or delete it: then it and everything behind it is computed anew"):
        compress(tiny_llama(3), token_batches(), recipe(4), out)
    shard.unlink()
    stopped(prepare(tiny_llama(3), token_batches(), recipe(4), out), 1)
    assert (out / INCOMPLETE).exists()
    assert not {"config.json", "report.json", "report.html"} & {path.name for path in out.iterdir()}
    report = compress(tiny_llama(3), token_batches(), recipe(4), out)
    assert report.num_resumed == 2
    assert not report.notes
    assert contents(out) == content


def test_files_that_another_rank_removes_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has one of its own in the folder for a moment. Seen to fail where they had to be there."""
    job = prepare(tiny_llama(2), token_batches(), recipe(4), tmp_path / "out")
    stopped(job, 1)
    for name in (".one.partial", ".two.partial"):
        (tmp_path / "out" / name).touch()
    unlink = Path.unlink

    def all_at_once(self: Path, missing_ok: bool = False) -> None:
        for each in self.parent.glob(".*.partial"):
            if each != self:
                unlink(each)
        unlink(self, missing_ok)

    monkeypatch.setattr(Path, "unlink", all_at_once)
    assert run(prepare(tiny_llama(2), token_batches(), recipe(4), tmp_path / "out")).num_resumed == 1


def test_what_is_not_ours_stays_in_the_folder(tmp_path: Path) -> None:
    """When a finished checkpoint is replaced. What the earlier run alone had written is removed. Seen to fail: a folder
    `activations`, which a run may have had."""
    out = tmp_path / "out"
    save = tiny_llama(1).config.to_json_file

    class Tokenizer:
        def save_pretrained(self, folder: str) -> None:
            (Path(folder) / "extra").mkdir()
            save(Path(folder) / "extra" / "tokenizer.json")

    compress(tiny_llama(3), token_batches(), recipe(4), out, tokenizer=Tokenizer())
    assert (out / "extra" / "tokenizer.json").is_file()
    all_mine = ("mine.txt", "notes/mine.txt", f"{FOLDER}/notes/mine.txt")
    for mine in all_mine:
        (out / mine).parent.mkdir(parents=True, exist_ok=True)
        (out / mine).write_text("mine")
    compress(tiny_llama(2), token_batches(), recipe(3), out)
    assert not (out / "extra" / "tokenizer.json").exists()
    assert {(out / mine).read_text() for mine in all_mine} == {"mine"}
    index = json.loads((out / INDEX).read_text())["weight_map"]
    assert {file.name for file in out.glob("*.safetensors")} == set(index.values())
    assert AutoModelForCausalLM.from_pretrained(out) is not None


def test_a_shard_that_changed_or_is_gone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(prepare(tiny_llama(3), token_batches(), recipe(4), tmp_path / "whole"))
    stopped(prepare(tiny_llama(3), token_batches(), recipe(4), out), 3)
    shard = out / json.loads((out / MANIFEST).read_text().splitlines()[2])["shards"][0]["name"]
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    for broken in (bytes(content), bytes(content[:-100])):
        shard.write_bytes(broken)
        with pytest.raises(OutputDirectoryError, match=r"holds subgraph model.layers.0, is not what.*delete"):
            run(prepare(tiny_llama(3), token_batches(), recipe(4), out))
    shard.unlink()
    assert run(prepare(tiny_llama(3), token_batches(), recipe(4), out)).num_resumed == 1
    assert contents(out) == contents(tmp_path / "whole")


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says where, how much is missing, and that nothing is lost; then the run is continued."""
    out = tmp_path / "out"
    calls = []

    def full(state: Any, path: Path, metadata: Any) -> None:
        calls.append(path)
        if len(calls) == 3:
            Path(path).write_bytes(b"half")
            raise OSError(28, "No space left on device")
        save(state, path, metadata=metadata)

    save = shards.save_file
    monkeypatch.setattr(shards, "save_file", full)
    with pytest.raises(OutputDirectoryError, match=r"model-00003-of-00004.safetensors .* MB are free.*continues"):
        compress(tiny_llama(2), token_batches(), recipe(4), out)
    assert not list(out.glob(".*"))
    report = compress(tiny_llama(2), token_batches(), recipe(4), out)
    assert report.num_resumed == 2
    run(prepare(tiny_llama(2), token_batches(), recipe(4), tmp_path / "whole"))
    assert contents(out) == contents(tmp_path / "whole")


def test_a_folder_that_is_removed_in_mid_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not said that there is no room, nor that the run can be continued."""
    out = tmp_path / "out"
    save = shards.save_file

    def removed(state: Any, path: Path, metadata: Any) -> None:
        if "00002" in str(path):
            shutil.rmtree(out)
        save(state, path, metadata=metadata)

    monkeypatch.setattr(shards, "save_file", removed)
    with pytest.raises(OutputDirectoryError, match=r"out is not there any more, so model-00002.*start again") as raised:
        compress(tiny_llama(2), token_batches(), recipe(4), out)
    assert not any(words in str(raised.value) for words in ("Make room", "continues there"))


def test_a_folder_that_a_full_disk_has_no_room_for(tmp_path: Path) -> None:
    """It is not said to have been removed."""
    full = OSError(28, "No space left on device")
    with pytest.raises(OutputDirectoryError, match="Make room"), shards.writing(tmp_path / "out", "its first files"):
        raise full


def test_a_manifest_whose_header_is_no_header(tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(prepare(tiny_llama(2), token_batches(), recipe(4), out))
    manifest = out / MANIFEST
    header, _, lines = manifest.read_text().partition("\n")
    for fingerprints in (["model"], None, 3):
        broken = json.dumps({**json.loads(header), "fingerprints": fingerprints})
        manifest.write_text(f"{broken}\n{lines}")
        with pytest.raises(OutputDirectoryError, match=r"manifest.jsonl cannot be read .* over there"):
            run(prepare(tiny_llama(2), token_batches(), recipe(4), out))


def test_too_small_a_disk_is_found_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is finished already, and what is replaced, does not count."""
    run(prepare(tiny_llama(3), token_batches(), recipe(4), tmp_path / "whole", verify=False))
    needed = sum(len(content) for name, content in contents(tmp_path / "whole").items() if "safetensors" in name)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed // 2))
    with pytest.raises(OutputDirectoryError, match=r"needs about 0.0 MB, and .*out has 0.0 MB left. Make room"):
        run(prepare(tiny_llama(3), token_batches(), recipe(4), tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    run(prepare(tiny_llama(3), token_batches(), recipe(4), tmp_path / "whole", verify=False))


@pytest.mark.slow
def test_a_source_that_is_cut_off_in_mid_run(tmp_path: Path) -> None:
    """The error names the file; what was finished stays, and the run goes on when the file is whole again."""
    make = with_weights("disk", lambda: tiny_llama(4), tmp_path / "in")
    run(make(token_batches(), recipe(4), tmp_path / "whole"))
    index = json.loads((tmp_path / "in" / INDEX).read_text())["weight_map"]
    for number, key in ((4, "model.layers.3.mlp.down_proj.weight"), (5, "lm_head.weight")):
        out, file = tmp_path / str(number), tmp_path / "in" / index[key]
        content = file.read_bytes()
        generator = run_job(make(token_batches(), recipe(4), out))
        next(generator)
        file.write_bytes(content[: len(content) // 2])
        with pytest.raises(CompressionError, match=rf"{file.name} has been written to or replaced since .* again"):
            list(generator)
        with pytest.raises(CompressionError, match=f"{file.name} is cut off"):
            make(token_batches(), recipe(4), out)
        file.write_bytes(content)
        assert run(make(token_batches(), recipe(4), out)).num_resumed == number
        assert contents(out) == contents(tmp_path / "whole")


def test_an_unfinished_folder_is_no_checkpoint(tmp_path: Path) -> None:
    stopped(prepare(tiny_llama(2), token_batches(), recipe(4), tmp_path / "out"), 2)
    with pytest.raises((OSError, ValueError)):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with pytest.raises(CompressionError, match="holds no compressed checkpoint"):
        load_compressed(tiny_llama(2), tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("where", WHERE)
def test_killed_after_and_before_every_line(where: str, tmp_path: Path) -> None:
    """Real processes, kill -9: what the manifest holds then is not written again, and the end is the same bytes."""
    assert killed("each", where, tmp_path) == 2 * 7, "five subgraphs, and two shards of what they do not hold"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("where", WHERE)
def test_killed_at_any_instant(where: str, tmp_path: Path) -> None:
    """20 runs, each killed twice (-9) at random instants and then let finish."""
    assert killed("random", where, tmp_path) >= 1, "some were to be killed between two subgraphs"


def killed(mode: str, where: str, folder: Path) -> int:
    """What `killed_runs.py` counts."""
    done = Script(Path(__file__).with_name("killed_runs.py"), mode, where, str(folder)).wait()
    assert done.returncode == 0, done.stderr
    return int(done.stdout.splitlines()[-1])
