"""What is said before a run of how its checkpoint will be served."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers import compress, compress_in_memory, modifier, recipe, tiny_llama, tiny_mixtral, token_batches
from transformers import PreTrainedModel, Qwen2MoeConfig, Qwen2MoeForCausalLM

from lightning_compress.errors import RunWarning

llama, mixtral = partial(tiny_llama, 2), partial(tiny_mixtral, 1, 4)


def shared_expert() -> PreTrainedModel:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 32, "vocab_size": 64}
    number = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts": 2}
    config = Qwen2MoeConfig(**sizes, **number, shared_expert_intermediate_size=32, num_experts_per_tok=1)
    return Qwen2MoeForCausalLM(config)


def apart(pattern: str) -> list[dict[str, Any]]:
    """Recipes that give what `pattern` means another scheme, or none."""
    others = [modifier(4), modifier(8, targets=[pattern])]
    return [{"modifiers": others}, recipe(4, ignore=["lm_head", pattern])]


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore::lightning_compress.export.verify.ReadBackWarning")
@pytest.mark.parametrize(
    ("make", "pattern", "said"),
    [
        (llama, "re:.*v_proj", r"0.self_attn.q_proj, \S*k_proj, \S*v_proj \(and 1 more such sets\) read the same"),
        (llama, "re:.*(0.mlp.up|1.mlp.down)_proj", r"layers.0.mlp.gate_proj, model.layers.0.mlp.up_proj read the same"),
        (mixtral, "re:.*experts.*w1", r"experts.0.w1, model.layers.0.mlp.experts.0.w3 \(and 3 more such sets\) read"),
    ],
)
def test_what_servers_fuse_has_one_scheme(
    make: Callable[[], PreTrainedModel], pattern: str, said: str, tmp_path: Path
) -> None:
    for number, given in enumerate(apart(pattern)):
        with pytest.warns(RunWarning, match=said):
            report = compress(make(), token_batches(), given, tmp_path / str(number), verify=False)
        assert "vLLM" in report.notes[0]


@pytest.mark.sampled(4)
@pytest.mark.filterwarnings("ignore::lightning_compress.export.verify.ReadBackWarning")
@pytest.mark.parametrize(
    ("make", "pattern"),
    [
        (llama, "re:.*(o|down)_proj"),
        (mixtral, "re:.*experts"),
        (mixtral, "re:.*self_attn"),
        (shared_expert, "re:.*shared_expert_gate"),
    ],
)
def test_what_they_do_not_fuse_may_have_several(
    make: Callable[[], PreTrainedModel], pattern: str, tmp_path: Path
) -> None:
    """What routes reads what experts do, and is no part of them. A warning is an error here."""
    for number, given in enumerate(apart(pattern)):
        assert not compress(make(), token_batches(), given, tmp_path / str(number), verify=False).notes


def test_nothing_is_said_where_nothing_is_written() -> None:
    assert not compress_in_memory(llama(), token_batches(), apart("re:.*v_proj")[0]).notes
