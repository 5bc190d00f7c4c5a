"""`estimate` and `plan` of models that read images: as large as runs on images are."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import llava_processor, prepare, recipe, tiny_llama, tiny_qwen2_vl
from PIL import Image
from tokenizers import Tokenizer
from transformers import LlavaConfig, LlavaForConditionalGeneration

from lightning_compress.calibration.footprint import footprint
from lightning_compress.calibration.prepare import calibrating
from lightning_compress.calibration.target import find_target
from lightning_compress.command.measure import measured
from lightning_compress.command.samples import prompts, samples
from lightning_compress.data.multimodal import blank_images
from lightning_compress.errors import CalibrationDataError, CompressionError
from lightning_compress.foresight.inputs import images_left_out, with_images
from lightning_compress.foresight.jobs import CalibrationJob, InferenceJob, infer, on_fakes
from lightning_compress.graph.synthesize import flatten_batch
from lightning_compress.memory.source import parameters_on_meta
from lightning_compress.memory.tracker import LiveMemory
from lightning_compress.recipe.load import load_recipe
from lightning_compress.recipe.resolve import resolve

from .conftest import Command, refused

WORDS = ["<unk>", "<eos>", "<image>", "a", "cat", "image", "two", "dogs"]
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIG = LlavaConfig(
    text_config={**SIZES, "num_key_value_heads": 2, "vocab_size": 16, "model_type": "llama"},
    vision_config={
        **SIZES, "image_size": 32, "patch_size": 8, "projection_dim": 32, "model_type": "clip_vision_model"
    },
    image_token_index=2, image_seq_length=16, vision_feature_layer=-1, architectures=["LlavaForConditionalGeneration"],
)  # fmt: skip
GPTQ = recipe(4, strategy="channel")
CPU = torch.device("cpu")
GIVEN = (
    "model.auto_class=AutoModelForImageTextToText", "recipe.modifiers.0.scheme={weights:{num_bits:4,strategy:channel}}"
)  # fmt: skip


def on_meta() -> LlavaForConditionalGeneration:
    with parameters_on_meta():
        return LlavaForConditionalGeneration(CONFIG).eval()


def processor() -> Any:
    return llava_processor(WORDS)


@pytest.mark.slow
def test_a_calibration_is_foreseen_as_it_is_on_images() -> None:
    """The table is that of a model with weights, prepared on as many images. Seen to fail: on text alone, which knows
    of no tower."""
    job = CalibrationJob(num_samples=8, max_length=40, batch_size=4, num_images=1)
    target = find_target(on_meta())
    found = measured(target, resolve(load_recipe(GPTQ), target.root), job, CPU, verifies=False, processor=processor())
    torch.manual_seed(0)
    batches = [blank_images(processor(), rows, length=40) for rows in (4, 4)]
    for batch in batches:
        assert batch["input_ids"].shape[1] == 40
        assert ((batch["input_ids"] == 2).sum(1) == 16).all()
        batch["pixel_values"].normal_()
    real = prepare(LlavaForConditionalGeneration(CONFIG).eval(), batches, GPTQ)
    assert real.data is not None
    with calibrating(real.target.root):
        table = footprint(real.run, [flatten_batch(batch)[0] for batch in real.data.batches])
    assert [(row.name, row.moments) for row in found.table] == [(row.name, row.moments) for row in table]
    text = measured(target, found.run.resolved, CalibrationJob(8, 40, 4), CPU, verifies=False)
    assert {row.name for row in found.table} - {row.name for row in text.table} == {
        row.name for row in table if "vision_tower" in row.name or "projector" in row.name
    }


@pytest.mark.parametrize("num_images", [1, 3])
def test_what_the_configuration_says_is_what_the_processor_makes(num_images: int) -> None:
    """Seen to fail: with the images of one row only."""
    job = CalibrationJob(num_samples=6, max_length=60, batch_size=2, num_images=num_images)
    ours, theirs = (samples(on_meta(), job, of) for of in (None, processor()))
    assert len(ours.batches) == 3
    for one, other in zip(ours.batches, theirs.batches, strict=True):
        assert {name: tensor.shape for name, tensor in one.items()} == {
            name: tensor.shape for name, tensor in other.items()
        }
        assert torch.equal(one["input_ids"] == 2, other["input_ids"] == 2)


@pytest.mark.parametrize("of", [processor, lambda: None], ids=["processor", "configuration"])
def test_generation_takes_what_it_takes_on_images(of: Any) -> None:
    """Fake and real tensors. Seen to fail: with checks of values, which no fake can answer."""
    job = InferenceJob(batch_size=2, context=40, new_tokens=4, num_images=2)
    model = LlavaForConditionalGeneration(CONFIG).eval()
    prompt = prompts(model, job, of())
    assert prompt is not None
    real = infer(model, job, LiveMemory(), prompt)
    with on_fakes(model) as fake:
        found = infer(model, job, LiveMemory(), {name: fake(tensor) for name, tensor in prompt.items()})
        text = infer(model, job, LiveMemory())
    assert found == real
    assert found[0].working > text[0].working
    assert prompts(model, InferenceJob(context=40), of()) is None


def test_samples_filled_to_their_length() -> None:
    """Also where a word is several tokens, as near as whole words allow."""
    made = partial(blank_images, processor(), 2, 1, (48, 20))
    assert [made(length)["input_ids"].shape for length in (17, 18, 33)] == [(2, 17), (2, 18), (2, 33)]
    of = processor()
    vocabulary = json.loads(of.tokenizer.backend_tokenizer.to_str())
    vocabulary["pre_tokenizer"] = {"type": "Split", "pattern": {"Regex": "<image>|."}, "behavior": "Isolated",
                                   "invert": False}  # fmt: skip
    of.tokenizer._tokenizer = Tokenizer.from_str(json.dumps(vocabulary))
    assert blank_images(of, 1, length=40)["input_ids"].shape[1] in range(35, 41)
    with pytest.raises(CalibrationDataError, match=r"2 images of 48 x 20 and a word are 33 tokens to LlavaProcessor"):
        blank_images(processor(), 1, 2, (48, 20), 32)


def test_what_nobody_knows() -> None:
    """Qwen2-VL's kind says how many patches an image has in a grid, which a configuration does not."""
    qwen = tiny_qwen2_vl(32, 1)
    for model in (qwen, tiny_llama(1)):
        with pytest.raises(CompressionError, match=r"cannot be known from its configuration alone; put its processor"):
            with_images(model, 1, 64, 1)
    with pytest.raises(CompressionError, match="5 images are 80 tokens to LlavaForConditionalGeneration, and samples"):
        with_images(on_meta(), 1, 64, 5)
    assert images_left_out(on_meta(), 0) == "Of text alone: images, which this model reads, are not counted."
    assert images_left_out(on_meta(), 1) == images_left_out(tiny_llama(1), 0) == ""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a model of which there is a configuration only, with its processor."""
    CONFIG.save_pretrained(tmp_path / "model")
    processor().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.slow
def test_estimates(command: Command, folder: Path) -> None:
    where = ("estimate", f"model.path={folder}", *GIVEN)
    sizes = ("job.num_samples=4", "job.max_length=40", "job.batch_size=2")
    assert "Of text alone: images, which this model reads, are not counted." in command(*where, *sizes)
    said = command(*where, *sizes, "job.num_images=1", "job.image_size=[40,50]")
    assert "num_images=1" in said
    assert "Of text alone" not in said
    inference = (*where[:3], "job=inference", "job.context=40")  # without the recipe
    said = command(*inference, "job.num_images=2")
    assert "num_images=2" in said
    assert "Of text alone" not in said
    assert "Of text alone" in command(*inference)
    for given, message in (
        (["job.num_images=-1"], "job.num_images=-1 is no number of images"),
        (["job.num_images=1", "job.image_size=3"], "job.image_size=3 is no height and width, as in [336, 336]"),
        (["job.num_images=1", "job.image_size=[3,x]"], "job.image_size=[3, 'x'] is no height and width"),
        (["job.num_images=1", "job.batch_size=3"], "batch_size=3 does not divide num_samples=4"),
        (["job.num_images=4"], "4 images of 336 x 336 and a word are 65 tokens to LlavaProcessor, and samples have 40"),
    ):
        assert message in refused(command, *where, *sizes, *given)
    for file in folder.glob("*processor*"):
        file.unlink()
    message = refused(command, *where, *sizes, "job.num_images=1", "job.image_size=[3,3]")
    assert "image_size=[3, 3] is what a processor makes the model's images of, and model.path has none" in message
    assert "num_images=1" in command(*where, *sizes, "job.num_images=1")


@pytest.mark.slow
@pytest.mark.usefixtures("rates")
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_a_plan_with_images_is_made_and_run(command: Command, folder: Path, tmp_path: Path) -> None:
    """Recorded anew where the graph of one batch size does not serve another."""
    file, where = tmp_path / "plan.json", (f"model.path={folder}", *GIVEN)
    of = ("plan", *where, "data.num_samples=4", "data.max_length=24", "host=100GiB", f"json={file}")
    narrow = ("choices.schedule=[staged]", "choices.load=[memory]", "choices.prefetch_depth=[0]")
    assert "choices.batch_size=[3]: none divides data.num_samples=4" in refused(
        command, *of, *narrow, "num_images=1", "choices.batch_size=[3]"
    )
    assert "num_images=x is no number of images" in refused(command, *of, "num_images=x")
    generation = ("plan", f"model.path={folder}", GIVEN[0], "job=inference", "gpu=t4")
    assert "num_images: of a calibration alone." in refused(command, *generation, "num_images=1")
    assert "planned for one rank, for prompts without images" in refused(command, *generation, "job.num_images=1")
    command(*of, *narrow, "choices.batch_size=[2]")
    rows = [{"text": text, "image": f"{number}.png"} for number, text in enumerate(("a cat", "two dogs", "a", "cat"))]
    for row in rows:
        Image.new("RGB", (40, 50)).save(tmp_path / row["image"])
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    torch.manual_seed(0)
    LlavaForConditionalGeneration(CONFIG).save_pretrained(folder)
    run = (
        "compress", *where, "trainer=cpu", "data=multimodal", f"data.path={tmp_path / 'pairs.jsonl'}",
        "data.num_samples=4", f"output_dir={tmp_path / 'out'}",
    )  # fmt: skip
    assert "images in the data False in the plan, True here" in refused(command, *run, f"plan={file}")
    assert "6 of 6 ways to run fit" in command(*of, *narrow[:2], "num_images=1", "choices.batch_size=[1,4]")
    best = json.loads(file.read_text())["best"]["choice"]
    assert f"batch size {best['batch_size']}, " in command(*run, f"plan={file}")
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["num_batches"] == 4 // best["batch_size"]
