"""Tiny random models of many families, by the sizes that their configuration classes take."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from lightning_compress.graph.execute import execute
from lightning_compress.graph.leaf import Leaf
from lightning_compress.graph.synthesize import flatten_batch
from lightning_compress.graph.trace import Traced, trace

VOCAB = 97

BASE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Names that nearly every decoder-only configuration has (or maps to its own)."""

GPT2_STYLE: dict[str, Any] = {
    "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_ctx": 128, "vocab_size": VOCAB,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
MOE: dict[str, Any] = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24, "norm_topk_prob": True, "router_aux_loss_coef": 0.0,
}  # fmt: skip
MLA: dict[str, Any] = {
    **MOE, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4, "n_shared_experts": 1,
}  # fmt: skip
MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16, "mamba_d_ssm": 64,
}  # fmt: skip

CAUSAL_LM: dict[str, Mapping[str, Any]] = {
    "apertus": BASE,
    "arcee": BASE,
    "aria_text": {**BASE, "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    "bamba": {**BASE, **MAMBA2, "attn_layer_indices": [1]},
    "biogpt": BASE,
    "bitnet": BASE,
    "bloom": GPT2_STYLE,
    "codegen": {**GPT2_STYLE, "rotary_dim": 4},
    "cohere": BASE,
    "cohere2": {**BASE, "sliding_window": 8},
    "ctrl": {**GPT2_STYLE, "dff": 48},
    "deepseek_v2": {**BASE, **MLA, "topk_method": "greedy"},
    "deepseek_v3": {**BASE, **MLA},
    "diffllama": BASE,
    "doge": BASE,
    "dots1": {**BASE, **MOE, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1},
    "ernie4_5": BASE,
    "ernie4_5_moe": {**BASE, **MOE, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1},
    "exaone4": {**BASE, "sliding_window": 8},
    "falcon": {**BASE, "new_decoder_architecture": False},
    "falcon_h1": {**BASE, **MAMBA2},
    "falcon_mamba": {**BASE, "state_size": 8},
    "flex_olmo": {**BASE, **MOE},
    "gemma": {**BASE, "head_dim": 8},
    "gemma2": {**BASE, "head_dim": 8, "sliding_window": 8},
    "gemma3_text": {**BASE, "head_dim": 8, "sliding_window": 8},
    "glm": {**BASE, "head_dim": 8},
    "glm4": {**BASE, "head_dim": 8},
    "glm4_moe": {**BASE, **MOE, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        "n_shared_experts": 1, "head_dim": 8},
    "gpt2": GPT2_STYLE,
    "gpt_bigcode": GPT2_STYLE,
    "gpt_neo": {**BASE, "num_layers": 2, "attention_types": [[["global", "local"], 1]], "num_heads": 4,
        "window_size": 8},
    "gpt_neox": BASE,
    "gpt_neox_japanese": {**BASE, "intermediate_multiple_size": 2},
    "gpt_oss": {**BASE, **MOE, "head_dim": 8, "sliding_window": 8},
    "gptj": {**GPT2_STYLE, "rotary_dim": 4},
    "granite": BASE,
    "granitemoe": {**BASE, **MOE},
    "granitemoehybrid": {**BASE, **MOE, **MAMBA2, "layer_types": ["mamba", "attention"],
        "shared_intermediate_size": 24},
    "granitemoeshared": {**BASE, **MOE, "shared_intermediate_size": 24},
    "helium": {**BASE, "head_dim": 8},
    "hunyuan_v1_dense": {**BASE, "head_dim": 8},
    "hunyuan_v1_moe": {**BASE, **MOE, "head_dim": 8, "moe_topk": 2},
    "jamba": {**BASE, **MOE, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1,
              "mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False},
    "jetmoe": {**BASE, **MOE, "kv_channels": 8},
    "lfm2": {**BASE, "layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {**BASE, **MOE, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "llama": BASE,
    "mamba": {**BASE, "state_size": 8},
    "mamba2": {**BASE, "state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 16},
    "minimax": {**BASE, **MOE, "layer_types": ["full_attention", "full_attention"]},
    "ministral": {**BASE, "sliding_window": 8, "head_dim": 8},
    "mistral": {**BASE, "sliding_window": 8},
    "mixtral": {**BASE, **MOE},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128, "vocab_size": VOCAB, "expansion_ratio": 2},
    "nemotron": {**BASE, "head_dim": 8},
    "olmo": BASE,
    "olmo2": BASE,
    "olmo3": {**BASE, "sliding_window": 8},
    "olmoe": {**BASE, **MOE},
    "openai-gpt": GPT2_STYLE,
    "opt": {**BASE, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "persimmon": BASE,
    "phi": BASE,
    "phi3": {**BASE, "original_max_position_embeddings": 128},
    "phimoe": {**BASE, **MOE},
    "qwen2": BASE,
    "qwen2_moe": {**BASE, **MOE},
    "qwen3": {**BASE, "head_dim": 8},
    "qwen3_moe": {**BASE, **MOE, "head_dim": 8},
    "qwen3_next": {**BASE, **MOE, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 4,
                   "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "recurrent_gemma": {**BASE, "lru_width": 32, "attention_window_size": 8, "head_dim": 8,
                        "block_types": ["recurrent", "attention"]},
    "rwkv": {"hidden_size": 32, "attention_hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
             "vocab_size": VOCAB, "context_length": 128},
    "seed_oss": {**BASE, "head_dim": 8},
    "smollm3": BASE,
    "stablelm": BASE,
    "starcoder2": {**BASE, "sliding_window": 8},
    "vaultgemma": {**BASE, "head_dim": 8, "sliding_window": 8},
    "xglm": {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4, "vocab_size": VOCAB,
             "max_position_embeddings": 128},
    "xlstm": {**BASE, "num_heads": 4, "embedding_dim": 32, "num_blocks": 2, "qk_dim_factor": 0.5, "v_dim_factor": 1.0,
              "chunkwise_kernel": "chunkwise--native_autograd", "sequence_kernel": "native_sequence__native",
              "step_kernel": "native", "chunk_size": 16},
    "zamba2": {**BASE, "layers_block_type": ["mamba", "hybrid"], "mamba_d_state": 8, "n_mamba_heads": 8,
        "mamba_headdim": 8,
               "mamba_ngroups": 1, "chunk_size": 16, "num_mem_blocks": 1, "use_mem_rope": True},
}  # fmt: skip
"""Model type -> configuration arguments."""


def causal_lm(model_type: str, **changes: Any) -> nn.Module:
    """A tiny random causal language model in eval mode, with weights large enough that wrong inputs show."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**CAUSAL_LM[model_type], **changes})
    return randomized(AutoModelForCausalLM.from_config(config))


def randomized(model: nn.Module) -> nn.Module:
    """Small initial scales make a model nearly the identity, and a test on it blind: scale matrices up."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1 and parameter.std() > 0:
                parameter.mul_(0.2 / parameter.std())
    return model.eval()


def linear_names(model: nn.Module) -> list[str]:
    """Quantization targets as a recipe would choose them."""
    return [n for n, m in model.named_modules() if isinstance(m, (nn.Linear, Conv1D)) and n != "lm_head"]


def layer_names(model: nn.Module) -> list[str]:
    """Members of the module lists that hold the model's layers."""
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    outermost = [(n, m) for n, m in lists if not any(n.startswith(other + ".") for other, _ in lists)]
    return [f"{name}.{key}" for name, module in outermost for key, _ in module.named_children()]


def token_batch(rows: int, length: int, *, padding: str = "left") -> dict[str, Tensor]:
    """Token ids [B, L] of which the first row has two padding tokens, where it is long enough."""
    torch.manual_seed(1000 * rows + length)
    ids = torch.randint(3, 90, (rows, length))
    mask = torch.ones_like(ids)
    if length > 3 and padding:
        mask[0, slice(0, 2) if padding == "left" else slice(-2, None)] = 0
    return {"input_ids": ids, "attention_mask": mask}


def traced(model: nn.Module, batch: Any, **changes: Any) -> Traced:
    """Trace with all linears as targets and all layers as boundaries."""
    names: dict[str, Any] = {"leaf_names": linear_names(model), "boundary_names": layer_names(model), **changes}
    return trace(model, lambda given: model(**given), batch, **names)


def executed(graph: Traced, model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """Outputs of the graph on a batch, by their key paths; values are dropped at their last use."""
    nodes = list(graph.graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    values: dict[fx.Node, object] = dict(zip(inputs, flatten_batch(batch)[0], strict=True))
    order = {node: index for index, node in enumerate(nodes)}
    last_use: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes[:-1]:
        last_use.setdefault(max(node.users, key=order.__getitem__, default=node), []).append(node)
    results = dict(zip(graph.outputs, nodes[-1].args[0], strict=True))
    execute(nodes[:-1], values, model, graph.constants, torch.device("cpu"), last_use)
    assert set(values) == set(results.values()), "values were kept"
    return {path: values[node] for path, node in results.items()}


def leaf_nodes(graph: Traced, name: str = "") -> list[fx.Node]:
    """Calls of the modules whose names end with `name`."""
    return [n for n in graph.graph.nodes if isinstance(n.target, Leaf) and n.target.name.endswith(name)]


def assert_same(model: nn.Module, graph: Any, *batches: dict[str, Tensor], output: str = "logits") -> None:
    for batch in batches:
        with torch.no_grad():
            expected = model(**batch)[output]
        torch.testing.assert_close(executed(graph, model, batch)[output], expected, rtol=1e-6, atol=1e-6)


class Toy(nn.Module):
    """Something between two linears."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(8, 8), middle, nn.Linear(8, 5)

    def forward(self, x: Tensor, ids: Tensor) -> dict[str, Tensor]:
        return {"logits": self.last(self.middle(self.first(x)))}


def toy_batch(rows: int, length: int) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, length, 8), "ids": torch.zeros(rows, length, dtype=torch.long)}
