"""Our side of `vllm_check.py`: what each checkpoint makes of the prompts, dequantized, in this environment.

    python benchmarks/_vllm_reference.py FOLDER

Writes reference.json beside each checkpoint FOLDER/MODEL/RECIPE: {"logprobs": [[...]], "greedy": [[...]],
"reader": "transformers" or "load_compressed" where that refuses}.
"""

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lightning_compress import load_compressed

NEW_TOKENS = 16


def read(folder: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, str]:
    """The model, and by what it was read: what could when the checkpoint was written."""
    report = folder / "report.json"
    if not report.exists() or json.loads(report.read_text())["verification"]["loaded_with"].startswith("transformers"):
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype), "transformers"
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    load_compressed(model, folder)
    return model.eval(), "load_compressed"


@torch.no_grad()
def answer(model: PreTrainedModel, prompts: Tensor) -> dict[str, object]:
    """Log probabilities of the prompts' tokens [n, L - 1], and greedily chosen ones after them [n, NEW_TOKENS]."""
    logprobs = model(prompts).logits[:, :-1].float().log_softmax(-1)
    ids = prompts
    for _ in range(NEW_TOKENS):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    chosen = logprobs.gather(-1, prompts[:, 1:, None])[..., 0]
    return {"logprobs": chosen.tolist(), "greedy": ids[:, prompts.shape[1] :].tolist()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    cases = json.loads((arguments.folder / "cases.json").read_text())
    for config in sorted(arguments.folder.glob("*/*/config.json")):
        folder = config.parent
        model, reader = read(folder, getattr(torch, cases["dtypes"][folder.parent.name]))
        result = {**answer(model, torch.tensor(cases["prompts"])), "reader": reader}
        (folder / "reference.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
