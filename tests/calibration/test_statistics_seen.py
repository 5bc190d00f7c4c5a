"""What the engine's statistics are: those of plain hooks on the original model, whatever the schedule and the
architecture.

The weights lie on their grid already, so quantizing changes nothing and all schedules must see the same inputs. Seen to
fail: with padding tokens left in, with observation at the end of a block instead of before the first reader, with the
first of two passes working on the cached values themselves, with every k/v of T5 observed for itself, and with
a mask [B, L] laid on values [L, B, C].
"""

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from helpers import (
    UNCHANGING,
    VOCAB,
    Counting,
    Skipping,
    ViewsBlock,
    compress_in_memory,
    gram_sum,
    input_grams,
    make_representable,
    padded,
    prepare,
    ragged_batches,
    recipe,
    seen_statistics,
    tiny_llama,
    token_batches,
)
from torch import Tensor, nn
from transformers import (
    AlbertConfig,
    AlbertModel,
    GPTJConfig,
    GPTJForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
)

from lightning_compress.algorithms.base import input_gram
from lightning_compress.calibration.observe import tokens
from lightning_compress.errors import CalibrationWarning
from lightning_compress.memory import activations
from lightning_compress.memory.placement import MemoryConfig

IN_MEMORY = MemoryConfig()
SCHEDULES = ["staged", "recompute", "block", "basic"]


class InPlaceBlock(nn.Module):
    """Changes its input in place, reads what it changes, changes through a view, and activates in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(width, width) for _ in range(3))
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x += 0.2 * self.a(x)
        h = self.act(self.b(x))
        h[:, 0] = 0
        x += 0.2 * self.c(h)
        return x


class PartsBlock(nn.Module):
    """Reads a value again that it has changed through one of a list of views."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        y = self.b(h)
        h.chunk(2, -1)[0].mul_(0.5)
        return x + y + self.c(h)


class OpaqueBlock(InPlaceBlock):
    """Reads values, so that it only runs as a whole."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if float(x.sum()) < 1e9 else x


class Reading(nn.Module):
    """Runs as a whole only."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if float(x.sum()) < 1e9 else x


class Turning(Reading):
    """Takes samples for positions inside."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(0, 1)).transpose(0, 1)


class Positions(nn.Module):
    """Each token for itself; the block may be given one position of all samples at a time [L, B, C]."""

    def __init__(self, block: nn.Module, turns: bool) -> None:
        super().__init__()
        self.embedding, self.block, self.head = nn.Embedding(VOCAB, 16), block, nn.Linear(16, 16)
        self.turns = turns

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        x = self.embedding(batch["input_ids"])
        x = self.block(x.transpose(0, 1)).transpose(0, 1) if self.turns else self.block(x)
        return self.head(x)


class Stack(nn.Module):
    """Blocks between two linears; `x` is read again after a later write through a view of it."""

    def __init__(self, block: type[nn.Module], width: int = 16) -> None:
        super().__init__()
        self.stem, self.middle, self.head = nn.Linear(8, width), nn.Linear(width, width), nn.Linear(width, width)
        self.tail = nn.Linear(width, 4)
        self.layers = nn.ModuleList([block(width) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        y = self.middle(x)
        x[:, -1] = y[:, -1]
        return self.tail(x + self.head(x))


IN_PLACE = [InPlaceBlock, OpaqueBlock, PartsBlock, ViewsBlock]


def dense_batches() -> list[Tensor]:
    return [torch.randn(3, 7, 8) for _ in range(3)]


def gptj() -> nn.Module:
    config = GPTJConfig(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=64, bos_token_id=1, eos_token_id=2
    )
    return GPTJForCausalLM(config)


def t5() -> nn.Module:
    config = T5Config(
        vocab_size=VOCAB,
        d_model=16,
        d_kv=8,
        d_ff=16,
        num_layers=1,
        num_decoder_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)


def t5_batches() -> list[dict[str, Tensor]]:
    """Encoder inputs with padding, decoder inputs without."""
    return [{**batch, "decoder_input_ids": batch["input_ids"][:, :6]} for batch in padded(token_batches(length=9))]


def check(
    monkeypatch: pytest.MonkeyPatch,
    model: nn.Module,
    batches: list[Any],
    schedule: str,
    call: Any = None,
    memory: MemoryConfig = IN_MEMORY,
    **options: Any,
) -> Mapping[str, Any]:
    """Run the engine and compare every Gram with the hooks' on the model as it was."""
    model = make_representable(model.eval())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    grams = input_grams(model, [batch.clone() if isinstance(batch, Tensor) else batch for batch in batches], call)
    seen = seen_statistics(monkeypatch)
    report = compress_in_memory(model, batches, recipe(**UNCHANGING, **options), schedule=schedule, memory=memory)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items()), (
        "the weights were to stay"
    )
    assert len(seen) == len(report.modules) > 0
    for name, statistics in seen.items():
        torch.testing.assert_close(
            gram_sum(statistics),
            grams[name],
            rtol=1e-4,
            atol=1e-5 * float(grams[name].diagonal().mean()),
            msg=lambda m, n=name: f"{n}: {m}",
        )
    return seen


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "batches",
    [token_batches, ragged_batches, lambda: padded(token_batches(), left=True)],
    ids=["plain", "ragged", "left"],
)
def test_llama(monkeypatch: pytest.MonkeyPatch, batches: Callable[[], list[Any]], schedule: str) -> None:
    check(monkeypatch, tiny_llama(2), batches(), schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_members_apart(monkeypatch: pytest.MonkeyPatch, schedule: str) -> None:
    check(monkeypatch, gptj(), token_batches(), schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_encoder_and_decoder(monkeypatch: pytest.MonkeyPatch, schedule: str) -> None:
    """The mask of the encoder's tokens is not the decoder's; the encoder's output is counted once for all its
    readers."""
    seen = check(monkeypatch, t5(), t5_batches(), schedule)
    for name, statistics in seen.items():
        (statistic,) = statistics.values()
        from_encoder = name.startswith("encoder") or name.endswith(("EncDecAttention.k", "EncDecAttention.v"))
        assert statistic.num_tokens == 4 * 2 * (9 if from_encoder else 6), name
    k = "decoder.block.{}.layer.1.EncDecAttention.k"
    torch.testing.assert_close(gram_sum(seen[k.format(0)]), gram_sum(seen[k.format(1)]), rtol=0, atol=0)


@pytest.mark.parametrize("schedule", ["staged", "recompute", "block"])
def test_what_later_blocks_read_comes_from_quantized_modules(monkeypatch: pytest.MonkeyPatch, schedule: str) -> None:
    """Also where a module of the block that computes it reads it, too. Seen to fail by 19 %, under `block`: with the
    statistics of the block's first pass, which has the original weights."""
    model, batches = Skipping().eval(), [torch.randn(3, 7, 32) for _ in range(3)]
    seen = seen_statistics(monkeypatch)
    compress_in_memory(model, batches, recipe(2, group_size=32), schedule=schedule)
    expected = input_grams(model, batches, call=model)["layers.1.skip"]
    torch.testing.assert_close(gram_sum(seen["layers.1.skip"]), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("block", IN_PLACE)
@pytest.mark.filterwarnings("ignore:.*recorded as a single call")
def test_operations_in_place(monkeypatch: pytest.MonkeyPatch, block: type[nn.Module], schedule: str) -> None:
    model = Stack(block)
    check(monkeypatch, model, dense_batches(), schedule, call=model)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("block", IN_PLACE)
@pytest.mark.filterwarnings("ignore:.*recorded as a single call")
def test_operations_in_place_with_values_that_wait_in_a_file(
    monkeypatch: pytest.MonkeyPatch, block: type[nn.Module], schedule: str
) -> None:
    """What is written to a value has to be brought back, and seen in its views that wait. Seen to fail: without the
    first; with views that are not loaded with it; with a new view stored apart from what it is of; with parts copied
    that are changed later."""
    monkeypatch.setattr(activations, "LEAST_SPILLED", 1)
    model = Stack(block)
    check(monkeypatch, model, dense_batches(), schedule, call=model, memory=MemoryConfig(activation_budget=0))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.filterwarnings("ignore:.*recorded as a single call")
def test_opaque_layers(monkeypatch: pytest.MonkeyPatch, schedule: str) -> None:
    """Mamba loops over the sequence: its mixer runs as a whole and is observed from inside."""
    torch.manual_seed(0)
    model = MambaForCausalLM(
        MambaConfig(
            vocab_size=VOCAB, hidden_size=16, state_size=4, time_step_rank=4, num_hidden_layers=2, use_cache=False
        )
    )
    check(monkeypatch, model, token_batches(2), schedule, ignore=["lm_head", "re:.*dt_proj"])


@pytest.mark.parametrize(
    ("block", "turns", "lengths"),
    [
        (partial(nn.Linear, 16, 16), True, ((9, 4), (1, 2))),
        (Reading, True, ((9, 4), (1, 2))),
        (Turning, True, ((9, 4), (16, 11))),
        (Turning, False, ((9, 4), (16, 11))),
    ],
    ids=["traced", "opaque", "opaque, turns back", "opaque, turns"],
)
@pytest.mark.filterwarnings("ignore:.*recorded as a single call")
def test_padding_of_positions_of_all_samples(
    monkeypatch: pytest.MonkeyPatch, block: Callable[[], nn.Module], turns: bool, lengths: Sequence[Sequence[int]]
) -> None:
    """Longformer's and LED's attention. What sizes alone do not tell (as many samples as positions) the graph does."""
    torch.manual_seed(0)
    model = make_representable(Positions(block(), turns).eval())
    batches = ragged_batches(lengths)
    alone = [
        {"input_ids": ids[None, : int(mask.sum())]}
        for batch in batches
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    grams = input_grams(model, alone, call=model)
    seen = seen_statistics(monkeypatch)
    compress_in_memory(model, batches, recipe(**UNCHANGING))
    assert seen.keys() == grams.keys()
    for name, statistics in seen.items():
        torch.testing.assert_close(gram_sum(statistics), grams[name], rtol=1e-4, atol=1e-4)


def test_values_of_other_rows_keep_them_all() -> None:
    """As many rows as tokens, but the first size is not the samples': what is a token is not known there."""
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0]])
    x = torch.arange(12.0)
    assert tokens(x.view(3, 2, 2, 1), mask).flatten().tolist() == [0, 1, 2, 4, 8, 9]
    for other in ((2, 6, 1), (4, 1, 3, 1), (6, 2, 1)):
        assert tokens(x.view(other), mask).flatten().tolist() == x.tolist()


class Heads(nn.Module):
    """Linears on values [B, L, H, C] and [B, H, L, C]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 32)
        self.behind, self.before, self.out = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(32, 32)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.behind(self.embed(batch["input_ids"]).unflatten(-1, (2, 16)))
        x = self.before(x.transpose(1, 2)).transpose(1, 2).flatten(-2)
        y: Tensor = self.out(x)
        return y


def test_padding_of_values_with_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As without padding. Seen to fail: all rows counted, for there are more of them than tokens."""
    torch.manual_seed(0)
    model = make_representable(Heads().eval())
    found = []
    for batches in (token_batches(), padded(token_batches())):
        seen = seen_statistics(monkeypatch)
        report = compress_in_memory(copy.deepcopy(model), batches, recipe(**UNCHANGING))
        found.append({name: gram_sum(statistics) for name, statistics in seen.items()})
        assert [each.num_tokens for each in report.modules] == [256, 256, 128]
    for name, gram in found[0].items():
        torch.testing.assert_close(found[1][name], gram)


def test_tokens_that_all_attend_to_are_no_padding() -> None:
    """Seen to fail: one token of each sample, by a field `global_attention_mask`, was all that counted."""
    model = Positions(nn.Linear(16, 16), turns=False)
    batches = token_batches(2)
    of_all = [{**batch, "global_attention_mask": torch.eye(1, 16).long().expand(2, 16)} for batch in batches]
    report = compress_in_memory(model, of_all, recipe())
    assert {record.num_tokens for record in report.modules} == {2 * 2 * 16}


@pytest.mark.filterwarnings("ignore:.* is called several times")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_shared_layers(monkeypatch: pytest.MonkeyPatch, schedule: str) -> None:
    """ALBERT: basic sees all three calls before it solves; the others the first call, the result serving the later
    ones."""
    torch.manual_seed(0)
    config = AlbertConfig(
        vocab_size=VOCAB,
        embedding_size=8,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=16,
    )
    model = make_representable(AlbertModel(config).eval())
    batches = token_batches()
    grams: list[Tensor] = []
    handle = (
        model.encoder.albert_layer_groups[0]
        .albert_layers[0]
        .ffn.register_forward_pre_hook(lambda _, args: grams.append(args[0].detach().double().flatten(0, 1)))
    )
    for batch in batches:
        model(**batch)
    handle.remove()
    observed = grams if schedule == "basic" else grams[::3]
    x = torch.cat(observed)
    seen = seen_statistics(monkeypatch)
    report = compress_in_memory(model, batches, recipe(**UNCHANGING), schedule=schedule)
    name = "encoder.albert_layer_groups.0.albert_layers.0.ffn"
    torch.testing.assert_close(gram_sum(seen[name]), x.T @ x, rtol=1e-4, atol=1e-4)
    records = [record for record in report.modules if record.module == name]
    assert [(record.num_calls, record.num_tokens) for record in records] == [(3, len(x))]


@pytest.mark.filterwarnings("ignore:The model writes to its buffers")
@pytest.mark.parametrize("schedule", ["staged", "recompute", "block", "basic"])
def test_what_is_written_to_a_buffer_is_read_behind_a_cut(monkeypatch: pytest.MonkeyPatch, schedule: str) -> None:
    """As by a model that sees this batch alone. Seen to fail: with what the buffer held before."""
    torch.manual_seed(0)
    model = make_representable(Counting().eval())
    batches = list(torch.randn(3, 4, 3, 16))
    copies = [copy.deepcopy(model) for _ in batches]
    alone = [input_grams(each, [batch], each) for each, batch in zip(copies, batches, strict=True)]
    seen = seen_statistics(monkeypatch)
    compress_in_memory(model, batches, recipe(**UNCHANGING), schedule=schedule)
    for name in ("first", "last", "out"):
        expected = torch.stack([grams[name] for grams in alone]).sum(0)
        torch.testing.assert_close(gram_sum(seen[name]), expected, rtol=1e-4, atol=1e-4)


class Averaging(nn.Module):
    """Keeps a running mean of what it sees, which it subtracts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.5).add_(x.mean((0, 1)))
        return x - self.mean


@pytest.mark.filterwarnings("ignore:The model writes to its buffers")
def test_buffers_that_each_of_several_like_modules_writes() -> None:
    """Seen to fail: of modules like the first it did not show, so the order of batches decided on the result."""
    batches = [x + 3 * number for number, x in enumerate(torch.randn(4, 3, 5, 16))]
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(Averaging(), nn.Linear(16, 16)) for _ in range(3))).eval()
    models = [copy.deepcopy(model) for _ in range(2)]
    for each, order in zip(models, (batches, batches[::-1]), strict=True):
        compress_in_memory(each, order, recipe(4))
    for (name, one), other in zip(models[0].state_dict().items(), models[1].state_dict().values(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.filterwarnings("ignore:The model writes to its buffers")
def test_the_original_model_beside_writes_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: with error correction a batch counted twice, so inputs were scaled by another count."""
    torch.manual_seed(0)
    model = make_representable(Counting().eval())
    batches = list(torch.randn(9, 4, 3, 16))
    found = []
    for correct in ({}, {"correct": "inputs"}):
        seen = seen_statistics(monkeypatch)
        compress_in_memory(copy.deepcopy(model), batches, recipe(8, **correct))
        found.append({name: input_gram(statistics).matrix() for name, statistics in seen.items()})
    for name, gram in found[0].items():
        torch.testing.assert_close(found[1][name], gram, rtol=0.02, atol=0.02)


def test_static_input_ranges_skip_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """MinMax of the unpadded tokens alone: padding positions hold the largest embedding of all. Broken once by keeping
    them."""
    model = tiny_llama(1)
    with torch.no_grad():
        model.get_input_embeddings().weight[0] *= 50
    scheme = {
        "weights": {"num_bits": 8, "strategy": "channel"},
        "input_activations": {"num_bits": 8, "strategy": "tensor", "dynamic": False},
    }
    ranges = []
    for batches in (token_batches(), padded(token_batches())):
        seen = seen_statistics(monkeypatch)
        compress_in_memory(copy.deepcopy(model), batches, recipe(scheme=scheme, algorithm="rtn"))
        ranges.append(
            {
                name: [tensor.clone() for tensor, _ in next(iter(found.values())).reductions().values()]
                for name, found in seen.items()
            }
        )
    for name, expected in ranges[0].items():
        torch.testing.assert_close(ranges[1][name], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:.*recorded as a single call", "ignore:.*output shape is taken from a run")
@pytest.mark.parametrize(("num_padding", "algorithm"), [(0, "gptq"), (150, "gptq"), (150, "rtn")])
def test_padding_of_sounds_that_is_not_known_in_frames_is_told(num_padding: int, algorithm: str) -> None:
    """Where there are statistics. Seen to fail: with masks that nothing reads passed over, and with those that mark
    nothing told of."""
    convolutions = {"conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2}
    positions = {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2}
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    model = Wav2Vec2ForCTC(Wav2Vec2Config(vocab_size=32, **sizes, **convolutions, **positions))
    mask = torch.ones(2, 400, dtype=torch.long)
    mask[1, 400 - num_padding :] = 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prepare(
            model,
            [{"input_values": torch.randn(2, 400), "attention_mask": mask}] * 2,
            recipe(4, algorithm, strategy="channel"),
        )
    said = [each for each in caught if "attention_mask marks it in the samples of a sound" in str(each.message)]
    assert len(said) == (num_padding > 0 and algorithm == "gptq")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_forward_pre_hooks_make_of_an_input(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: what the module was called with was counted, and not what it multiplied."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).eval()
    model[1].register_forward_pre_hook(lambda module, args: (args[0] * torch.arange(16.0),))
    make_representable(model)
    batches = list(torch.randn(3, 4, 5, 16))
    expected = input_grams(model, batches, call=model)
    seen = seen_statistics(monkeypatch)
    compress_in_memory(model, batches, recipe(**UNCHANGING), schedule=schedule)
    for name, gram in expected.items():
        torch.testing.assert_close(gram_sum(seen[name]), gram, rtol=1e-4, atol=1e-3)


class AskingForOne(nn.Module):
    """Computes something else for a single row, and asks about it where it makes no difference, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x.relu() if x.shape[0] == 1 else x.sigmoid()
        y: Tensor = self.last(x)
        return y


def test_batches_of_one_row_take_their_own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: a graph of at least two rows served them, silently."""
    torch.manual_seed(0)
    model = make_representable(AskingForOne().eval())
    batches = list(torch.randn(3, 1, 5, 16))
    expected = input_grams(model, batches, model)
    seen = seen_statistics(monkeypatch)
    compress_in_memory(copy.deepcopy(model), batches, recipe(**UNCHANGING))
    for name, gram in expected.items():
        torch.testing.assert_close(gram_sum(seen[name]), gram, rtol=1e-4, atol=1e-4)
    with pytest.warns(
        CalibrationWarning, match=r"something else for a batch of one row .*\(batch 1 of 2\) .*drop_last"
    ):
        compress_in_memory(copy.deepcopy(model), [torch.randn(4, 5, 16), torch.randn(1, 5, 16)], recipe(**UNCHANGING))


@pytest.mark.parametrize("rows", [1, 2])
def test_models_that_only_ask_serve_batches_of_one(rows: int) -> None:
    """Nothing is said, for nothing differs: transformers asks about lengths and rows of one in many places."""
    batches = [*token_batches(1, rows=2), *token_batches(1, rows=rows, length=1), *token_batches(1, rows=1)]
    assert len(compress_in_memory(tiny_llama(1), batches, recipe()).modules) == 7
