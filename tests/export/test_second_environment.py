"""A checkpoint loads where this package and Lightning are not installed."""

import subprocess
import venv
from importlib.metadata import distribution
from pathlib import Path

import pytest
import torch
from helpers import compress, recipe, tiny_llama, token_batches
from packaging.requirements import Requirement

READER = ("torch", "transformers", "compressed-tensors")

PROGRAM = """
import importlib.util, sys, torch
from transformers import AutoModelForCausalLM
absent = ("lightning", "lightning_compress", "torchmetrics", "datasets", "hydra")
assert not [name for name in absent if importlib.util.find_spec(name)]
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert model.model.layers[0].mlp.down_proj.quantization_scheme.weights.num_bits == 4
saved = torch.load(sys.argv[2])
with torch.no_grad():
    assert torch.equal(model(**saved["batch"]).logits, saved["logits"])
print(model.generate(**saved["batch"], max_new_tokens=4, do_sample=False, pad_token_id=0).shape[1])
"""


def closure(names: tuple[str, ...]) -> dict[str, Path]:
    """Top-level files and folders in site-packages of these distributions and all that they require."""
    found: dict[str, Path] = {}
    waiting, seen = list(names), set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        installed = distribution(name)
        for file in installed.files or ():
            top = file.parts[0]
            if top != "..":
                found[top] = Path(str(installed.locate_file(top)))
        requirements = map(Requirement, installed.requires or ())
        waiting += [
            wanted.name for wanted in requirements if not wanted.marker or wanted.marker.evaluate({"extra": ""})
        ]
    return found


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with torch, transformers, compressed-tensors, what they require, and nothing else;
    linked from this one, to save the downloads."""
    folder = tmp_path_factory.mktemp("reader") / "env"
    venv.create(folder, with_pip=False)
    (site,) = (folder / "lib").glob("python*/site-packages")
    for name, path in closure(READER).items():
        (site / name).symlink_to(path)
    return folder / "bin/python"


def test_transformers_and_compressed_tensors_suffice(reader: Path, tmp_path: Path) -> None:
    """The logits are those of the model in memory, bit for bit."""
    model = tiny_llama(2)
    compress(model, token_batches(), recipe(4), tmp_path / "out")
    batch = {"input_ids": token_batches(1)[0]["input_ids"]}
    with torch.no_grad():
        torch.save({"batch": batch, "logits": model(**batch).logits}, tmp_path / "expected.pt")
    done = subprocess.run(
        [reader, "-c", PROGRAM, tmp_path / "out", tmp_path / "expected.pt"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == batch["input_ids"].shape[1] + 4
