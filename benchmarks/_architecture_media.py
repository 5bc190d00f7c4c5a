"""Images and sounds as transformers' processors would hand them to a model, from what its `forward` names."""

from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

ROWS, LENGTH = 2, 16
Batch = dict[str, Any]


def parts(config: PretrainedConfig) -> list[PretrainedConfig]:
    """A configuration and all inside it."""
    inside = [value for value in config.__dict__.values() if isinstance(value, PretrainedConfig)]
    return [config] + [part for value in inside for part in parts(value)]


def special_ids(config: PretrainedConfig) -> Iterator[int]:
    for name, value in config.__dict__.items():
        if name.endswith(("_token_id", "_token_index", "_token", "_id", "_index")) and isinstance(value, int):
            yield value


def placeholder(config: PretrainedConfig, key: str) -> int | None:
    """The id of the tokens that an image (or sound) replaces."""
    for part in parts(config):
        for name in (f"{key}_token_id", f"{key}_token_index", f"{key}_patch_id", f"{key}_pad_token_id"):
            value = part.__dict__.get(name)
            if isinstance(value, int) and value >= 0:
                return value
    return None


def found(config: PretrainedConfig, *names: str, within: str = "vision", default: int = 0) -> int:
    """The first of some sizes that a configuration has, its part for `within` first."""
    ordered = sorted(parts(config), key=lambda part: within not in type(part).__name__.lower())
    for part in ordered:
        for name in names:
            value = part.__dict__.get(name)
            if isinstance(value, (list, tuple)) and value and isinstance(value[0], int):
                value = value[0]
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return default


@dataclass(frozen=True)
class Taken:
    """What a model takes.

    Attributes:
        names: parameters of its `forward`.
        config: its configuration.
        generator: what noise comes from.
    """

    names: Set[str]
    config: PretrainedConfig
    generator: torch.Generator

    @property
    def size(self) -> int:
        """Of an image, in pixels."""
        return found(self.config, "image_size", "img_size", "input_size", "crop_size", default=32)

    @property
    def patch(self) -> int:
        """Of a patch, in pixels."""
        return found(self.config, "patch_size", "spatial_patch_size", default=8)

    @property
    def square(self) -> tuple[int, int, int]:
        """Shape of an image."""
        return found(self.config, "num_channels", "in_channels", "in_chans", default=3), self.size, self.size

    @property
    def patch_width(self) -> int:
        """Numbers in a patch."""
        return self.square[0] * self.patch**2

    def noise(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)


def images(taken: Taken) -> Iterator[Batch]:
    """What image processors return, most specific first."""
    yield from _marked(taken)
    if "image_grid_thw" in taken.names or "image_grid_hw" in taken.names:
        yield from _grids(taken)
    yield from _patches(taken)
    yield from _tiles(taken)
    key = "pixel_values_images" if "pixel_values_images" in taken.names else "pixel_values"
    if key in taken.names:
        yield {key: taken.noise(ROWS, *taken.square)}
        yield {key: taken.noise(ROWS, 1, *taken.square)}
        yield {key: taken.noise(ROWS, 4, *taken.square)}
        yield {key: taken.noise(ROWS, 16, taken.patch_width)}
        yield {key: taken.noise(ROWS, 2, taken.patch, taken.patch, taken.square[0])}


def _marked(taken: Taken) -> Iterator[Batch]:
    """Images whose place among the tokens is told by a mask, and other inputs that few models have."""
    names, square = taken.names, taken.square
    places = torch.arange(LENGTH).expand(ROWS, -1)
    at_start = ((places > 0) & (places < 5)).long()
    if "flattened_patches" in names:
        patches = {"flattened_patches": _flattened(taken)}
        if "image_embeds_position_mask" in names:
            sides = torch.full((ROWS, 1), 4)
            yield {**patches, "image_embeds_position_mask": at_start, "width": sides, "height": sides}
        yield patches
    elif "image_embeds_position_mask" in names:
        yield {"pixel_values": taken.noise(ROWS, *square), "image_embeds_position_mask": at_start}
    if "image_attention_mask" in names:
        seen = torch.ones(ROWS, LENGTH, 1).long()
        yield {"pixel_values": taken.noise(ROWS, 1, *square), "image_attention_mask": seen}
    if "state" in names:
        config = taken.config
        yield {
            "state": taken.noise(ROWS, found(config, "max_state_dim")), "timestep": torch.rand(ROWS),
            "noise": taken.noise(ROWS, found(config, "chunk_size"), found(config, "max_action_dim")),
            "pixel_values": taken.noise(ROWS, 1, *square), "pixel_attention_mask": torch.ones(ROWS, 1).bool(),
        }  # fmt: skip
    if "pixel_values_videos" in names and "pixel_values" not in names:
        yield {"pixel_values_videos": taken.noise(ROWS, found(taken.config, "num_frames", default=4), *square)}


def _patches(taken: Taken) -> Iterator[Batch]:
    """Images of 4 x 4 patches, cut already."""
    names, four = taken.names, torch.tensor([[4, 4]] * ROWS)
    if "image_patches" in names:
        yield {"image_patches": taken.noise(ROWS, 4, taken.patch_width)}
    if "spatial_shapes" in names:
        media = {"pixel_values": taken.noise(ROWS, 16, taken.patch_width), "spatial_shapes": four}
        yield {**media, "pixel_attention_mask": torch.ones(ROWS, 16).long()}
    if "target_sizes" in names:
        strip = taken.noise(1, taken.square[0], taken.patch, ROWS * 16 * taken.patch)
        yield {"pixel_values": strip, "target_sizes": four}
    if "image_position_ids" in names:
        pool = found(taken.config, "pooling_kernel_size", default=1)
        side = torch.arange(2 * pool)
        where = torch.cartesian_prod(side, side).expand(ROWS, -1, -1).clone()
        for width in (taken.patch_width, taken.patch_width * pool**2):
            yield {"pixel_values": taken.noise(ROWS, len(side) ** 2, width), "image_position_ids": where}


def _tiles(taken: Taken) -> Iterator[Batch]:
    """Images in several pieces, or in two sizes."""
    names, square = taken.names, taken.square
    if "aspect_ratio_ids" in names:
        ones = torch.ones(ROWS, 1, found(taken.config, "max_num_tiles", default=1)).long()
        media = {"pixel_values": taken.noise(*ones.shape, *square), "aspect_ratio_ids": ones[..., 0]}
        yield {**media, "aspect_ratio_mask": ones, "cross_attention_mask": ones[:, None].repeat(1, LENGTH, 1, 1)}
    if "image_sizes" in names:
        sizes = torch.tensor([[taken.size, taken.size]] * ROWS)
        for tiles in (3, 2, 5):
            yield {"pixel_values": taken.noise(ROWS, tiles, *square), "image_sizes": sizes}
        yield {"pixel_values": taken.noise(ROWS, *square), "image_sizes": sizes}
    if "high_res_pixel_values" in names:
        big = found(taken.config, "image_size", within="sam", default=taken.size)
        large = taken.noise(ROWS, square[0], big, big)
        yield {"pixel_values": taken.noise(ROWS, *square), "high_res_pixel_values": large}
    if "pixel_attention_mask" in names or "num_local_patches" in names:
        yield {"pixel_values": taken.noise(ROWS, 1, *square)}
        yield {"pixel_values": taken.noise(ROWS, 1, *square), "pixel_attention_mask": torch.ones(ROWS, 1).bool()}


def _flattened(taken: Taken) -> Tensor:
    """Patches [B, 16, 2 + C], each behind its row and column."""
    where = torch.cartesian_prod(torch.arange(1.0, 5.0), torch.arange(1.0, 5.0)).expand(ROWS, -1, -1)
    return torch.cat([where, taken.noise(ROWS, 16, taken.patch_width)], dim=-1)


def _grids(taken: Taken) -> Iterator[Batch]:
    """Packed patches of images of 4 x 4."""
    frames = found(taken.config, "temporal_patch_size", "temporal_patch_dim", default=1)
    key, grid = "image_grid_thw", torch.tensor([[1, 4, 4]] * ROWS)
    if "image_grid_hw" in taken.names:
        key, grid = "image_grid_hw", grid[:, 1:]
    extra = {"image_merge_sizes": torch.tensor([2] * ROWS)} if "image_merge_sizes" in taken.names else {}
    for width in dict.fromkeys(taken.patch_width * number for number in (frames, 1, 2)):
        yield {"pixel_values": taken.noise(ROWS * 16, width), key: grid, **extra}
    yield {"pixel_values": taken.noise(1, ROWS * 16, taken.square[0], taken.patch, taken.patch), key: grid, **extra}
    yield {"pixel_values": taken.noise(ROWS * 16, taken.square[0], taken.patch, taken.patch), key: grid, **extra}


def sounds(taken: Taken) -> Iterator[Batch]:
    """What feature extractors return."""
    names, config = taken.names, taken.config
    mels = found(config, "num_mel_bins", "n_mels", "feature_size", "input_feat_size", "input_feat_per_channel",
                 "feature_projection_input_dim", "input_dim", within="audio", default=32)  # fmt: skip
    frames = 2 * found(config, "max_source_positions", within="audio", default=32)
    shapes = [shape for number in (frames, 100, 128) for shape in ((mels, number), (number, mels), (number, 4 * mels))]
    shapes += [(frames, 7 * mels), (frames, found(config, "input_size", within="audio", default=mels))]
    for key in ("input_features", "audio_input_features"):
        if key not in names:
            continue
        masks = [name for name in ("input_features_mask", "feature_attention_mask", "padding_mask") if name in names]
        for shape in shapes:
            mask = torch.ones(ROWS, max(shape) if mels in shape else shape[0]).long()
            media: Batch = {key: taken.noise(ROWS, *shape)}
            yield {**media, **dict.fromkeys(masks, mask)}
            if masks:
                yield {**media, **dict.fromkeys(masks, mask.bool())}
                yield media
    if "input_values" in names:
        if "padding_mask" in names:
            yield {"input_values": taken.noise(ROWS, 1, 9600), "padding_mask": torch.ones(ROWS, 9600).bool()}
        yield {"input_values": taken.noise(ROWS, 9600)}
        most = found(config, "max_length", default=64)
        waves: tuple[tuple[int, ...], ...] = ((4000,), (16000,), (1, 24000), (frames, mels), (most, mels))
        for wave in waves:
            yield {"input_values": taken.noise(ROWS, *wave)}
