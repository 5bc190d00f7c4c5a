"""What a run leaves behind, in success and in failure, and how much it holds at a time."""

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    Counting,
    compress,
    compress_in_memory,
    linears,
    modifier,
    prepare,
    recipe,
    tiny_llama,
    token_batches,
    weights,
)
from torch import Tensor, nn

from lightning_compress.calibration.loop import calibrate
from lightning_compress.calibration.prepare import calibrating
from lightning_compress.calibration.records import UNREACHED
from lightning_compress.errors import (
    CalibrationWarning,
    NonFiniteError,
    SolveError,
    UnreachedModulesWarning,
    UnsupportedModelError,
)
from lightning_compress.export.checkpoint import INCOMPLETE
from lightning_compress.export.packed import load_compressed
from lightning_compress.export.writer import Unwritten
from lightning_compress.memory.tracker import LiveMemory
from lightning_compress.memory.transfer import Lane, Sent
from lightning_compress.plugin.run import run_job

LAYER = "model.layers.{}"


def state_of(model: nn.Module) -> dict[str, Any]:
    """Everything about a model that a run has to leave as it was, apart from weights and gradients."""
    return {
        "training": {name: module.training for name, module in model.named_modules()},
        "hooks": {
            name: (list(m._forward_hooks.values()), list(m._forward_pre_hooks.values()))
            for name, m in model.named_modules()
        },
        "own": {name: sorted(module.__dict__) for name, module in model.named_modules()},
        "forwards": {name: module.__dict__.get("forward") for name, module in model.named_modules()},
        "parameters": {
            name: (id(p), p.dtype, p.device, p.requires_grad, p.data_ptr()) for name, p in model.named_parameters()
        },
        "buffers": {name: (b.data_ptr(), b.dtype) for name, b in model.named_buffers()},
        "config": model.config.to_dict() if hasattr(model, "config") else None,
        "grad_mode": torch.is_grad_enabled(),
    }


def used_model() -> nn.Module:
    """A model in the middle of its life: mixed modes, frozen parts, a hook, a patched forward, gradients."""
    model = tiny_llama(2).train()
    model.model.layers[0].mlp.eval()
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[1].mlp.down_proj.register_forward_hook(lambda *_: None)
    act = model.model.layers[0].mlp.act_fn
    act.forward = type(act).forward.__get__(act)
    model(**token_batches(1)[0]).logits.sum().backward()
    return model


@pytest.mark.parametrize("schedule", ["staged", "block", "basic"])
def test_everything_but_the_weights_is_as_before(schedule: str) -> None:
    """Seen to fail: without restoring the modes."""
    model = used_model()
    before, weights = state_of(model), copy.deepcopy(model.state_dict())
    report = compress_in_memory(model, token_batches(), recipe(4), schedule=schedule)
    assert state_of(model) == before
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, weights[name])}
    assert changed == {f"{record.module}.weight" for record in report.modules}
    assert all(parameter.grad is None for parameter in model.parameters()), (
        "gradients of the old weights mean nothing any more"
    )


def test_preparing_changes_nothing() -> None:
    model = used_model()
    before, weights = state_of(model), copy.deepcopy(model.state_dict())
    prepare(model, token_batches(), recipe(4))
    assert state_of(model) == before
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


def broken_llama() -> nn.Module:
    """The second half of the second layer gets infinite inputs."""
    model = tiny_llama(3)
    with torch.no_grad():
        model.model.layers[1].post_attention_layernorm.weight[3] = float("inf")
    return model


def test_activations_that_are_not_finite(tmp_path: Path) -> None:
    """The modules are named, the subgraphs that changed too (the one in the making included), and what is written is
    no checkpoint."""
    model = broken_llama()
    before, weights = state_of(model), copy.deepcopy(model.state_dict())
    with pytest.raises(NonFiniteError) as caught:
        compress(model, token_batches(), recipe(4), tmp_path / "out")
    message = str(caught.value)
    assert "The input of model.layers.1.mlp.gate_proj, model.layers.1.mlp.up_proj holds NaN or Inf" in message
    assert caught.value.__notes__ == [
        "Subgraphs of the model in memory that hold quantized weights already: model.layers.0; perhaps some of "
        "model.layers.1, where it failed. "
        f"2 finished subgraphs are in {tmp_path / 'out'}; the same run continues there."
    ]
    assert state_of(model) == before
    changed = {
        name.rsplit(".", 3)[0].rpartition(".self_attn")[0] or name
        for name, t in model.state_dict().items()
        if not torch.equal(t, weights[name])
    }
    assert all(LAYER.format(0) in name or LAYER.format(1) in name for name in changed)
    assert not (tmp_path / "out" / "config.json").exists()


def test_failing_in_the_first_subgraph_says_that_nothing_changed() -> None:
    model = tiny_llama(2)
    with torch.no_grad():
        model.model.embed_tokens.weight[:] = float("nan")
    with pytest.raises(NonFiniteError, match=r"q_proj, .*k_proj, .*v_proj holds NaN or Inf") as caught:
        compress_in_memory(model, token_batches(), recipe(4))
    assert "hold quantized weights already: none" in caught.value.__notes__[0]


def test_stopping_early_is_partial_and_leaves_no_checkpoint(tmp_path: Path) -> None:
    model = tiny_llama(3)
    generator = run_job(prepare(model, token_batches(), recipe(4), tmp_path / "out"))
    names = [next(generator).name, next(generator).name]
    with pytest.raises(StopIteration) as stopped:
        generator.send(True)
    report = stopped.value.value
    assert names == ["model.embed_tokens", "model.layers.0"]
    assert report.is_partial
    assert f"the same run continues in {tmp_path / 'out'}" in report.summary()
    assert {record.subgraph for record in report.modules} == {"model.layers.0"}
    assert (tmp_path / "out" / INCOMPLETE).exists()
    assert not (tmp_path / "out" / "config.json").exists()


def test_closing_the_generator_restores_the_model() -> None:
    model = used_model()
    before = state_of(model)
    generator = run_job(prepare(model, token_batches(), recipe(4)))
    next(generator)
    generator.close()
    assert state_of(model) == before


def test_no_rank_stops_to_look_at_all_objects_while_the_others_wait() -> None:
    """Cycles among new objects are collected as before; so is everything, when the run ends or fails."""
    before = gc.get_threshold()
    assert before[2] < 1000, "an earlier run has not put it back"
    during = [gc.get_threshold() for _ in run_job(prepare(tiny_llama(), token_batches(), recipe(4)))]
    assert during
    assert {each[:2] for each in during} == {before[:2]}
    assert min(each[2] for each in during) > 10**9
    assert gc.get_threshold() == before
    with pytest.raises(NonFiniteError):
        compress_in_memory(broken_llama(), token_batches(), recipe(4))
    assert gc.get_threshold() == before


def test_input_channels_that_are_always_zero() -> None:
    """They work, their weights are kept on the grid, and the report says so."""
    model = tiny_llama(1)
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight[[2, 7]] = 0
    weights = model.model.layers[0].self_attn.q_proj.weight.detach()[:, [2, 7]].clone()
    report = compress_in_memory(model, token_batches(), recipe(4))
    (record,) = [record for record in report.modules if record.module.endswith("q_proj")]
    assert "2 of 32 input channels were always zero" in "; ".join(record.notes)
    after = model.model.layers[0].self_attn.q_proj.weight.detach()[:, [2, 7]]
    assert torch.isfinite(after).all()
    assert float((after - weights).abs().max()) < 0.3 * float(weights.abs().max())


def test_all_inputs_zero() -> None:
    model = tiny_llama(1)
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight[:] = 0
    with pytest.raises(
        SolveError, match=r"q_proj, .*stacked weight \[64, 32\].*zero in every calibration token.*ignore"
    ):
        compress_in_memory(model, token_batches(), recipe(4))


class Recurrent(nn.Module):
    """Begins with a state of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.go_on = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x[:, 0])
        for number in range(3):
            state = torch.tanh(self.read(x[:, number]) + self.go_on(state))
        return state


def test_modules_whose_later_calls_are_not_seen_are_named() -> None:
    """Seen to fail: "in every calibration token", and no word of it where the first calls had inputs."""
    batches = list(torch.randn(3, 4, 3, 16))
    given = recipe(4, strategy="channel")
    several = pytest.warns(
        CalibrationWarning,
        match="is called several times .*; 2 later ones are not seen, and so are 1 others. schedule=basic sees",
    )
    with several, pytest.raises(SolveError, match=r"that it saw .*schedule=basic sees all"):
        compress_in_memory(Recurrent().eval(), batches, given)
    compress_in_memory(Recurrent().eval(), batches, given, schedule="basic")
    compress_in_memory(Recurrent().eval(), batches, recipe(4, strategy="channel", algorithm="rtn"))


@pytest.mark.filterwarnings("ignore:The model writes to its buffers")
@pytest.mark.parametrize("schedule", ["staged", "block", "basic"])
def test_batches_do_not_see_what_others_wrote_to_buffers(schedule: str, tmp_path: Path) -> None:
    """Seen to fail: a count of calls in the checkpoint, and another in memory. (Ranks: `test_ranks.py`.)"""
    torch.manual_seed(0)
    model, batch = Counting().eval(), torch.randn(4, 3, 16)
    again = copy.deepcopy(model)
    report = compress(model, [batch] * 3, recipe(4, strategy="channel"), tmp_path, schedule=schedule)
    compress_in_memory(again, [batch], recipe(4, strategy="channel"), schedule=schedule)
    assert report.verification is not None
    assert report.verification.passed
    for place in (model, load_compressed(Counting(), tmp_path)):
        assert place.count == 0
        assert not place.mean.any()
    assert torch.equal(model.last.weight, again.last.weight), "all batches went the way of the first"


@pytest.mark.filterwarnings("ignore:The model writes to its buffers")
def test_a_batch_that_fails_leaves_buffers_as_they_were() -> None:
    """Seen to fail: a count of one, and a mean."""
    model = Counting().eval()
    model.last.bfloat16()
    with pytest.raises(RuntimeError, match="dtype"):
        compress_in_memory(model, [torch.randn(4, 3, 16)], recipe(8, strategy="channel"), schedule="basic")
    assert model.count == 0
    assert not model.mean.any()


def test_a_run_with_written_buffers_says_so() -> None:
    with pytest.warns(CalibrationWarning, match="writes to its buffers count, mean, in eval mode too"):
        compress_in_memory(Counting().eval(), list(torch.randn(3, 4, 3, 16)), recipe(4, strategy="channel"))


def test_an_error_of_the_model_says_where_it_was() -> None:
    """Seen to fail: of types that do not fit, which tracing does not see, nothing told whose they were."""
    model = nn.Sequential(nn.Linear(16, 16, dtype=torch.bfloat16), nn.Linear(16, 16), nn.Linear(16, 16)).eval()
    with pytest.raises(RuntimeError, match="dtype") as caught:
        compress_in_memory(model, [torch.randn(4, 16).bfloat16()], recipe(8, strategy="channel"))
    assert "This was 1 (Linear) on calibration data, given [4, 16] torch.bfloat16." in caught.value.__notes__


class Branching(nn.Module):
    """Calls one of its two linears, by what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.often, self.never = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.often(x) if float(x.abs().sum()) < 1e9 else self.never(x)


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.spare = nn.Linear(8, 8), nn.Linear(8, 8)
        self.layers = nn.ModuleList([Branching(), nn.Linear(8, 8)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](self.first(x)))


class Selecting(nn.Module):
    """One of its linears is called with no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.empty, self.last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(x + self.empty(x[x.sum(-1) > 1e9]).sum())


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("correct", [None, "residual"])
def test_a_module_that_no_token_reaches(correct: str | None) -> None:
    """Seen to fail: with error correction its subgraph ended the run."""
    batches = list(torch.randn(4, 3, 5, 16))
    given = recipe(4, **({"correct": correct, "refit": None} if correct else {}))
    report = compress_in_memory(Selecting(), batches, given)
    assert {each.module: each.num_tokens for each in report.modules} == {"first": 60, "empty": 0, "last": 60}


class Keyword(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:  # type: ignore[override]
        return hidden @ self.weight.t()


class ByKeyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Keyword(16, 16), Keyword(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(hidden=self.first(hidden=x))


def test_linears_that_are_called_with_another_keyword() -> None:
    """Seen to fail: a KeyError where inputs are quantized."""
    int8 = {"num_bits": 8, "strategy": "token", "dynamic": True}
    scheme = {"weights": {"num_bits": 8, "strategy": "channel"}, "input_activations": int8}
    report = compress_in_memory(ByKeyword(), [torch.randn(4, 5, 16)], recipe(scheme=scheme))
    assert len(report.modules) == 2


@pytest.mark.filterwarnings("ignore:.*recorded as a single call", "ignore::UserWarning")
def test_modules_that_are_never_called() -> None:
    """Those that the graph does not call are left alone; what is inside a layer that runs as a whole is rounded, for
    there it shows only when all has run. Both are said; what is named in `targets` is refused."""
    batches = [torch.randn(2, 3, 8)]
    torch.manual_seed(0)
    before = Holder()
    model = copy.deepcopy(before)
    with pytest.warns(UnreachedModulesWarning) as warned:
        report = compress_in_memory(model, batches, recipe(4, strategy="channel"))
    told = [str(each.message) for each in warned if each.category is UnreachedModulesWarning]
    assert "spare will not be quantized: Holder.forward(batch) never calls them" in told[0]
    assert "layers.0.never: no calibration token reached them, so they were rounded to nearest" in told[1]
    assert {record.module: record.notes for record in report.modules} == {
        "first": (),
        "layers.0.often": (),
        "layers.0.never": (UNREACHED,),
        "layers.1": (),
    }
    assert [each.module for each in report.excluded] == ["spare"]
    assert "never calls it" in report.excluded[0].reason
    assert torch.equal(model.spare.weight, before.spare.weight)
    compress_in_memory(before, None, recipe(4, "rtn", strategy="channel", scale_search=True))
    torch.testing.assert_close(model.layers[0].never.weight, before.layers[0].never.weight, rtol=1e-6, atol=0)
    assert [fallback.hidden for fallback in report.fallbacks if fallback.hidden] == [
        ("layers.0.never", "layers.0.often")
    ]
    named = r"spare \(Linear, weight of shape \[8, 8\]\) is named in `targets`.*never calls it"
    with pytest.raises(UnsupportedModelError, match=named):
        compress_in_memory(Holder(), batches, recipe(4, strategy="channel", targets=["Linear", "spare"]))
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": False}
    static = {"weights": weights(8, strategy="channel"), "input_activations": inputs}
    with pytest.raises(SolveError, match=r"No token reached layers.0.never"):
        compress_in_memory(Holder(), batches, recipe(scheme=static))


def test_several_schemes_on_one_input() -> None:
    modifiers = [modifier(4), modifier(8, targets=["re:.*v_proj"]), modifier(3, "rtn", targets=["re:.*k_proj"])]
    model = tiny_llama(1)
    report = compress_in_memory(model, token_batches(), {"modifiers": modifiers})
    schemes = {
        record.module.rpartition(".")[2]: (record.algorithm, record.scheme.split()[0], record.solved_with)
        for record in report.modules
    }
    assert schemes["q_proj"] == ("Gptq", "W4A16", ())
    assert schemes["v_proj"] == ("Gptq", "W8A16", ())
    assert schemes["k_proj"] == ("Rtn", "W3A16", ())
    assert schemes["gate_proj"][2] == ("model.layers.0.mlp.up_proj",)
    assert len(model.model.layers[0].self_attn.k_proj.weight[0, :16].unique()) <= 8


def test_data_free_recipes_run_nothing() -> None:
    model = tiny_llama(2)
    report = compress_in_memory(model, None, recipe(4, "rtn"))
    assert report.schedule == "datafree"
    assert [subgraph.name for subgraph in report.subgraphs] == ["model.layers.0", "model.layers.1"]
    with pytest.raises(UnsupportedModelError, match="Schedule 'datafree' runs nothing, but the recipe has algorithms"):
        compress_in_memory(tiny_llama(1), token_batches(), recipe(4), schedule="datafree")


def test_weights_that_are_rounded_to_infinity(tmp_path: Path) -> None:
    """The step of values from -65000 to 65000 is 8667 at 4 bits, and the lowest code stands for -69333. Seen to fail:
    the checkpoint held Inf, and was read back as identical."""
    model = tiny_llama(2).half()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, :2] = torch.tensor([65000.0, -65000.0])
    with pytest.raises(SolveError, match=r"^model.layers.1.mlp.down_proj: .* W4A16 .* to Inf in torch.float16. Load"):
        compress(model, None, recipe(4, "rtn"), tmp_path / "out")
    assert model.model.layers[1].mlp.down_proj.weight.isfinite().all()
    assert not (tmp_path / "out" / "config.json").exists()


def test_quantized_inputs_act_in_memory() -> None:
    """W8A8: later layers, and the user's own `trainer.test`, see what the checkpoint's runtime will compute."""
    scheme = {
        "weights": {"num_bits": 8, "strategy": "channel"},
        "input_activations": {"num_bits": 8, "strategy": "token", "dynamic": True},
    }
    both, weights_only = tiny_llama(1), tiny_llama(1)
    compress_in_memory(both, None, recipe(scheme=scheme, algorithm="rtn"))
    compress_in_memory(weights_only, None, recipe(8, "rtn", strategy="channel"))
    assert all(torch.equal(a, b) for a, b in zip(both.parameters(), weights_only.parameters(), strict=True))
    batch = token_batches(1)[0]
    assert not torch.equal(both(**batch).logits, weights_only(**batch).logits)
    assert all(len(linear._forward_pre_hooks) == (name != "lm_head") for name, linear in linears(both).items())


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["staged", "recompute", "block"])
def test_memory_does_not_grow_with_depth(monkeypatch: pytest.MonkeyPatch, schedule: str) -> None:
    """Live bytes of what a device would hold (onloaded weights, activations, statistics, the cache), counted storage
    by storage.

    Onloading copies, as to a device. Seen to fail: with weights that stay onloaded, with values that stay in the cache
    after their last use, and with statistics that are never forgotten.
    """
    monkeypatch.setattr(Lane, "is_away", lambda *_: True)
    monkeypatch.setattr(Lane, "send", lambda _, tensor: Sent(tensor.clone()))
    peaks, left = {}, {}
    for depth in (2, 2, 4, 8):  # the first run of a process makes 16 bytes that stay
        job = prepare(
            tiny_llama(depth, hidden_size=64, intermediate_size=128),
            token_batches(4, rows=4),
            recipe(4),
            schedule=schedule,
        )
        at_home = list(job.target.root.state_dict().values())
        with calibrating(job.target.root), LiveMemory() as memory:
            memory.ignore(*at_home)
            for record in calibrate(job.run, Unwritten()):
                assert record.index < record.num_subgraphs
        peaks[depth], left[depth] = memory.peak_bytes, memory.live_bytes
    assert peaks[2] == peaks[4] == peaks[8], peaks
    assert left[2] == left[4] == left[8], left


def test_memory_of_basic_grows_with_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above would look like if nothing were freed; the tracker does see it."""
    peaks = []
    for depth in (2, 4):
        job = prepare(tiny_llama(depth), token_batches(), recipe(4), schedule="basic")
        with calibrating(job.target.root), LiveMemory() as memory:
            for _ in calibrate(job.run, Unwritten()):
                pass
        peaks.append(memory.peak_bytes)
    assert peaks[1] > 1.4 * peaks[0]


def test_activations_of_a_batch_do_not_grow_with_depth() -> None:
    """Nothing is cut in `basic`: values have to die within the batch. Broken once by dropping them at its end."""
    inputs = {"num_bits": 8, "strategy": "tensor", "dynamic": False}  # statistics of two numbers a linear
    scheme = {"weights": {"num_bits": 8, "strategy": "channel"}, "input_activations": inputs}
    peaks = []
    for depth in (2, 6):
        job = prepare(
            tiny_llama(depth), token_batches(1, rows=32), recipe(scheme=scheme, algorithm="rtn"), schedule="basic"
        )
        at_home = list(job.target.root.state_dict().values())
        with calibrating(job.target.root), LiveMemory() as memory:
            memory.ignore(*at_home)
            for _ in calibrate(job.run, Unwritten()):
                pass
        peaks.append(memory.peak_bytes)
    assert peaks[1] < 1.05 * peaks[0], peaks


def test_values_are_dropped_at_their_last_use() -> None:
    """Between subgraphs the cache holds the one hidden state that crosses the cut (and what all layers read), not its
    history."""
    job = prepare(tiny_llama(4), token_batches(), recipe(4))
    sizes = [record.activation_bytes for record in calibrate(job.run, Unwritten())]
    hidden = 4 * 2 * 16 * 32 * 4
    assert sizes[1] == sizes[2] == sizes[3]
    assert hidden <= sizes[1] < 2 * hidden
    assert len(job.run.flow.cache) == 4


def test_recompute_gives_the_same_weights_in_less_memory() -> None:
    """Four times the width of the residual waits in `staged` before a down projection, and does not in `recompute`."""
    peaks, weights = {}, {}
    for schedule in ("staged", "recompute"):
        model = tiny_llama(2, intermediate_size=128)
        job = prepare(model, token_batches(32), recipe(4), schedule=schedule)
        with calibrating(model), LiveMemory() as memory:
            memory.ignore(*model.state_dict().values())
            for _ in calibrate(job.run, Unwritten()):
                pass
        peaks[schedule], weights[schedule] = memory.peak_bytes, list(model.parameters())
    assert all(torch.equal(*pair) for pair in zip(*weights.values(), strict=True))
    hidden = 32 * 2 * 16 * 32 * 4
    assert peaks["recompute"] < peaks["staged"] - 2 * hidden, peaks


def test_tied_embeddings_stay_tied_and_whole() -> None:
    model = tiny_llama(1, tie_word_embeddings=True)
    embedding = model.get_input_embeddings().weight.clone()
    compress_in_memory(model, token_batches(), recipe(4))
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert torch.equal(model.lm_head.weight, embedding)
