"""Where calibration data comes from, how much of it is read, and what is refused."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import datasets
import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler, Subset
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    ViTConfig,
)

from lightning_compress.calibration.batches import CalibrationSet, collect
from lightning_compress.calibration.target import fields_of
from lightning_compress.errors import CalibrationDataError, CalibrationWarning
from lightning_compress.plugin.data import calibration_set

from .conftest import BATCH_SIZE, LENGTH, VOCABULARY, TinyModule, compression, loader, samples


@pytest.fixture
def read(make_trainer: Any) -> Callable[..., CalibrationSet]:
    """The calibration set that a run with these Trainer options and this data would use."""

    def run(
        calibration: Any = None, train: Any = None, max_samples: int | None = None, seed: int = 0, **options: Any
    ) -> CalibrationSet:
        found: list[CalibrationSet | None] = []

        class Peek(pl.Callback):
            def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
                before = torch.random.get_rng_state()
                found.append(calibration_set(trainer, pl_module, calibration, max_samples, seed, trains=True))
                assert torch.equal(torch.random.get_rng_state(), before)
                trainer.fit_loop.max_epochs = 0

        make_trainer(Peek(), **options).fit(TinyModule(), loader() if train is None else train)
        assert found[0] is not None
        return found[0]

    return run


def tokens(data: CalibrationSet) -> list[list[int]]:
    return [row.tolist() for batch in data.batches for row in batch["input_ids"]]


def rows(number: int = 16, start: int = 0) -> list[list[int]]:
    return [sample["input_ids"].tolist() for sample in samples(number, start)]


# ---- sources


def test_the_callbacks_own_loader_comes_first(read: Any) -> None:
    assert tokens(read(calibration=loader(4, start=9))) == rows(4, start=9)
    assert tokens(read()) == rows(16)


def test_a_list_of_batches(read: Any) -> None:
    assert tokens(read(calibration=list(loader(8)))) == rows(8)


@pytest.mark.parametrize(
    "collection",
    [
        lambda: [loader(4), loader(12, start=5)],
        lambda: {"short": loader(4), "long": loader(12, start=5)},
        lambda: [{"short": loader(4)}, [loader(12, start=5)]],
        lambda: {"short": [loader(4)], "long": {"one": loader(12, start=5)}},
        lambda: CombinedLoader({"short": loader(4), "long": loader(12, start=5)}, "max_size_cycle"),
    ],
    ids=["list", "dict", "nested", "nested in a dict", "combined"],
)
def test_several_loaders_are_read_one_after_the_other(read: Any, collection: Any) -> None:
    """Lightning's own way of combining them repeats the short one."""
    expected = rows(4) + rows(12, start=5)
    assert tokens(read(train=collection())) == expected
    assert tokens(read(calibration=collection())) == expected


def test_lists_of_batches_in_a_mapping_are_loaders(read: Any) -> None:
    """Seen to fail: their tensors were taken for loaders, and the rows of these for batches."""
    assert tokens(read(calibration={"short": list(loader(4)), "long": list(loader(12, start=5))})) == (
        rows(4) + rows(12, start=5)
    )


def test_shares_of_several_loaders(read: Any) -> None:
    assert (
        tokens(read(calibration=[loader(16), loader(16, start=5)], max_samples=16))
        == rows(16)[:8] + rows(16, start=5)[:8]
    )


# ---- how much


@pytest.mark.parametrize(
    ("options", "number"),
    [
        ({"limit_train_batches": 2}, 8),
        ({"limit_train_batches": 0.5}, 8),
        ({"limit_train_batches": 1.0}, 16),
        ({"max_samples": 8}, 8),
        ({"max_samples": 5}, 8),
        ({"max_samples": 100}, 16),
        ({"max_samples": 12, "limit_train_batches": 2}, 8),
        ({"fast_dev_run": 3}, 12),
        ({"overfit_batches": 1}, 4),
    ],
)
def test_limits(read: Any, options: dict[str, Any], number: int) -> None:
    assert len(tokens(read(**options))) == number


def test_512_samples_by_default(read: Any) -> None:
    assert len(tokens(read(calibration=loader(520, batch_size=16)))) == 512


def test_limit_train_batches_limits_the_tokens(make_trainer: Any) -> None:
    callback = compression(when="only")
    make_trainer(callback, limit_train_batches=2).fit(TinyModule(), loader())
    assert callback.report is not None
    assert {record.num_tokens for record in callback.report.modules} == {2 * BATCH_SIZE * LENGTH}


# ---- randomness


@pytest.mark.parametrize("from_train", [True, False])
def test_shuffling_gives_one_set_for_one_seed(read: Any, from_train: bool) -> None:
    def once(seed: int) -> list[list[int]]:
        torch.manual_seed(torch.seed() % 1000)
        shuffled = loader(shuffle=True)
        return tokens(
            read(seed=seed, max_samples=8, **({"train": shuffled} if from_train else {"calibration": shuffled}))
        )

    assert once(0) == once(0) != once(1)


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_distributed_sampler_of_ones_own(read: Any, shuffle: bool) -> None:
    """Every rank reads all of it, in one order. Seen to fail: each its own half, which is refused after the
    training."""
    sets = [
        tokens(read(DataLoader(samples(11), batch_size=2, sampler=DistributedSampler(samples(11), 2, rank, shuffle))))
        for rank in (0, 1)
    ]
    assert sets[0] == sets[1]
    assert sorted(sets[0]) == sorted(rows(11))
    assert (sets[0] == rows(11)) == (not shuffle)


class Named(DataLoader[Any]):
    def __init__(self, name: str, number: int, rank: int) -> None:
        super().__init__(samples(number), batch_size=2, sampler=DistributedSampler(samples(number), 2, rank))


def test_a_loader_that_cannot_be_made_without_its_sampler(read: Any) -> None:
    with pytest.raises(CalibrationDataError, match=r"Named has a DistributedSampler.*`calibration_dataloader\(\)`"):
        read(Named("mine", 11, 0))


def test_generators_are_left_as_they_were(read: Any) -> None:
    generator = torch.Generator().manual_seed(5)
    before = generator.get_state()
    read(calibration=[loader(shuffle=True), loader(shuffle=True, generator=generator)])
    assert torch.equal(generator.get_state(), before)


class Drawing(Sampler[int]):
    """An order by a generator of its own."""

    def __init__(self, rng: Any, permuted: Callable[[Any], list[int]]) -> None:
        self.rng = rng
        self.permuted = permuted

    def __iter__(self) -> Iterator[int]:
        return iter(self.permuted(self.rng))

    def __len__(self) -> int:
        return 16


@pytest.mark.parametrize(
    ("make", "permuted"),
    [
        (lambda: np.random.default_rng(3), lambda rng: rng.permutation(16).tolist()),
        (lambda: np.random.RandomState(3), lambda rng: rng.permutation(16).tolist()),
        (lambda: random.Random(3), lambda rng: rng.sample(range(16), 16)),
        (lambda: torch.Generator().manual_seed(3), lambda rng: torch.randperm(16, generator=rng).tolist()),
    ],
    ids=["numpy", "numpy's older", "python", "torch"],
)
def test_generators_of_a_users_own_sampler(read: Any, make: Any, permuted: Any) -> None:
    """Seen to fail: training had the order that would have come behind it."""
    sampler = Drawing(make(), permuted)
    assert tokens(read(calibration=loader(sampler=sampler))) != rows()
    assert list(sampler) == list(Drawing(make(), permuted))


def test_generators_of_a_data_set_that_is_split(read: Any) -> None:
    """Seen to fail: only those of the outermost were looked for."""

    class Noisy(Dataset[Any]):
        def __init__(self) -> None:
            self.rng = random.Random(3)

        def __len__(self) -> int:
            return 16

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            return {"input_ids": torch.tensor([self.rng.randrange(VOCABULARY) for _ in range(LENGTH)])}

    inner = Noisy()
    parts = ConcatDataset([Subset(inner, range(8)), Subset(inner, range(8, 16))])
    read(calibration=DataLoader(parts, batch_size=4))
    assert inner.rng.random() == random.Random(3).random()


# ---- as training would see the batch


class Normalizing(TinyModule):
    """What it makes of a batch counts, and has parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scale, self.num_seen = nn.BatchNorm1d(LENGTH), nn.Parameter(torch.ones(())), 0

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.num_seen += 1
        embedded = self.model.get_input_embeddings()(batch["input_ids"])
        return {"inputs_embeds": self.norm(embedded) * self.scale}


def test_what_hooks_change_and_compute(make_trainer: Any) -> None:
    """Seen to fail: training had other running means, and batches held what autograd keeps."""
    module, found = Normalizing(), []

    class Peek(pl.Callback):
        def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            found.append(calibration_set(trainer, module, None, None, 0, trains=True))
            trainer.fit_loop.max_epochs = 0

    make_trainer(Peek()).fit(module, loader())
    assert (module.num_seen, int(module.norm.num_batches_tracked)) == (0, 0)
    assert not any(batch["inputs_embeds"].requires_grad for batch in found[0].batches)


def test_transfer_hooks_run(make_trainer: Any) -> None:
    module, callback = TinyModule(), compression(when="only")

    def crop(batch: dict[str, Tensor], dataloader_idx: int) -> dict[str, Tensor]:
        assert module.trainer.training
        return {key: value[:, :6] for key, value in batch.items()}

    module.on_after_batch_transfer = crop  # type: ignore[method-assign]
    make_trainer(callback).fit(module, loader())
    assert callback.report is not None
    assert {record.num_tokens for record in callback.report.modules} == {16 * 6}


def test_hooks_before_the_transfer_run(read: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: with those at and after the transfer only."""

    def name(module: TinyModule, batch: Tensor, dataloader_idx: int) -> dict[str, Tensor]:
        return {"input_ids": batch}

    monkeypatch.setattr(TinyModule, "on_before_batch_transfer", name)
    assert tokens(read(calibration=[batch["input_ids"] for batch in loader()])) == rows(16)


def test_precision_converts_inputs(read: Any) -> None:
    batches = [{"inputs_embeds": torch.randn(2, 5, 32)}]
    assert read(calibration=batches, precision="bf16-true").batches[0]["inputs_embeds"].dtype == torch.bfloat16


# ---- refused


class Stream(IterableDataset[dict[str, Tensor]]):
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while True:
            yield from samples(16)


class FiniteStream(IterableDataset[dict[str, Tensor]]):
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        yield from samples(16)

    def __len__(self) -> int:
        return 16


@pytest.mark.parametrize(
    "options", [{}, {"limit_train_batches": 0.5, "max_samples": 8}], ids=["no limit", "a fraction of an unknown length"]
)
def test_streams_without_a_limit_are_refused(read: Any, options: dict[str, Any]) -> None:
    for stream in (DataLoader(Stream(), batch_size=4), (batch for batch in loader())):
        with pytest.raises(CalibrationDataError, match=r"stream.*max_samples=512.*limit_train_batches=<int>"):
            read(calibration=stream, **options)


@pytest.mark.parametrize("options", [{"max_samples": 8}, {"limit_train_batches": 2}])
def test_streams_with_a_limit(read: Any, options: dict[str, Any]) -> None:
    """Every DataLoader has a `__len__`, which raises for streams."""
    assert tokens(read(calibration=DataLoader(Stream(), batch_size=4), **options)) == rows(16)[:8]
    assert tokens(read(train=DataLoader(Stream(), batch_size=4), **options)) == rows(16)[:8]
    assert tokens(read(calibration=(batch for batch in loader()), **options)) == rows(16)[:8]


class OneShot(IterableDataset[dict[str, Tensor]]):
    """An iterator: what is read of it is gone."""

    def __init__(self) -> None:
        self.samples = iter(samples(16))

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return self

    def __next__(self) -> dict[str, Tensor]:
        return next(self.samples)


@pytest.mark.parametrize(
    "stream",
    [
        lambda: iter(list(loader())),
        lambda: DataLoader(OneShot(), batch_size=4),
        lambda: {"one": loader(), "other": DataLoader(OneShot(), batch_size=4)},
    ],
    ids=["iterator", "dataset", "one of several"],
)
def test_training_is_left_its_data(make_trainer: Any, stream: Callable[[], Any]) -> None:
    """Nothing is read of an iterator that is still to be trained on. Seen to fail: training began behind what
    calibration had read, with nothing left of it."""
    data = stream()
    with pytest.raises(CalibrationDataError, match=r"training would lack .* Give other data as calibration="):
        make_trainer(compression(max_samples=512)).fit(TinyModule(), data)
    left = data["other"] if isinstance(data, dict) else data
    assert len(list(left)) == 4


@pytest.mark.parametrize(
    ("options", "num_steps"), [({"calibration": loader(8)}, 4), ({"when": "only"}, 0)], ids=["other data", "only"]
)
def test_an_iterator_that_nothing_else_reads(make_trainer: Any, options: dict[str, Any], num_steps: int) -> None:
    module, callback = TinyModule(), compression(max_samples=512, **options)
    make_trainer(callback).fit(module, DataLoader(OneShot(), batch_size=4))
    assert callback.report is not None
    assert callback.report.num_batches == (2 if num_steps else 4)
    assert len(module.losses) == num_steps


def test_streams_of_known_length(read: Any) -> None:
    assert tokens(read(calibration=DataLoader(FiniteStream(), batch_size=4))) == rows(16)


@pytest.mark.parametrize("empty", [[], DataLoader([])], ids=["list", "loader"])
def test_empty_data_is_refused(read: Any, empty: Any) -> None:
    with pytest.raises(CalibrationDataError, match="empty"):
        read(calibration=empty)


def test_batches_with_different_keys_are_refused(read: Any) -> None:
    one, other = list(loader(8))
    with pytest.raises(CalibrationDataError, match=r"Batch 1 .*\['input_ids', 'labels'\].*\['input_ids'\]"):
        read(calibration=[one, {**other, "labels": other["input_ids"]}])
    image = {**one, "pixel_values": torch.randn(2, 3, 8, 8)}
    for batches in ([image, other], [image, {**other, "pixel_values": None}]):
        with pytest.raises(CalibrationDataError, match=r"1 have pixel_values \(batch 0\) and 1 have not \(batch 1\)"):
            collect(batches, keeps_masks=False)  # Llama reads none


def test_fields_that_forward_does_not_name_may_be_anything(read: Any, make_trainer: Any) -> None:
    """Texts and scores, as data sets carry them beside the tokens. Seen to fail: refused as unequal, and as NaN; and
    without a word that a model of one's own, which may read it, does not get a tensor."""
    beside = [{"text": [str(number)] * 2, "score": torch.tensor([torch.nan, 1.0])} for number in range(2)]
    data = [{"input_ids": torch.full((2, 8), number), **other} for number, other in enumerate(beside)]
    assert [list(batch) for batch in read(calibration=data).batches] == [["input_ids"]] * 2
    module = TinyModule()
    module.model = Handing(module.model.config)
    with pytest.warns(CalibrationWarning, match=r"Handing.forward has \*\*kwargs and names no score, which"):
        make_trainer(compression(calibration=data, when="only")).fit(module, loader())


class Handing(LlamaForCausalLM):
    def forward(self, input_ids: Tensor | None = None, labels: Tensor | None = None, **kwargs: Any) -> Any:
        return super().forward(input_ids=input_ids, labels=labels, **kwargs)


class HandingAll(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class Projecting(PreTrainedModel):
    config_class = LlamaConfig

    def forward(self, hidden: Tensor | None = None, **kwargs: Any) -> Any:
        return kwargs


@pytest.mark.parametrize(
    ("kind", "fields", "taken"),
    [
        (LlamaForCausalLM, ["input_ids", "special_tokens_mask", "length"], "input_ids"),
        (Handing, ["input_ids", "attention_mask", "position_ids", "length"], "input_ids attention_mask position_ids"),
        (HandingAll, ["input_ids", "attention_mask", "length"], "input_ids attention_mask"),
        (Projecting, ["hidden", "attention_mask", "input_ids", "length"], "hidden attention_mask input_ids"),
        (Projecting, ["x", "length"], "x length"),
    ],
)
def test_fields_that_forward_takes_as_kwargs(kind: type[PreTrainedModel], fields: list[str], taken: str) -> None:
    """What a `forward` behind it names, the main input and the mask; all, where none is named. Seen to fail: those of
    kwargs were left out, the mask among them."""
    config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8)
    assert list(fields_of(kind(config))(dict.fromkeys(fields, 0))) == taken.split()


def test_fields_of_images_are_no_text() -> None:
    """Seen to fail: the mask of the text, and what a decoder inside names, reached the encoder of images."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    images = {"image_size": 4, "patch_size": 2}
    batch = dict.fromkeys(("pixel_values", "input_ids", "attention_mask", "labels"), 0)
    assert list(fields_of(CLIPVisionModel(CLIPVisionConfig(**sizes, **images)))(batch)) == ["pixel_values"]
    both = ViTConfig(**sizes, **images), GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=1)
    model = VisionEncoderDecoderModel(VisionEncoderDecoderConfig.from_encoder_decoder_configs(*both))
    assert list(fields_of(model)(batch)) == ["pixel_values", "labels"]


@pytest.mark.parametrize(("limit", "given"), [(0, "=0 of 4 batches"), (0.1, "=0.1 of 4 batches")])
def test_a_limit_that_leaves_nothing_is_named(read: Any, limit: int | float, given: str) -> None:
    with pytest.raises(CalibrationDataError, match=f"limit_train_batches{given} leaves no calibration data"):
        read(calibration=loader(), limit_train_batches=limit)


def test_one_batch_in_place_of_several() -> None:
    """Seen to fail: its fields were taken for loaders."""
    one = next(iter(loader()))
    for given in (one, {"first": one}):
        with pytest.raises(
            CalibrationDataError, match=r"a dict of tensors: one batch, it seems\. Give a list of batches"
        ):
            compression(calibration=given)


@pytest.mark.parametrize(
    "kind", [datasets.Dataset.from_list, lambda of: datasets.Dataset.from_list(of).to_iterable_dataset()]
)
def test_a_data_set_in_place_of_batches(kind: Any) -> None:
    """Seen to fail: its rows were taken for batches."""
    with pytest.raises(CalibrationDataError, match=r"a dataset \(\w*Dataset\), whose items are samples: give batches"):
        compression(calibration=kind([{"input_ids": [1, 2]}]).with_format("torch"))
    compression(calibration=type("Batches", (list,), {"__module__": "datasets.mine"})())  # a project's own package
