"""Any configuration of transformers, shrunk by the names of its sizes.

Widths become one number wherever they stand, so that what has to be equal (a projector's output and the text model's
width) stays equal. Lists with an entry per layer are cut to the layers that show each combination of entries once.
Fields that a configuration computes itself are left to it.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from _architecture_overrides import OVERRIDES
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB, WIDTH, HEADS, HEAD_DIM, FFN, EXPERT_FFN = 128, 64, 4, 16, 96, 48
FIRST_SPECIAL = 64
"""Ids of special tokens at or above this get one of [FIRST_SPECIAL, VOCAB)."""

_LAYER_COUNTS = re.compile(
    r"(\w*_)?(num_hidden_layers|n_layers?|num_layers|num_\w+_layers|num_spatial_layers|layers|depth|num_blocks)"
)
_TOKEN_IDS = re.compile(r"\w*(_token_ids?|_token_index|_token|_id|_index|_indices)")
_NOT_IDS = re.compile(
    r"\w*(altup_active_idx|layer_id|lang_id|_layer_index|ignore_index)|out_indices|\w*layer\w*|\w*block\w*"
)

RULES: Sequence[tuple[str, int]] = (
    (r"chunk_size_feed_forward|num_labels|seed|sampling_rate|sample_rate", 10**9),
    (r"vocab_size_per_layer_input|\w*vocab_size\w*|num_embeddings|codebook_size|num_embeds|vocab_sizes?", VOCAB),
    (r"num_kv_shared_layers|num_(dense|global|adapter|mtp|transition|auxiliary|nextn_predict)_\w*", 1),
    (r"\w*num_cross_attention_heads|\w*num_self_attention_heads", HEADS),
    (r"num_key_value_heads|\w+_num_key_value_heads|num_kv_heads|kv_n_heads|multi_query_group_num", 2),
    (r"linear_num_key_heads", 2),
    (r"mamba_n_heads|mamba_num_heads|n_mamba_heads", 8),
    (r"\w*(num_attention|attention|num|n|_)_?heads?(_ipa)?", HEADS),
    (r"qk_rope_head_dim", 8),
    (r"\w*head_?dim|\w*d_head|kv_channels|d_kv|\w*dim_head|attention_head_size|rotary_dim", HEAD_DIM),
    (r"\w*_lora_rank|laurel_rank|\w+_rank|hc_lowrank", 32),
    (r"num_experts_per_tok|moe_topk|moe_top_?k|moe_k|num_selected_experts|top_k_experts|num_experts_per_token", 2),
    (r"n_group|topk_group", 1),
    (r"\w*(num|n)_shared_experts?", 1),
    (r"\w*experts|num_\w*_experts|moe_num_experts|zero_expert_num", 4),
    (r"(moe|expert|shared)\w*(intermediate|ffn_hidden|ffn_dim)\w*|share_expert_dim", EXPERT_FFN),
    (r"\w*intermediate_size\w*|\w*ffn_dim|d_ff|dff|dim_ff|\w*ffn_hidden(_size)?|mlp_dim|\w*feed_forward_size", FFN),
    (r"mamba_d_ssm", 2 * WIDTH),
    (r"patch_embed_hidden_size", 3 * 8 * 8),
    (r"mamba_d_state|state_size|ssm_state_size|d_rel", HEAD_DIM),
    (r"\w*mamba_chunk_size|chunk_size", 16),
    (r"max_source_positions", 32),
    (r"\w*position_embeddings|\w*max_\w*positions|n_positions|n_ctx", 256),
    (r"max_seq_len|max_\w*_?length|context_length|seq_len", 256),
    (r"\w*sliding_window\w*|attention_window\w*|local_attention|\w*attention_chunk_size|local_radius", 8),
    (r"index_topk|index_topk_blocks", 4),
    (r"index_block_size", 8),
    (r"\w*num_mel_bins|n_mel_bins|input_feat_per_channel|input_feat_size|\w*feature_size|mel_dim|input_dim", 32),
    (r"num_query_tokens|\w*num_latents|num_image_tokens|resampler_n_latents|latent_query_num", 4),
    (r"conv_dim|tdnn_dim|conv_channels|\w*conv_channels", 32),
    (r"(\w+_)?hidden_sizes?(_\w+)?|d_model|n_embd|\w*_dims?|dim|\w*embedding_size|d_inner", WIDTH),
    (r"\w+_embd|\w*hidden_dim|adapter_input_size|\w*emb_size|output_size|d_latents|input_size", WIDTH),
    (r"mm_tokens_per_image", 4),
    (r"base_channels", 32),
    (r"num_buckets|position_buckets|\w*_num_buckets", 32),
)  # fmt: skip
"""Pattern of a field's name -> the most it may be. The first that matches decides."""

_PERIODS = re.compile(r"\w*(_period|_interval|_frequency|sparse_step|_every_n_layers|_layer_step|_pattern)")


_UNSET = {
    "head_dim": HEAD_DIM, "vocab_size": VOCAB, "image_token_id": 100, "image_token_index": 100, "audio_token_id": 101,
    "audio_token_index": 101, "video_token_id": 102, "video_token_index": 102,
}  # fmt: skip
"""What some configurations leave open because every checkpoint says it."""


class Shrinker:
    """Shrinks one tree of configurations; special tokens get the same small id wherever they are named."""

    def __init__(self, overrides: Mapping[str, Any]) -> None:
        self._overrides = overrides
        self._ids: dict[int, int] = {}

    def shrink(self, config: PretrainedConfig, path: str = "") -> PretrainedConfig:
        """A small configuration of the same class."""
        config.__dict__["allow_global_per_layer_attribute_access"] = True
        values = _own_values(config)
        layers = _Layers(config, values)
        arguments: dict[str, Any] = {}
        for name, value in values.items():
            if isinstance(value, PretrainedConfig):
                arguments[name] = self.shrink(value, f"{path}{name}.")
            elif value is None and name in _UNSET:
                arguments[name] = _UNSET[name]
            elif (small := self._small(name, value, layers, config)) is not None and small != value:
                arguments[name] = small
            elif value is not None and (name not in _defaults(type(config)) or value != _defaults(type(config))[name]):
                arguments[name] = value
        arguments |= layers.lists
        if getattr(config, "image_grid_pinpoints", None):
            arguments["image_grid_pinpoints"] = [[32, 64], [64, 32], [64, 64]]
        arguments |= _small_rope(config, values)
        arguments |= _small_head(config, arguments)
        forced = dict(self._overrides.get(path.rstrip("."), {}))
        if section := forced.pop("mrope_section", None):
            forced["rope_parameters"] = {**(getattr(config, "rope_parameters", None) or {}), "mrope_section": section}
        arguments |= forced
        small = type(config)(**arguments)
        small.__dict__.pop("allow_global_per_layer_attribute_access", None)
        return small

    def _small(self, name: str, value: Any, layers: "_Layers", config: PretrainedConfig) -> Any:
        if isinstance(value, bool) or value is None:
            return value
        if isinstance(value, (list, tuple)):
            if name in layers.lists:
                return layers.lists[name]
            if value and all(isinstance(item, int) and not isinstance(item, bool) for item in value):
                return _small_list(name, list(value), layers, self._token)
            return value
        if not isinstance(value, int):
            return value
        if _TOKEN_IDS.fullmatch(name) and not _NOT_IDS.fullmatch(name):
            return self._token(value)
        if _LAYER_COUNTS.fullmatch(name):
            return layers.count(name, value)
        if _PERIODS.fullmatch(name):
            return min(value, 2)
        if name.endswith("_layer_offset"):
            return min(value, 1)
        if name == "first_k_dense_replace":
            return min(value, 1)
        return _by_rule(name, value, config)

    def _token(self, value: int) -> int:
        if value < FIRST_SPECIAL:
            return value
        return self._ids.setdefault(value, VOCAB - 1 - len(self._ids) % (VOCAB - FIRST_SPECIAL))


def _by_rule(name: str, value: int, config: PretrainedConfig) -> int:
    if name == "image_size":
        return min(value, _image_size(config))
    if name == "window_size" and value <= 16 and hasattr(config, "image_size"):
        return 2
    if name == "embed_dim" and isinstance(getattr(config, "depths", None), (list, tuple)):
        return min(value, 32)
    if name == "patch_size":
        return min(value, 8)
    for pattern, most in RULES:
        if re.fullmatch(pattern, name):
            if most == 2 and "key_value" in name and value == getattr(config, "num_attention_heads", None):
                most = HEADS
            return min(value, most)
    return value


def _image_size(config: PretrainedConfig) -> int:
    patch = getattr(config, "patch_size", None)
    return 32 if isinstance(patch, int) and patch >= 8 else 64


def _small_list(name: str, value: list[int], layers: "_Layers", token: Callable[[int], int]) -> list[int]:
    """Widths per stage double as they did; indices of layers point to layers that are left."""
    if _TOKEN_IDS.fullmatch(name) and not _NOT_IDS.fullmatch(name):
        return [token(item) for item in value]
    if name in ("depths", "depth", "num_block_repeats", "stage_num_blocks", "stage_numb_of_layers", "block_sizes"):
        return [min(item, 2) for item in value]
    if re.fullmatch(r"\w*(indexes|indices|_layers|_layer)", name):
        last = layers.small - 1 if layers.small else 1
        kept = [min(item, last) if item >= 0 else max(item, -last - 1) for item in value]
        return kept if "feature_layer" in name else sorted(set(kept), key=kept.index)
    if name in ("num_heads", "num_attention_heads"):
        return [min(2**index, 8) for index in range(len(value))]
    if name in ("hidden_sizes", "embed_dims", "embed_dim", "stage_out_channels", "neck_hidden_sizes"):
        return [min(item, 32 * 2 ** min(index, 3)) for index, item in enumerate(value)]
    if name == "image_size":
        return [min(item, 64) for item in value]
    if name == "downsample_channels":
        return [32, WIDTH]
    if name in ("conv_dim", "tdnn_dim"):
        return [min(item, 32) for item in value]
    return value


class _Layers:
    """Which layers stay. `lists`: the fields with an entry per layer, cut."""

    def __init__(self, config: PretrainedConfig, values: Mapping[str, Any]) -> None:
        self.lists: dict[str, Any] = {}
        number = getattr(config, "num_hidden_layers", None)
        field = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
        self.total = number if isinstance(number, int) and field in _defaults(type(config)) else 0
        self.small = min(2, self.total)
        per_layer = {
            name: list(value)
            for name, value in config.__dict__.items()
            if isinstance(value, (list, tuple)) and len(value) == self.total > 1 and name in _defaults(type(config))
        }
        indices = {name: value for name, value in per_layer.items() if _are_indices(value)}
        spec = config.__dict__.get("_heterogeneity_spec")
        special: dict[int, dict[str, Any]] = dict(spec.per_layer_overrides) if spec is not None else {}
        entries = {name: value for name, value in per_layer.items() if name not in indices}
        if not per_layer and not special:
            return
        signatures = [
            repr([value[index] for value in entries.values()] + [special.get(index)]) for index in range(self.total)
        ]
        kept = _one_of_each(signatures)
        kept = kept if len(kept) > 1 else [0, 1]
        if values.get("num_kv_shared_layers"):
            kept = kept + kept
        self.small = len(kept)
        self.lists = {name: [_capped(name, value[i], config) for i in kept] for name, value in entries.items()}
        self.lists |= {name: [new for new, old in enumerate(kept) if old in value] for name, value in indices.items()}
        if special:
            self.lists["per_layer_config"] = {
                new: _heads_alike(
                    {key: _capped(key, value, config) for key, value in special[old].items()}, special[old]
                )
                for new, old in enumerate(kept)
                if old in special
            }

    def count(self, name: str, value: int) -> int:
        """The small number for a count of layers."""
        return self.small if self.lists and value == self.total else min(value, 2)


def _heads_alike(small: dict[str, Any], whole: Mapping[str, Any]) -> dict[str, Any]:
    """As many heads for keys as for queries, where that is so."""
    alike = whole.get("num_key_value_heads") == whole.get("num_attention_heads")
    if alike and "num_key_value_heads" in small:
        small["num_key_value_heads"] = small["num_attention_heads"]
    if {"head_dim", "qk_nope_head_dim", "qk_rope_head_dim"} <= set(small):
        small["head_dim"] = small["qk_nope_head_dim"] + small["qk_rope_head_dim"]
    return small


def _are_indices(values: Sequence[Any]) -> bool:
    """Numbers of layers, not an entry for each."""
    numbers = all(isinstance(value, int) and not isinstance(value, bool) and value < len(values) for value in values)
    return numbers and all(left < right for left, right in pairwise(values))


def _capped(name: str, value: Any, config: PretrainedConfig) -> Any:
    return _by_rule(name, value, config) if isinstance(value, int) and not isinstance(value, bool) else value


def _one_of_each(entries: Sequence[str]) -> list[int]:
    first: dict[str, int] = {}
    for index, entry in enumerate(entries):
        first.setdefault(entry, index)
    return sorted(first.values())


def _small_head(config: PretrainedConfig, arguments: Mapping[str, Any]) -> dict[str, int]:
    """Heads of latent attention are as wide as the parts with and without positions, or as the former."""
    rope, nope, head = (getattr(config, key, None) for key in ("qk_rope_head_dim", "qk_nope_head_dim", "head_dim"))
    if not rope or not nope or "head_dim" not in arguments:
        return {}
    small_rope, small_nope = arguments.get("qk_rope_head_dim", rope), arguments.get("qk_nope_head_dim", nope)
    if head == rope:
        return {"head_dim": small_rope}
    return {"head_dim": small_rope + small_nope} if head == rope + nope else {}


def _small_rope(config: PretrainedConfig, values: Mapping[str, Any]) -> dict[str, Any]:
    """Sections of multi-axis rotary positions, cut to the small heads in their old proportions."""
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict) or not (section := rope.get("mrope_section")):
        return {}
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    total = max(1, sum(section) * min(width, HEAD_DIM) // width)
    small = [max(1, item * total // sum(section)) for item in section]
    small[-1] += total - sum(small)
    return {"rope_parameters": {**rope, "mrope_section": small}}


def _defaults(cls: type[PretrainedConfig]) -> dict[str, Any]:
    """Field -> its default; None where there is none."""
    found = {}
    for field in dataclasses.fields(cls):
        if field.default is not dataclasses.MISSING:
            found[field.name] = field.default
        else:
            factory = field.default_factory
            found[field.name] = None if factory is dataclasses.MISSING else factory()
    return found


def _same(left: Any, right: Any) -> bool:
    both = [list(side) if isinstance(side, tuple) else side for side in (left, right)]
    return bool(both[0] == both[1])


_OF_THE_BASE = {field.name for field in dataclasses.fields(PretrainedConfig)}


def _own_values(config: PretrainedConfig) -> dict[str, Any]:
    """Fields by value, without those that the class computes from others."""
    cls = type(config)
    try:
        usual = cls().__dict__
    except Exception:  # such a class has to be told its parts, and computes nothing without them
        usual = {}
    defaults = _defaults(cls)
    found: dict[str, Any] = {}
    for name, default in defaults.items():
        value = getattr(config, name, None)
        if isinstance(value, PretrainedConfig):
            found[name] = value
        elif name not in _OF_THE_BASE:
            computed = value is not None and name in usual and _same(usual[name], value) and not _same(value, default)
            found |= {} if computed else {name: value}
    return found


def tiny_config(kind: str, model_type: str, model_class: type[PreTrainedModel]) -> PretrainedConfig:
    """The default configuration of a model type, shrunk; of its part for `model_class`, as auto-classes choose it."""
    overrides = {**OVERRIDES.get(model_type, {}), **OVERRIDES.get(f"{kind}/{model_type}", {})}
    whole = overrides.get("whole")
    small = Shrinker(overrides).shrink(
        whole()
        if whole is not None
        else _with_towers(model_type, overrides.get("towers", ("vision_config", "audio_config")))
    )
    wanted = model_class.config_class or PretrainedConfig
    if isinstance(small, wanted):
        return small
    return next((part for part in _parts(small) if isinstance(part, wanted)), small)


def _with_towers(model_type: str, towers: tuple[str, ...]) -> PretrainedConfig:
    """The default configuration, with the parts for images and sound that some leave out."""
    config_class = CONFIG_MAPPING[model_type]
    left_out = {
        key: spec.default_config
        for key, spec in config_class.sub_configs_defaults.items()
        if spec.optional and key in towers and spec.model_type
    }
    config: PretrainedConfig = config_class(**left_out)
    return config


def _parts(config: PretrainedConfig) -> list[PretrainedConfig]:
    found = [value for value in config.__dict__.values() if isinstance(value, PretrainedConfig)]
    return found + [part for value in found for part in _parts(value)]
