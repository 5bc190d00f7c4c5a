"""`lightning-compress estimate`: three jobs from a config.json alone, and wrong input."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from rich.console import Console
from safetensors.torch import save_file
from transformers import (
    BertConfig,
    Dots1Config,
    Dots1ForCausalLM,
    GPT2Config,
    HunYuanDenseV1Config,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
)

from lightning_compress.command import cli
from lightning_compress.command.flags import with_flags
from lightning_compress.command.models import load_config_only, load_model
from lightning_compress.memory.needs import pinned_bytes

from .conftest import Command, refused

PLACES = ("device", "host")
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "dtype": "bfloat16",
    "architectures": ["LlamaForCausalLM"],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a model of which there is a configuration only."""
    LlamaConfig(**SIZES).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def estimate(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command; what it wrote, and what it said."""

    def run(*options: str) -> tuple[dict[str, Any], str]:
        file = tmp_path / "estimate.json"
        given = ["lightning-compress", "estimate", f"model.path={folder}", f"json={file}", *options]
        monkeypatch.setattr("sys.argv", given)
        monkeypatch.setenv("COLUMNS", "200")
        cli.main()
        found: dict[str, Any] = json.loads(file.read_text())
        return found, capsys.readouterr().out

    return run


def totals(found: dict[str, Any]) -> dict[tuple[str, str], int]:
    return {(row["name"], row["place"]): row["total"] for row in found["rows"]}


def test_inference(estimate: Any) -> None:
    found, said = estimate("job=inference", "job.context=256")
    assert {row["name"]: row["place"] for row in found["rows"]} == {"prefill": "device", "decode": "device"}
    weights = found["rows"][0]["parts"]["weights"]
    assert weights == pytest.approx(2 * found["num_parameters"], rel=0.001), "and the rotary frequencies"
    assert "prefill" in said
    assert "CUDA allocator allocates" in said
    assert "rule of thumb, inference, 2 bytes per parameter" in said
    packed, said = estimate("job=inference", "job.context=256", "job.weight_bits=4")
    assert packed["rows"][0]["parts"]["weights"] < 0.5 * weights
    assert "Linear layers but the last, and experts, have 4 bits" in said


@pytest.mark.slow
@pytest.mark.usefixtures("rates")
def test_a_configuration_as_a_file(command: Command, folder: Path) -> None:
    """Where no weights are needed; elsewhere it is refused before anything is done. Seen to fail: without the refusal,
    with which transformers looks for a tokenizer in the file."""
    by_file, by_folder = (f"model.config={folder / 'config.json'}", f"model.path={folder}")
    job = ("job=inference", "device=cpu")
    assert command("estimate", by_file, *job) == command("estimate", by_folder, *job)
    few = ("data.num_samples=4", "data.max_length=16", "choices.schedule=[block]", "choices.batch_size=[2]")
    assert "plan: schedule block, batch size 2" in command("plan", by_file, *few, "run_on=cpu")
    assert "LlamaForCausalLM" in command("inspect", by_file)
    for given in (("compress", "output_dir=out"), ("evaluate",), ("inspect", "data=docs")):
        assert "has no weights, which this command reads" in refused(command, *given, by_file)
    assert "there is no such file" in refused(command, "estimate", "model.config=nowhere.json")
    assert "give one of them" in refused(command, "estimate", by_file, by_folder)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_a_configuration_that_names_no_type(estimate: Any, folder: Path) -> None:
    """Weights have that of the files, as transformers reads them: in an estimate, and in memory as on disk. Seen to
    fail: with float32 for all but those in memory."""
    LlamaForCausalLM(LlamaConfig(**SIZES)).to(torch.bfloat16).save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps({key: value for key, value in json.loads(file.read_text()).items() if key != "dtype"}))
    found, _ = estimate("job=inference")
    assert "inference in bfloat16, " in found["job"]
    options = {"auto_class": "AutoModelForCausalLM", "tokenizer": None, "dtype": "auto", "trust_remote_code": False}
    config = OmegaConf.create({"path": str(folder), "attn_implementation": None, "weights": None, **options})
    assert {load_model(config, from_disk)[0].dtype for from_disk in (False, True)} == {torch.bfloat16}
    assert load_config_only(OmegaConf.merge(config, {"dtype": "float16"})).dtype == torch.float16  # type: ignore[arg-type]


def _mixed(folder: Path) -> None:
    """Of a configuration without a type, with files in which float32 comes first, a float8 first by name."""
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).to(torch.bfloat16)
    model.save_pretrained(folder)
    (config := json.loads((folder / "config.json").read_text())).pop("dtype")
    (folder / "config.json").write_text(json.dumps(config))
    stored = model.state_dict() | {"a": torch.zeros(1, dtype=torch.float8_e4m3fn), "model.norm.weight": torch.ones(256)}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})


def _t5(folder: Path) -> None:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 16}
    T5ForConditionalGeneration(T5Config(**sizes, feed_forward_proj="gated-gelu")).half().save_pretrained(folder)


def _dots(folder: Path) -> None:
    sizes = {
        **SIZES,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_shared_experts": 1,
    }
    Dots1ForCausalLM(Dots1Config(**sizes, first_k_dense_replace=1, n_group=1, topk_group=1)).to(
        torch.bfloat16
    ).save_pretrained(folder)


@pytest.mark.parametrize(
    ("save", "kind", "keeps"),
    [(_mixed, "CausalLM", False), (_t5, "Seq2SeqLM", True), (_dots, "CausalLM", True)],
    ids=["mixed", "fp16", "strict"],
)
def test_types_on_disk_are_those_in_memory(folder: Path, save: Any, kind: str, keeps: bool) -> None:
    """Transformers keeps some modules in float32. Seen to fail: on disk they had the type of the others, and all that
    of the tensor that happens to lie first."""
    save(folder)
    options = {"auto_class": f"AutoModelFor{kind}", "tokenizer": None, "dtype": "auto", "trust_remote_code": False}
    config = OmegaConf.create({"path": str(folder), "attn_implementation": None, "weights": None, **options})
    in_memory, on_disk = (
        {name: tensor.dtype for name, tensor in load_model(config, from_disk)[0].state_dict().items()}
        for from_disk in (False, True)
    )
    assert on_disk == in_memory
    assert (torch.float32 in on_disk.values()) is keeps


@pytest.mark.slow
def test_experts(estimate: Any, tmp_path: Path) -> None:
    """Run as a product by groups, and packed. Seen to fail: a copy of an expert's weights for every token, 170 times as
    much; and weights that stayed as they are."""
    folder = tmp_path / "experts"
    sizes = {**SIZES, "architectures": ["MixtralForCausalLM"], "num_local_experts": 8}
    MixtralConfig(**sizes).save_pretrained(folder)
    model = f"model.path={folder}"
    found, _ = estimate(model, "job=inference", "job.context=512")
    row = found["rows"][0]["parts"]
    rows_of_experts = 2 * 512  # each token goes to two
    assert row["activations, temporaries"] < 2 * rows_of_experts * (3 * 256 + 4 * 512) * 2
    packed, _ = estimate(model, "job=inference", "job.context=512", "job.weight_bits=4")
    assert packed["rows"][0]["parts"]["weights"] < 0.4 * row["weights"]
    trained, said = estimate(model, "job=finetuning", "job.length=64", "job.method=qlora")
    assert "Stacked experts (0.02 GiB) are no linear layers to bitsandbytes" in said
    assert trained["rows"][0]["parts"]["activations, temporaries"] < 1 << 30


def test_stages_of_a_pipeline(estimate: Any, folder: Path) -> None:
    """The last one has the output embedding beside its layers. Seen to fail: a third of all."""
    whole, _ = estimate("job=inference", "job.context=64")
    found, _ = estimate("job=inference", "job.context=64", "layout.pipeline=3")
    weights = [each["rows"][0]["parts"]["weights"] for each in (whole, found)]
    embedding = 1000 * 256 * 2
    assert weights[1] == pytest.approx((weights[0] - 2 * embedding) / 3 + embedding, rel=0.01)


def test_narrow_terminals(estimate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every number is whole."""
    monkeypatch.setattr(cli, "Console", partial(Console, width=80))
    found, said = estimate("job=calibration", "model.load=disk", "device=cuda")
    table = said.partition("most of the")[0].splitlines()
    (whole,) = (line.split() for line in table if line.split()[:1] == ["all"])
    assert whole == ["all", *(f"{row['total'] / (1 << 30):.2f}" for row in found["rows"])]
    assert "closed form" in said
    assert max(map(len, table)) <= 80


def test_headings_are_whole(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In a pipe, and broken into lines in a terminal. Seen to fail: `devi…`, `verif…` for a pipe's 80 columns."""
    monkeypatch.setattr("sys.argv", ["", "estimate", f"model.path={folder}", "job=calibration", "device=cuda"])
    monkeypatch.delenv("COLUMNS", raising=False)
    cli.main()
    piped = capsys.readouterr().out
    assert piped.count("verification ") >= 2
    monkeypatch.setenv("COLUMNS", "80")
    cli.main()
    narrow = capsys.readouterr().out
    assert "verification " not in narrow.partition("libraries")[0]
    assert "…" not in piped + narrow


def test_what_is_no_model_for_it(estimate: Any, tmp_path: Path) -> None:
    """Seen to fail: all classes that transformers knows, and weights of a quantized model counted whole."""
    T5Config(architectures=["T5ForConditionalGeneration"]).save_pretrained(tmp_path / "t5")
    with pytest.raises(SystemExit, match=r"does not know a T5Config; give model.auto_class=AutoModelForSeq2SeqLM"):
        estimate(f"model.path={tmp_path / 't5'}", "job=finetuning")
    LlamaConfig(**SIZES, quantization_config={"quant_method": "gptq", "bits": 4}).save_pretrained(tmp_path / "packed")
    with pytest.raises(SystemExit, match="is quantized, and its weights would be counted as if it was not"):
        estimate(f"model.path={tmp_path / 'packed'}", "job=inference")


def test_a_configuration_that_its_model_cannot_be_built_of(estimate: Any, tmp_path: Path) -> None:
    """Seen to fail: a traceback out of the model's code."""
    HunYuanDenseV1Config(**SIZES).save_pretrained(tmp_path / "hunyuan")  # no head_dim
    with pytest.raises(SystemExit, match="hunyuan cannot be built: TypeError: unsupported operand"):
        estimate(f"model.path={tmp_path / 'hunyuan'}", "job=inference")


def test_dropout_of_attention_on_a_cpu_has_no_closed_form(estimate: Any, tmp_path: Path) -> None:
    """A CPU writes the scores down."""
    LlamaConfig(**SIZES, attention_dropout=0.1).save_pretrained(tmp_path / "drops")
    options = ("job=finetuning", "job.length=64", f"model.path={tmp_path / 'drops'}")
    on_cpu, said = estimate(*options, "device=cpu")
    assert {row["closed_form"] for row in on_cpu["rows"]} == {None}
    assert "no closed form with attention's dropout" in said
    on_cuda, _ = estimate(*options)
    assert None not in {row["closed_form"] for row in on_cuda["rows"]}


def test_models_that_do_not_read_tokens_alone(estimate: Any, tmp_path: Path) -> None:
    """Seen to fail: all of them, because they were given tokens."""
    sizes = {**SIZES, "architectures": ["ViTForImageClassification"]}
    ViTConfig(**sizes, image_size=32, patch_size=16).save_pretrained(tmp_path / "vit")
    vit = [f"model.path={tmp_path / 'vit'}", "model.auto_class=AutoModelForImageClassification"]
    found, _ = estimate(*vit, "job.num_samples=16", "job.batch_size=8")
    (batch,) = (row for row in found["rows"] if (row["name"], row["place"]) == ("batch", "host"))
    hidden = 2 * pinned_bytes(8 * (4 + 1) * 256 * 2)  # of four patches and the class, in both batches
    assert batch["parts"]["waiting activations"] == 1.5 * hidden, "and what one of them has for the next group"
    with pytest.raises(SystemExit, match="job=finetuning is of models that read tokens, and ViTForImageClassification"):
        estimate(*vit, "job=finetuning")
    BertConfig(**{**SIZES, "architectures": ["BertForMaskedLM"]}).save_pretrained(tmp_path / "bert")
    bert = [f"model.path={tmp_path / 'bert'}", "model.auto_class=AutoModelForMaskedLM"]
    with pytest.raises(SystemExit, match="2048 tokens are more than the 512 positions that BertForMaskedLM is made"):
        estimate(*bert)


@pytest.mark.slow
def test_words_for_flags(estimate: Any) -> None:
    """Seen to fail: `no` is a string, and true; of `trust_remote_code` too."""
    options = ("job=finetuning", "job.length=128")
    yes, no, plain = (
        totals(estimate(*options, *given)[0])
        for given in (["job.gradient_checkpointing=yes"], ["job.gradient_checkpointing=off"], [])
    )
    assert no == plain != yes


def test_flags_are_those_of_the_command() -> None:
    """Seen to fail: 1 and 0 of the user's own function as booleans, `dequantize: no` as it is, and true."""
    given = {"_target_": "mine.loader", "packing": 1, "deep": {"verify": 0}}
    config = OmegaConf.create({"data": {"loader": given, "packing": 0}, "model": {"dequantize": "no"}})
    assert with_flags(config) == {"data": {"loader": given, "packing": False}, "model": {"dequantize": False}}
    assert type(config.data.loader.packing) is type(config.data.loader.deep.verify) is int


@pytest.mark.slow
def test_more_tokens_than_positions_are_told(estimate: Any) -> None:
    for options in (("job=inference", "job.context=4096", "job.new_tokens=1"), ("job=finetuning", "job.length=4097")):
        _, said = estimate(*options)
        assert "4097 tokens are more than the 2048 positions that LlamaForCausalLM is made for." in " ".join(
            said.split()
        )


def test_fine_tuning_on_ranks(estimate: Any) -> None:
    alone, said = estimate("job=finetuning", "job.length=128")
    assert "positions" not in said
    assert "LLMem's formula" in said
    shared, said = estimate("job=finetuning", "job.length=128", "layout.data=4", "layout.zero=2")
    of_cublas = 2 << 25
    assert totals(shared)["step", "device"] - of_cublas < 0.6 * (totals(alone)["step", "device"] - of_cublas)
    assert "DeepSpeed keeps weights, gradients and states in full precision beside them, which is not counted" in said
    rule = shared["others"]["DeepSpeed's rule for ZeRO-2, 2 P + 18 P / N, without activations"]
    assert rule == 2 * shared["num_parameters"] + 18 * shared["num_parameters"] // 4
    full, said = estimate("job=finetuning", "job.length=128", "layout.data=4", "layout.zero=3", "model.dtype=float32")
    assert "DeepSpeed" not in said + str(full["others"]), "all is in full precision"
    offloaded, _ = estimate("job=finetuning", "job.length=128", "layout.data=4", "layout.zero=2", "layout.offload=true")
    assert totals(offloaded)["step", "host"] > 0
    assert totals(offloaded)["step", "device"] < totals(shared)["step", "device"]


@pytest.mark.slow
def test_adapters(estimate: Any) -> None:
    """Seen to fail: with rules of thumb, which are for training all parameters."""
    options = ("job=finetuning", "job.length=128", "job.lora_rank=4")
    full, _ = estimate(*options)
    lora, said = estimate(*options, "job.method=lora", "job.optimizer=adamw_8bit")
    qlora, _ = estimate(*options, "job.method=qlora", "job.lora_targets=[q_proj,v_proj]")
    trained = 3 * 4 * (256 + 256 + 2 * (256 + 128) + 256 + 256 + 3 * (256 + 512))
    assert f"lora: {trained:,} parameters are trained, in adapters of rank 4 beside 21 linear layers" in said
    assert "8-bit AdamW as bitsandbytes has it" in said
    assert "LLMem" not in said
    assert lora["others"] == {}
    assert all(row["closed_form"] for row in lora["rows"])
    assert not any(row["closed_form"] for row in qlora["rows"])
    assert "lora_rank=4, lora_targets=['q_proj', 'v_proj']" in qlora["job"]
    assert "lora" not in full["job"]
    weights = [of["rows"][0]["parts"]["weights"] for of in (qlora, full, lora)]
    assert weights == sorted(weights)
    steps = [of["rows"][-1]["parts"] for of in (lora, full)]
    assert steps[0]["gradients"] == 4 * trained < steps[1]["gradients"]
    shared, _ = estimate(*options, "job.method=lora", "layout.data=4", "layout.zero=2")
    assert shared["rows"][-1]["parts"]["gradients"] == trained


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [
        ("job=inference", "job.weight_bits=4", "job.context=32"),
        ("job=finetuning", "job.method=qlora", "job.lora_rank=1", "job.length=32"),
    ],
)
def test_packed_weights_are_shared_as_they_are(estimate: Any, given: tuple[str, ...]) -> None:
    """Stages and layers by what they have packed, which the embedding is not. Seen to fail: with shares of the
    unpacked ones."""
    embedding = 1000 * 256 * 2

    def weights(*layout: str) -> int:
        found, _ = estimate(*given, *layout)
        size: int = found["rows"][0]["parts"]["weights"]
        return size

    alone = weights()
    layers = alone - 2 * embedding
    assert weights("layout.pipeline=3") == pytest.approx(embedding + layers / 3, rel=0.05)
    gathered = weights("layout.zero=3", "layout.data=2")
    assert gathered == pytest.approx(min(alone / 2 + 2 * max(embedding, layers / 3), alone), rel=0.05)


def test_on_a_cpu(estimate: Any) -> None:
    """Where scores of float32 are not written down, as CUDA does with heads that share keys. Seen to fail: with the
    closed form, which has no scores, for both."""
    given = ("job=inference", "job.context=64", "model.dtype=float32")
    found, said = estimate(*given, "device=cpu")
    assert {row["place"] for row in found["rows"]} == {"host"}
    assert "CUDA allocator" not in said
    assert all(row["closed_form"] for row in found["rows"])
    found, said = estimate(*given, "device=cuda")
    assert not any(row["closed_form"] for row in found["rows"])
    assert "There is no closed form with scores, which CUDA writes down in float32 where heads share keys." in said


def test_other_architectures(estimate: Any, folder: Path) -> None:
    """Without linear layers in its blocks."""
    GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=100).save_pretrained(folder)
    found, said = estimate("job=finetuning", "job.length=32", "layout.data=2", "layout.zero=3", "job.precision=true")
    assert "There is no closed form for GPT2LMHeadModel" in said
    assert not any(row["closed_form"] for row in found["rows"])


def test_calibration(estimate: Any) -> None:
    sizes = ("job.num_samples=16", "job.max_length=64", "job.batch_size=4")
    found, said = estimate(*sizes)
    assert {("batch", "device"), ("solve", "device"), ("write", "host")} <= totals(found).keys()
    assert "most of the device's memory" in said
    assert "CUDA allocator reserves" in said
    device, host = ({row["name"]: row["parts"] for row in found["rows"] if row["place"] == at} for at in PLACES)
    assert max(sum(parts.values()) for parts in device.values()) < found["reserved"]
    assert device["write"].get("workspace", 0) == 0, "tensors are packed, copied and read back in host memory"
    assert host["write"]["workspace"] > 0 < host["solve"]["workspace"]
    assert estimate(*sizes, "memory.device_activation_budget=1MiB")[0]["reserved"] is None, "of what waits there"
    with_form = {row["name"]: row for row in found["rows"] if row["place"] == "device" and row["closed_form"]}
    assert with_form.keys() == {"batch", "solve"}
    for row in with_form.values():  # seen to fail: without libraries, which are most of it
        assert row["closed_form"] == pytest.approx(row["total"], abs=row["parts"]["libraries"] / 8)
    ranks, _ = estimate(*sizes, "job.ranks=4")

    def waiting(of: dict[str, Any]) -> int:
        return max(row["parts"].get("waiting activations", 0) for row in of["rows"])

    assert waiting(ranks) < waiting(found) / 2, "each rank has one batch of the four"
    on_cpu, said = estimate(*sizes, "device=cpu", "model.load=disk", "memory.activation_budget=0")
    assert {row["place"] for row in on_cpu["rows"]} == {"host"}
    assert on_cpu["reserved"] is None
    assert "Weights are on disk before the run." in said
    assert ("verification", "host") in totals(found).keys() - totals(on_cpu).keys()
    unverified, _ = estimate(*sizes, "job.verify=false")
    assert ("verification", "host") not in totals(unverified)
    without, _ = estimate("recipe=w4a16_rtn")
    assert not any(row["parts"].get("statistics") for row in without["rows"])
    block, _ = estimate(*sizes, "job.schedule=block")
    assert not any(row["closed_form"] for row in (*without["rows"], *block["rows"]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["job=finetuning", "job.optimizer=adam"], "job.optimizer=adam is none of sgd, sgd_momentum, adamw"),
        (["job=finetuning", "+job.optimiser=sgd"], "FineTuningJob has no option optimiser; did you mean 'optimizer'?"),
        (["job.batch_size=0"], "job.batch_size=0 is no number of at least 1"),
        (["job.schedule=stage"], "job.schedule=stage is none of staged, recompute, block, basic, datafree"),
        (["device=tpu"], "device=tpu is not known; plan for cpu or cuda"),
        (["memory.device_budget=24 apples"], "'24 apples' is no size"),
        (["memory.device_budget=1KiB"], "memory.device_budget=1.00 KiB cannot hold this run, the smallest that can is"),
        (["job=finetuning", "job.method=dora"], "job.method=dora is none of full, lora, qlora"),
        (["job=finetuning", "job.method=lora", "job.lora_rank=0"], "job.lora_rank=0 is no number of at least 1"),
        (
            ["job=finetuning", "job.method=qlora", "job.lora_targets=[q_proj,query]"],
            "job.lora_targets: 'query' means no linear layer of LlamaForCausalLM, whose names end in: q_proj, k_proj",
        ),
        (["layout.data=2"], "layout is for inference and fine-tuning; a calibration has job.ranks"),
        (["job=inference", "layout.zero=5"], "ZeRO's stages are 0 to 3"),
        (["model.path=/nowhere"], "model.path=/nowhere: there is no such folder"),
        (["job=inference", "job.weight_bits=0"], "job.weight_bits=0 is neither null nor 1 to 8"),
        (["job=inference", "memory.device_budget=1GiB"], "memory.device_budget: of a calibration alone"),
        (["job=finetuning", "memory.activation_budget=1GiB"], "memory.activation_budget: of a calibration alone"),
        (["memory.host_budget=1e305TiB"], "host_budget: '1e305TiB' is no size"),
        (["job=finetuning", "layout.offload=true"], "layout.offload is of what ZeRO divides"),
        (["job=finetuning", "layout.data=two"], "numbers of ranks are at least 1"),
        (["model.dtype=bf16"], "model.dtype=bf16 is none of torch's; use auto, bfloat16"),
        (
            ["job=finetuning", "model.auto_class=AutoModel"],
            "LlamaModel takes cannot be foreseen, because it does not run",
        ),
        (
            ["job=inference", "layout.tensor=4"],
            "layout.tensor=4 does not divide the heads of LlamaForCausalLM, of queries and of keys: 2 or",
        ),
        (["job=inference", "layout.pipeline=4"], "layout.pipeline=4: there are 3 layers to share"),
        (["job=inference", "layout.pipeline=2"], "layout.pipeline=2: there are 3 layers to share; a divisor of that"),
        (["job=finetuning", "job.method=qlora", "layout.tensor=2"], "bitsandbytes has no tensor ranks of 4-bit layers"),
        (["job=finetuning", "job.optimizer=adamw_8bit", "layout.zero=2", "layout.offload=true"], "no 8-bit optimizer"),
        (["job=finetuning", "layout.pipeline=3", "layout.data=2", "layout.zero=3"], "pipelines are not combined with"),
        (["job=inference", "layout.zero=2", "layout.data=2"], "layout.zero=2 divides optimizer states and gradients"),
        (["job=finetuning", "layout.zero=2"], "layout.zero=2 divides among replicas, of which there is one"),
        (["job=finetuning", "job.method=lora", "job.lora_targets=q_proj"], "a list has their ends: '[q_proj]'"),
        (["data.num_samples=3"], "data is nothing that this command has; it has device, job, json, layout, memory, mo"),
        (["job=inference", "layout.offload=on", "layout.zero=3"], "which inference has none of"),
        (["job=inference", "job.weight_bits=true"], "job.weight_bits=True is neither null nor 1 to 8"),
        (["job.verify=nope"], "job.verify=nope is neither yes nor no"),
        (["memory.host_budget=."], "'.' is no size"),
        (["job.sequential_targets=['re:*x']"], "'re:*x' is no regular expression (nothing to repeat"),
        (["job=inference", "recipe=w3a16_gptq"], "recipe.modifiers: of a calibration alone. job.weight_bits=4 is of"),
        (["model.auto_class=AutoLlama"], "transformers has no class 'AutoLlama'"),
    ],
)
@pytest.mark.filterwarnings("ignore:.* is a LlamaForCausalLM, and taken for a LlamaModel")
def test_wrong_input(estimate: Any, options: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=re.escape(message)):
        estimate(*options)


def test_a_config_without_an_architecture(estimate: Any, folder: Path) -> None:
    (folder / "config.json").write_text('{"hidden_size": 4}')
    with pytest.raises(SystemExit, match=r"model.path=.* cannot be built: .*model_type"):
        estimate()
