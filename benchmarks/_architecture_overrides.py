"""What the general rules of `_architecture_configs` cannot know, each with the reason."""

from collections.abc import Mapping
from typing import Any

from transformers import (
    BertConfig,
    EncoderDecoderConfig,
    Gemma4AssistantConfig,
    SpeechEncoderDecoderConfig,
    VisionEncoderDecoderConfig,
    ViTConfig,
    Wav2Vec2Config,
)


def _decoder() -> BertConfig:
    return BertConfig(is_decoder=True, add_cross_attention=True)


_COMPASS = {
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
        "full_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
    },
}
_MROPE = ("glm46v", "glm4v", "glm_ocr", "glmga", "hunyuan_vl", "paddleocr_vl", "qwen2_5_vl", "qwen2_vl")
_ASSISTANT = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_hidden_layers": 6}
_XLSTM = {
    "embedding_dim": 128, "hidden_size": 128, "num_heads": 4, "num_blocks": 2, "num_hidden_layers": 2,
    "qk_dim_factor": 0.5, "v_dim_factor": 1.0,
    "chunkwise_kernel": "chunkwise--native_autograd", "sequence_kernel": "native_sequence__native",
    "step_kernel": "native", "chunk_size": 16,
}  # fmt: skip
_REFORMER = {
    "axial_pos_embds_dim": [16, 48], "axial_pos_shape": [8, 8], "attn_layers": ["local", "lsh"], "num_hidden_layers": 2,
    "num_buckets": 4,
}  # fmt: skip
_QWEN4 = {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
    "indexer_compress_ratio": 2,
    "ple_embed_dim": 64, "heads_per_ngram": 2, "ngram_vocab_size_base": 64, "split_ngram_parts": 1,
    "make_ngram_vocab_size_divisible_by": 8,
}  # fmt: skip

OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    # made of any two models, so there is no default
    "encoder-decoder": {
        "whole": lambda: EncoderDecoderConfig(encoder=BertConfig().to_dict(), decoder=_decoder().to_dict())
    },
    "vision-encoder-decoder": {
        "whole": lambda: VisionEncoderDecoderConfig(encoder=ViTConfig().to_dict(), decoder=_decoder().to_dict())
    },
    "speech-encoder-decoder": {
        "whole": lambda: SpeechEncoderDecoderConfig(encoder=Wav2Vec2Config().to_dict(), decoder=_decoder().to_dict())
    },
    # checkpoints say what the class leaves open
    "chameleon": {
        "": {"vocabulary_map": {"<image>": 100, **{f"IMGIMG{letter}Z": 64 + n for n, letter in enumerate("ABCDEFGH")}}},
        "vq_config": {"num_embeddings": 8, "base_channels": 32},
    },
    "emu3": {
        "": {
            "vocabulary_map": {
                "<image>": 100,
                "<|extra_200|>": 101,
                **{f"<|visual token {number:06d}|>": 64 + number for number in range(32)},
            }
        },
        "vq_config": {"base_channels": 32, "channel_multiplier": [1, 1, 2, 2], "codebook_size": 32},
    },
    "cohere_compass_text": {"": _COMPASS},
    "cohere_compass": {"text_config": _COMPASS},
    "deepseek_ocr2": {
        "text_config": {
            "mlp_layer_types": ["dense", "sparse"],
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
        },
        "vision_config.sam_config": {"downsample_channels": [32, 64]},
    },
    "dots1": {
        "": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
    },
    "granite4_vision": {
        "": {"deepstack_layer_map": [[-2, 0], [-1, 1]], "spatial_target_layers": [0, 1], "downsample_rate": "1/2"}
    },
    "lfm2_moe": {"": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}},
    "nemotron": {"": {"num_key_value_heads": 2}},
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": {"": _QWEN4},
    # the number of heads and the inner width go together
    "mamba2": {"": {"num_heads": 8}},
    "bit": {"": {"num_groups": 4}},
    "reformer": {"": _REFORMER},
    "kyutai_speech_to_text": {"codec_config": {"upsample_groups": 64}},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 16}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "ernie4_5_vl_moe": {
        "text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]}}
    },
    "glm5_next": {"text_config": {"index_kpool": 2}},
    "deepseek_v2": {"": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "topk_method": "greedy"}},
    "esm": {"": {"vocab_size": 128, "mask_token_id": 100, "pad_token_id": 1}},
    "moonshine_streaming": {"": {"num_key_value_heads": 4}},
    "xmod": {"": {"default_language": "en_XX"}},
    "dots3_note": {"text_config": {"head_dim": 24}},
    "dots3_note_text": {"": {"head_dim": 24}},
    "muse_glimmer": {"vision_config": {"out_hidden_size": 256}, "": {"out_hidden_size": 256}},
    "diffusion_gemma": {"text_config": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48}},
    **{name: {"text_config": {"mrope_section": [2, 3, 3]}} for name in _MROPE},
    "glm4v_moe": {"text_config": {"mrope_section": [2, 1, 1]}},
    "gemma4_assistant": {
        "whole": lambda: Gemma4AssistantConfig(text_config=dict(_ASSISTANT, model_type="gemma4_text"))
    },
    # layers are told apart by more than a list
    "gpt_neo": {"": {"attention_types": [[["global", "local"], 1]]}},
    "aria": {"": {"projector_patch_to_query_dict": {16: 4}}},
    "bamba": {"": {"attn_layer_indices": [1]}},
    "blt": {"": {"encoder_hash_byte_group_vocab": 64, "use_cache": False}},
    "granitemoehybrid": {"": {"layer_types": ["linear_attention", "full_attention"]}},
    "recurrent_gemma": {"": {"num_hidden_layers": 3}},
    "llama4": {"vision_config": {"intermediate_size": 256, "vision_output_dim": 64}},
    "mllama": {
        "text_config": {"num_hidden_layers": 3, "cross_attention_layers": [1]},
        "vision_config": {"intermediate_layers_indices": [0], "vision_output_dim": 128},
    },
    "qwen2_5_omni_thinker": {"": {"vision_start_token_id": 110}, "text_config": {"mrope_section": [2, 3, 3]}},
    "qwen3_omni_moe_thinker": {"": {"vision_start_token_id": 110}, "text_config": {"mrope_section": [2, 3, 3]}},
    "xlstm": {"": _XLSTM},
    "efficientnet": {"": {"width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 320}},
    "align": {
        "": {"projection_dim": 80},
        "vision_config": {"width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 80},
    },
    "levit": {
        "": {"image_size": 64, "patch_size": 16, "num_attention_heads": [4, 8, 12], "hidden_sizes": [128, 256, 384]}
    },
    "hgnet_v2": {"": {"stage_out_channels": [128, 512, 1024, 2048], "hidden_sizes": [256, 512, 1024, 2048]}},
    "cvt": {"": {"depth": [1, 2, 3]}},
    "shieldgemma2": {"": {"yes_token_index": 50, "no_token_index": 51}},
    "step3p7": {"text_config": {"sliding_window": 8}},
    "nemotron_h_omni": {"towers": ()},
    "glmasr": {"audio_config": {"intermediate_size": 256}},
    "voxtral": {"audio_config": {"intermediate_size": 256}},
    "textnet": {"": {"hidden_sizes": [64, 64, 128, 256, 512]}},
    "vision encoder/blip-2": {"qformer_config": {"use_qformer_text_input": True}},
    "causal LM/reformer": {"": {**_REFORMER, "is_decoder": True}},
    "zamba": {
        "": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"]}
    },
    "molmo2": {"adapter_config": {"vision_feature_layer": [-1, -2]}},
}
"""Model type -> path of the (sub-)configuration ('' is the root) -> arguments; `whole` makes the configuration that is
shrunk, where the class has no usable default."""
