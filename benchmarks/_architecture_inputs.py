"""Batches for any model, from what its `forward` names and what its configuration says.

Where a model takes images or sound, the shapes that transformers' processors make are tried until the model runs; how
many placeholder tokens they stand for is asked of the model's own `get_image_features` and `get_audio_features`.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from _architecture_configs import FIRST_SPECIAL
from _architecture_media import LENGTH, ROWS, Batch, Taken, found, images, parts, placeholder, sounds, special_ids
from torch import Tensor, nn
from transformers import PreTrainedModel

NUM_BATCHES = 2


@dataclass(frozen=True)
class Sample:
    """Batches on which the model runs, and what was fed."""

    batches: tuple[Batch, ...]
    fed: str


class Maker:
    """Makes batches for one model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.config = model, model.config
        self.names = set(inspect.signature(model.forward).parameters)
        self._special = {value for part in parts(self.config) for value in special_ids(part)}
        self._generator = torch.Generator().manual_seed(0)
        self.taken = Taken(self.names, self.config, self._generator)

    def tokens(self, rows: int = ROWS, length: int = LENGTH) -> Tensor:
        """Ids [B, L] that are no special tokens."""
        usual = torch.tensor([token for token in range(3, FIRST_SPECIAL) if token not in self._special])
        return usual[torch.randint(len(usual), (rows, length), generator=self._generator)]

    def text(self, media: Batch, counts: dict[str, int], padded: bool) -> Batch:
        """Everything but the media: ids with placeholders [B, L], masks, and what else `forward` asks for."""
        batch: Batch = {}
        if "input_ids" not in self.names or ("input_ids" in media):
            return batch | self._decoder()
        ids, start = self.tokens(length=LENGTH + sum(counts.values())), 1
        for key, count in counts.items():
            ids[:, start : start + count] = _given(placeholder(self.config, key))
            start += count
        batch["input_ids"] = ids
        if "attention_mask" in self.names:
            batch["attention_mask"] = torch.ones_like(ids)
            if padded:
                batch["attention_mask"][0, -2:] = 0
        is_image = torch.zeros_like(ids)
        if "image" in counts:
            is_image[ids == placeholder(self.config, "image")] = 1
        if counts and "mm_token_type_ids" in self.names:
            batch["mm_token_type_ids"] = is_image.int()
        if counts and "token_type_ids" in self.names:
            batch["token_type_ids"] = is_image
        if "bbox" in self.names:
            batch["bbox"] = torch.tensor([1, 2, 30, 40]).expand(*ids.shape, 4).clone()
        if "qformer_input_ids" in self.names:
            batch |= {"qformer_input_ids": self.tokens(), "qformer_attention_mask": torch.ones(ROWS, LENGTH).long()}
        return batch | self._decoder()

    def _decoder(self) -> Batch:
        takes = "decoder_input_ids" in self.names and getattr(self.config, "is_encoder_decoder", False)
        if not takes:
            return {}
        codebooks = getattr(getattr(self.config, "decoder_config", None), "num_channels", None)
        ids = self.tokens(length=LENGTH - 4)
        return {"decoder_input_ids": ids[..., None].repeat(1, 1, codebooks) if codebooks else ids}


def _given(number: int | None) -> int:
    assert number is not None
    return number


def count_features(output: object) -> int:
    """How many vectors `get_image_features` returned."""
    pooled = getattr(output, "pooler_output", output)
    pooled = getattr(output, "last_hidden_state", None) if pooled is None else pooled
    if pooled is None:
        return 0
    items = [pooled] if isinstance(pooled, Tensor) else list(cast(Iterable[object], pooled))
    tensors = [item for item in items if isinstance(item, Tensor)]
    return sum(tensor.numel() // tensor.shape[-1] for tensor in tensors)


def _counts(maker: Maker, key: str, media: Batch) -> dict[str, int]:
    """Placeholder tokens per row."""
    if placeholder(maker.config, key) is None or "input_ids" not in maker.names:
        return {}
    inner = getattr(maker.model, "model", None)
    getter = getattr(maker.model, f"get_{key}_features", getattr(inner, f"get_{key}_features", None))
    if getter is None:
        return {} if key == "image" else {key: media["input_features"].shape[-1] // 4}
    parameters = inspect.signature(getter).parameters
    renamed = {"pixel_values_images": "pixel_values"} if "pixel_values_images" not in parameters else {}
    given = {renamed.get(name, name): value for name, value in media.items()}
    extra = {
        "qformer_input_ids": maker.tokens(),
        "input_ids": maker.tokens(),
        "qformer_attention_mask": torch.ones(ROWS, LENGTH).long(),
    }
    given |= {name: value for name, value in extra.items() if name in parameters}
    named = {name: value for name, value in given.items() if name in parameters}
    try:
        features = getter(**named)
    except TypeError:  # a wrapper that hands on what it does not name
        features = getter(**given)
    number = count_features(features)
    return {key: number // ROWS if number else _asked(maker, key, media)}


def _asked(maker: Maker, key: str, media: Batch) -> int:
    """What the model says when it gets too few placeholders."""
    try:
        maker.model(**(maker.text(media, {key: 1}, padded=False) | media))
    except ValueError as error:
        if number := re.search(r"features\D*(\d+)", str(error)):
            return int(number[1]) // ROWS
    return 1


def _candidates(maker: Maker, kind: str) -> Iterator[tuple[str, Callable[[], Batch]]]:
    """Ways to feed the model, fullest first: a name, and a batch when called."""

    def whole(media: Batch, key: str) -> Callable[[], Batch]:
        counts = _counts(maker, key, media)

        def fill() -> Batch:
            fresh = {
                n: maker.taken.noise(*v.shape) if v.is_floating_point() and n != "flattened_patches" else v
                for n, v in media.items()
            }
            return maker.text(fresh, counts, padded=False) | fresh

        return fill

    if kind != "causal LM" or "input_ids" not in maker.names:
        for media in images(maker.taken):
            yield "image", lambda media=media: whole(media, "image")()  # type: ignore[misc]
        for media in sounds(maker.taken):
            yield "audio", lambda media=media: whole(media, "audio")()  # type: ignore[misc]
    if "input_ids" in maker.names:
        yield "text", lambda: maker.text({}, {}, padded=kind in ("causal LM", "encoder-decoder", "text encoder"))
        yield "text", lambda: maker.text({}, {}, padded=False)
        books = found(maker.config, "num_codebooks", within="decoder")
        if books:
            yield "codes", lambda: {"input_ids": maker.tokens(rows=ROWS * books)}
            yield "codes", lambda: {"input_ids": maker.tokens()[..., None].repeat(1, 1, books + 1)}
    if "inputs" in maker.names:
        yield "inputs", lambda: {"inputs": maker.tokens()}


def sample(model: PreTrainedModel, kind: str) -> Sample:
    """Batches on which `model` runs.

    Raises:
        Exception: what it raised on the first way to feed it, if none worked.
    """
    maker = Maker(model)
    first: Exception | None = None
    for fed, make in _candidates(maker, kind):
        try:
            with torch.no_grad():
                batches = tuple(make() for _ in range(NUM_BATCHES))
                for batch in batches:
                    _check_finite(model(**batch))
        except Exception as error:
            first = first or error
            continue
        return Sample(batches, fed)
    raise first or ValueError("forward takes neither tokens, images nor sound")


def with_positions(model: PreTrainedModel, fed: Sample) -> Sample | None:
    """The same batches with the positions that the model computes from the values of the ids, which no graph can;
    None where it does not compute any."""
    if "position_ids" not in inspect.signature(model.forward).parameters or "position_ids" in fed.batches[0]:
        return None
    batches = []
    for batch in fed.batches:
        seen: list[Tensor] = []

        def keep(_: nn.Module, __: Any, given: dict[str, Any], seen: list[Tensor] = seen) -> None:
            positions = given.get("position_ids")
            if isinstance(positions, Tensor) and positions.ndim in (2, 3):
                seen.append(positions)

        hooks = [part.register_forward_pre_hook(keep, with_kwargs=True) for part in model.modules()]
        with torch.no_grad():
            model(**batch)
        for hook in hooks:
            hook.remove()
        of_tokens = [each for each in seen if each.shape[-1] == batch.get("input_ids", each).shape[-1]]
        if not of_tokens:
            return None
        positions = of_tokens[0]
        rows = batch["input_ids"].shape[0]
        shape = (*positions.shape[:-2], rows, positions.shape[-1])
        batches.append({**batch, "position_ids": positions.expand(shape).clone()})
    return Sample(tuple(batches), f"{fed.fed}, position ids")


def _check_finite(output: object) -> None:
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor) and not torch.isfinite(logits).all():
        raise ValueError("the model's own output holds NaN or Inf")


def randomize(model: nn.Module) -> None:
    """Scale matrices up and give constants noise: with small initial scales a model is nearly the identity, and zeros
    switch parts of it off."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point() or parameter.numel() < 2 or not parameter.requires_grad:
                continue  # tables of positions are computed on loading
            if parameter.std() == 0:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
            elif parameter.ndim > 1:
                parameter.mul_(0.1 / parameter.std())
