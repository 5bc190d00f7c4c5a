"""The calibration set: what is taken as it is, what is left out, and what is refused with a message."""

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import compress_in_memory, ragged_batches, recipe, tiny_llama, token_batches
from torch import Tensor
from transformers import BatchEncoding

from lightning_compress.calibration.batches import collect, num_elements
from lightning_compress.errors import CalibrationDataError, UntraceableModelError

IDS = torch.ones(2, 5, dtype=torch.long)


@dataclass(frozen=True)
class Pair:
    """A batch with one number of each sample."""

    label: Tensor
    x: Any


NESTED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "BatchEncoding": lambda label, x: BatchEncoding({"label": label, "x": x}),
    "in a dict": lambda label, x: {"query": BatchEncoding({"label": label}), "doc": UserDict({"x": x})},
    "dataclass": Pair,
    "in a dataclass": lambda label, x: Pair(label, BatchEncoding({"x": x})),
    "in a tuple": lambda label, x: (Pair(label, x), 3),
}
nested = pytest.mark.parametrize("made", NESTED.values(), ids=NESTED)


def test_batches_are_kept_in_order_up_to_the_limit() -> None:
    batches = token_batches(4)
    assert [
        batch["input_ids"] is given["input_ids"] for batch, given in zip(collect(batches).batches, batches, strict=True)
    ] == [True] * 4
    assert len(collect(iter(batches), limit=3).batches) == 3


def test_the_limit_is_not_overdrawn() -> None:
    source = iter(token_batches(4))
    collect(source, limit=2)
    assert len(list(source)) == 2


def test_other_mappings_and_trees() -> None:
    """They keep their types, which the user's own step may rely on (`batch.input_ids`); those that nothing can be put
    into become dicts."""
    (batch,) = collect([UserDict(input_ids=IDS)]).batches
    assert type(batch) is UserDict
    (batch,) = collect([MappingProxyType({"input_ids": IDS})]).batches
    assert type(batch) is dict
    assert collect([(IDS, [IDS])]).batches == ((IDS, [IDS]),)


@nested
def test_batches_of_batches(made: Callable[[Tensor, Tensor], Any]) -> None:
    """Seen to fail, each, when such batches were leaves: nothing to share out, NaN let through, and a first tensor of
    one element compared with the first batch's as a constant."""
    batches = [made(torch.tensor([number]), torch.randn(1, 5)) for number in range(3)]
    collected = collect(batches).batches
    assert [type(batch) for batch in collected] == [type(batch) for batch in batches]
    assert [num_elements(batch) for batch in collected] == [6, 6, 6]
    with pytest.raises(CalibrationDataError, match=r"x' of calibration batch 1 holds NaN or Inf"):
        collect([batches[0], made(torch.tensor([0]), torch.tensor([[1, float("nan")]]))])
    with pytest.raises(CalibrationDataError, match=r"x' of batch 1 has dtype torch.int64"):
        collect([batches[0], made(torch.tensor([0]), IDS)])


def test_fields_inside_in_another_order_or_with_others() -> None:
    """Tensors are known by their places. Seen to fail: mask and ids would have changed theirs."""
    fields = {"input_ids": IDS, "attention_mask": torch.zeros_like(IDS)}
    turned = dict(reversed(fields.items()))
    for other in (turned, {"input_ids": IDS}, {**fields, "labels": IDS}):
        with pytest.raises(CalibrationDataError, match=r"Batch 1 .* another structure than batch 0: .* same order"):
            collect([{"pair": BatchEncoding(fields)}, {"pair": BatchEncoding(other)}])


def test_masks_of_batches_that_are_no_mappings_stay() -> None:
    """Seen to fail: there was no field to leave out, and an AttributeError."""
    pair = ({"attention_mask": torch.ones_like(IDS)}, IDS)
    assert set(collect([pair]).batches[0][0]) == {"attention_mask"}


def test_numbers_in_lists_are_no_tensors() -> None:
    """As a Hugging Face dataset gives them. Seen to fail: with what else tensors are found in for advice."""
    with pytest.raises(CalibrationDataError, match=r"batch 0 .*with_format\('torch'\), batch_size=8\)"):
        collect([{"input_ids": [1, 2, 3]}])


@pytest.mark.parametrize("made", [lambda x: SimpleNamespace(x=x), lambda x: x.numpy()], ids=["object", "array"])
def test_objects_that_tensors_are_not_found_in(made: Callable[[Tensor], Any]) -> None:
    """Seen to fail: what one batch holds was taken for all of them."""
    batches = [torch.randn(2, 5) for _ in range(2)]
    with pytest.raises(CalibrationDataError, match=r"No tensor is found in batch 0 .* tuples and dataclasses"):
        collect([made(x) for x in batches])
    with pytest.raises(CalibrationDataError, match=r"(?s)'other' of batch 1 is no tensor .* dataclasses"):
        collect([{"x": x, "other": made(x)} for x in batches])
    one = made(batches[0])
    assert all(batch["other"] is one for batch in collect([{"x": x, "other": one} for x in batches]).batches)


def test_masks_that_mask_nothing_are_left_out() -> None:
    ones, zeros = torch.ones_like(IDS), torch.zeros_like(IDS)
    data = collect([{"input_ids": IDS, "attention_mask": ones}] * 2)
    assert (data.batches[0].keys(), data.has_padding) == ({"input_ids"}, False)
    data = collect([{"input_ids": IDS, "attention_mask": ones}, {"input_ids": IDS, "attention_mask": zeros}])
    assert ([set(batch) for batch in data.batches], data.has_padding) == ([{"input_ids", "attention_mask"}] * 2, True)
    some = torch.cat([ones[:1], zeros[1:]])
    data = collect([{"input_ids": IDS, "attention_mask": some, "decoder_attention_mask": ones}])
    assert (set(data.batches[0]), data.has_padding) == ({"input_ids", "attention_mask"}, True)
    square = torch.ones(2, 1, 5, 5)
    assert set(collect([{"input_ids": IDS, "attention_mask": square}]).batches[0]) == {"input_ids", "attention_mask"}
    data = collect(
        [{"pair": {"input_ids": IDS, "attention_mask": ones}}, {"pair": {"input_ids": IDS, "attention_mask": some}}]
    )
    assert data.has_padding
    assert "attention_mask" in data.batches[0]["pair"]
    sounds = {"input_ids": IDS, "feature_attention_mask": ones}  # models insist on it
    assert set(collect([sounds]).batches[0]) == set(sounds)
    pixels = {"input_ids": IDS, "pixel_attention_mask": ones}  # not of tokens: models may insist on it
    assert (set(collect([pixels]).batches[0]), collect([pixels]).has_padding) == (set(pixels), False)


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "calibration dataloader is empty.*at least one batch"),
        ([{"a": IDS, "b": IDS}, {"a": IDS}], r"Batch 1 .* keys \['a'\], but batch 0 has \['a', 'b'\].*collate"),
        ([(IDS, IDS), (IDS,)], "Batch 1 .* another structure"),
        (
            [{"a": IDS}, {"a": IDS.float()}],
            r"batch 1 has dtype torch.float32 and shape \[2, 5\], but in batch 0 torch.int64",
        ),
        ([{"a": IDS}, {"a": IDS[0]}], r"shape \[5\], but in batch 0"),
        (
            [{"a": IDS, "n": 3}, {"a": IDS, "n": 4}],
            r"'n' of batch 1 is no tensor and differs from batch 0 \(4 and 3",
        ),
        ([{"a": IDS}, {"a": 3}], "is a tensor where batch 0 has none, or the other way round"),
        ([{"a": torch.tensor([[1.0, float("nan")]])}], r"field 'a' of calibration batch 0 holds NaN or Inf"),
        ([{"a": IDS}, {"a": IDS[:0]}], r"field 'a' of calibration batch 1 is empty \(shape \[0, 5\]\)"),
        ([{"a": IDS[:, :0]}], r"field 'a' of calibration batch 0 is empty \(shape \[2, 0\]\)"),
    ],
)
def test_mistakes(batches: list[Any], message: str) -> None:
    with pytest.raises(CalibrationDataError, match=message):
        collect(batches)


def test_fields_without_columns() -> None:
    """As pytorch-forecasting gives them for kinds of features that a data set has not. Seen to fail: refused."""
    batch = {"real": torch.zeros(2, 5, 1), "categorical": torch.zeros(2, 5, 0)}
    assert collect([batch]).batches[0]["categorical"].shape == (2, 5, 0)


@pytest.mark.parametrize("absent", [{}, {"pixel_values": None}], ids=["no key", "nothing there"])
def test_batches_with_and_without_images(absent: dict[str, Any]) -> None:
    """All are named, at once, and what to do. Seen to fail: the first alone, as a batch of other keys."""
    image, text = {"input_ids": IDS, "pixel_values": torch.ones(1, 3, 2, 2)}, {"input_ids": IDS, **absent}
    message = (
        r"Of 13 calibration batches 3 have pixel_values \(batches 1, 2, 5\) and 10 have not \(batches 0, 3, 4, 6, 7, "
        r"8, 9, 10 and 2 more\).* Leave the batches without out; or .*larger batch_size.*; or leave the images out of"
    )
    with pytest.raises(CalibrationDataError, match=message):
        collect([image if number in (1, 2, 5) else text for number in range(13)])
    assert len(collect([image] * 2).batches) == len(collect([text] * 2).batches) == 2


def test_batches_of_several_kinds() -> None:
    """None is without: that is another mistake."""
    with pytest.raises(CalibrationDataError, match=r"Batch 1 .* has the keys \['image'\], but batch 0 has \['audio'\]"):
        collect([{"audio": IDS}, {"image": IDS}])


def test_no_data_at_all() -> None:
    with pytest.raises(CalibrationDataError, match="This recipe needs calibration data"):
        compress_in_memory(tiny_llama(1), None, recipe(4))


def test_rows_without_a_single_token() -> None:
    """A row of nothing but padding adds nothing and breaks nothing."""
    batches = ragged_batches()
    batches[1]["attention_mask"][1] = 0
    report = compress_in_memory(tiny_llama(1), batches, recipe(4))
    assert {record.num_tokens for record in report.modules} == {9 + 4 + 16 + 7 + 7}


def test_single_rows_and_single_tokens() -> None:
    lengths = [(1, 16), (4, 1), (1, 1), (3, 9)]
    batches = [{"input_ids": torch.randint(1, 60, shape)} for shape in lengths]
    report = compress_in_memory(tiny_llama(1), batches, recipe(4))
    assert {record.num_tokens for record in report.modules} == {16 + 4 + 1 + 27}


def test_model_that_cannot_be_traced() -> None:
    """Not even as single layers: what reads values, which are not the batch's alone, is the model itself."""

    class Reading(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) if x.sum() > self.linear.weight.sum() else self.linear(-x)

    with pytest.raises(UntraceableModelError, match=r"Reading|sequential_targets|calibration_step"):
        compress_in_memory(Reading(), [torch.randn(2, 3, 4)], recipe(4, strategy="channel"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.eye(3).to_sparse(), r"'x' of calibration batch 0 is sparse .*`\.to_dense\(\)`"),
        (lambda: torch.eye(3).to_sparse_csr(), r"is sparse \(torch\.sparse_csr\)"),
        (
            lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged),
            r"'x' of calibration batch 0 is nested .*padded, with a mask",
        ),
    ],
    ids=["coo", "csr", "jagged"],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_tensors_that_are_not_dense(make: Callable[[], Tensor], message: str) -> None:
    """Seen to fail: errors of torch's own."""
    with pytest.raises(CalibrationDataError, match=message):
        collect([{"x": make()}])
