"""Models whose code is in their folder."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, dynamic_module_utils

from .conftest import Command, refused

CONFIG = """
from transformers import PretrainedConfig


class OwnConfig(PretrainedConfig):
    model_type = "own"

    def __init__(self, hidden_size=32, vocab_size=64, **more):
        self.hidden_size, self.vocab_size = hidden_size, vocab_size
        super().__init__(**more)
"""
HELPER = """
import torch


def activation(x):
    return torch.nn.functional.silu(x)
"""
MODEL = """
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from .configuration_own import OwnConfig
from .helper_own import activation


class OwnForCausalLM(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.up = nn.Linear(config.hidden_size, 2 * config.hidden_size)
        self.down = nn.Linear(2 * config.hidden_size, config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.embed

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids, attention_mask=None, labels=None):
        x = self.embed(input_ids)
        return CausalLMOutput(logits=self.lm_head(x + self.down(activation(self.up(x)))))
"""


@pytest.fixture
def own(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model's code, weights and tokenizer."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder = tmp_path / "own"
    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns("*.safetensors", "*config.json"))
    shutil.copy(checkpoint / "tokenizer_config.json", folder)
    vocabulary = len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])
    for name, text in (("configuration_own", CONFIG), ("helper_own", HELPER), ("modeling_own", MODEL)):
        (folder / f"{name}.py").write_text(text)
    places = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    said = {"model_type": "own", "architectures": ["OwnForCausalLM"], "auto_map": places, "vocab_size": vocabulary}
    (folder / "config.json").write_text(json.dumps({**said, "hidden_size": 32, "dtype": "float32"}))
    shapes = {"embed.weight": (vocabulary, 32), "up.weight": (64, 32), "up.bias": (64,), "down.weight": (32, 64)}
    shapes |= {"down.bias": (32,), "lm_head.weight": (vocabulary, 32)}
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator) / 8 for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("load", ["memory", "disk"])
def test_code_in_the_folder_is_run_where_it_is_trusted_and_is_in_the_checkpoint(
    load: str, own: Path, command: Command, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    given = ["compress", f"model.path={own}", f"model.load={load}", f"output_dir={out}", "recipe=w4a16_gptq"]
    given += ["recipe.modifiers.0.group_size=32", "data.num_samples=4", "data.max_length=32", "trainer=cpu"]
    assert "(model.trust_remote_code=true)" in refused(command, *given)
    assert not out.exists()
    command(*given, "model.trust_remote_code=true")
    assert all((out / f"{name}_own.py").is_file() for name in ("configuration", "helper", "modeling"))
    model = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    assert type(model).__name__ == "OwnForCausalLM"
    assert model(torch.tensor([[1, 2]])).logits.isfinite().all()
