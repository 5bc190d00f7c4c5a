"""The models that the commands name: loaded, left on disk, or built from their configuration alone."""

import re
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import torch
import transformers
from omegaconf import DictConfig, OmegaConf
from torch import nn
from transformers import PreTrainedModel

from lightning_compress.calibration.resume import begun_run
from lightning_compress.distributed.collective import Collective
from lightning_compress.errors import CompressionError, RunWarning, listed
from lightning_compress.export.checkpoint import check_finished
from lightning_compress.export.processors import has_processor, load_processor
from lightning_compress.memory.dequantized import METHODS
from lightning_compress.memory.files import has_safetensors, stored_dtype, stored_tensors
from lightning_compress.memory.host import available_bytes
from lightning_compress.memory.placement import MemoryConfig, memory_config
from lightning_compress.memory.source import parameters_on_meta, tensor_loads

_AUTO_CLASSES = (
    *("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq"),
    *("AutoModelForMaskedLM", "AutoModelForImageClassification", "AutoModel"),
)
_CONFIGS = ("config.json", "adapter_config.json")


def memory_options(config: DictConfig) -> MemoryConfig:
    """The `memory` of a configuration.

    Raises:
        CompressionError: an unknown key, or a size that is none.
    """
    try:
        return memory_config(cast(dict[str, Any], OmegaConf.to_container(config, resolve=True)))
    except ValueError as error:
        raise CompressionError(f"memory: {error}") from error


def with_model_config(config: DictConfig, needs_weights: bool) -> DictConfig:
    """A command's configuration in which `model.config`, where that is given, is the `model.path`; it is changed.

    Args:
        config: composed for the command.
        needs_weights: the command reads them.

    Raises:
        CompressionError: the command needs weights; there is no such file; both are given.
    """
    given = OmegaConf.select(config, "model.config")
    if given is None:
        return config
    if needs_weights:
        raise CompressionError(
            f"model.config={given} has no weights, which this command reads; give the folder that has them, as "
            "model.path. estimate, plan and (without data) inspect need none."
        )
    if not OmegaConf.is_missing(config.model, "path"):
        raise CompressionError(f"model.config={given} and model.path={config.model.path}: give one of them.")
    if not Path(given).exists():
        raise CompressionError(f"model.config={given}: there is no such file.")
    config.model.path = given
    return config


def with_dequantized(config: DictConfig) -> DictConfig:
    """A command's configuration in which a model that is to be dequantized is read from disk, which is where that is
    done; it is changed.

    Raises:
        CompressionError: it is to be read in another way, or is not quantized by a method that can be read.
    """
    if config.get("model") is None or not _dequantizes(config.model):
        return config
    if config.model.load not in ("auto", "disk"):
        raise CompressionError(
            f"model.dequantize=true reads weights a layer at a time; leave model.load={config.model.load} out."
        )
    try:
        method = _method(config.model.path)
    except OSError:  # which is told where it is loaded
        return config
    if method not in METHODS:
        found = "not quantized" if method is None else f"quantized by {method}"
        raise CompressionError(
            f"model.dequantize=true is for models that were released in {' or '.join(METHODS)}, and "
            f"model.path={config.model.path} is {found}{'; leave it out' if method is None else ''}."
        )
    config.model.load = "disk"
    return config


def check_not_quantized(config: DictConfig) -> None:
    """
    Raises:
        CompressionError: the model that is to be compressed is quantized, and not to be dequantized. Said before it is
            loaded, which may take a package that is not there.
    """
    if not Path(config.path).is_dir() or _dequantizes(config):
        return
    try:
        method = _method(config.path)
    except OSError:  # which is told where it is loaded
        return
    if method is not None:
        remedy = "; or the floats that it stands for, by model.dequantize=true" if method in METHODS else ""
        raise CompressionError(
            f"model.path={config.path} is quantized already, by {method} (quantization_config in its config.json). "
            f"Compress the original{remedy}."
        )


def _method(path: str) -> str | None:
    """How a checkpoint is quantized, by its configuration; None: not at all."""
    said, _ = transformers.PretrainedConfig.get_config_dict(path)
    method: str | None = (said.get("quantization_config") or {}).get("quant_method")
    return method


def _dequantizes(config: DictConfig) -> bool:
    """Whether the model is to be; a model group of a user's own need not say so."""
    return bool(config.get("dequantize"))


def weights_place(config: DictConfig) -> Path:
    """Where weights that stay on disk are."""
    return Path(config.get("weights") or config.path)


def agreed_from_disk(
    config: DictConfig, trainer: pl.Trainer, ranks: Collective, output_dir: Path | None = None
) -> bool:
    """As `reads_from_disk` of any of the ranks, each of which would load a model: what is free differs from node to
    node. What `output_dir` holds is continued, or read back, as it began.

    Raises:
        CompressionError: an unknown `model.load`.
    """
    begun = None if output_dir is None else begun_run(output_dir)
    here = trainer.world_size // trainer.num_nodes
    reads = reads_from_disk(config, here, None if begun is None else begun.from_disk)
    return any(ranks.gather(reads, "comparing where weights are to be"))


def reads_from_disk(config: DictConfig, num_copies: int = 1, begun: bool | None = None) -> bool:
    """Whether weights are to be read during the run, as `model.load` says.

    Args:
        config: of the model.
        num_copies: that this machine would have to hold.
        begun: whether a run does that may be continued; left to what is free are others, and one whose weights no
            longer fit.

    Raises:
        CompressionError: an unknown `model.load`.
    """
    folder = Path(config.path)
    if config.load not in ("auto", "memory", "disk"):
        raise CompressionError(f"model.load={config.load} is not known; use auto, memory or disk.")
    if config.get("weights") is not None and config.load == "auto":
        return True
    if config.load != "auto" or not folder.is_dir():
        return bool(config.load == "disk")
    size, free = num_copies * sum(file.stat().st_size for file in folder.glob("*.safetensors")), available_bytes()
    return size > free // 2 if begun is None else begun or size > free


def load_model(config: DictConfig, from_disk: bool) -> tuple[nn.Module, Any]:
    """A transformers model, in host memory or (`from_disk`) with its parameters on the meta device, and its tokenizer,
    or its processor if it has one.

    Raises:
        CompressionError: no such folder or class, or transformers cannot read it, or not all of it.
    """
    auto_class, extra = _class_and_options(config)
    if Path(config.path).is_file():
        raise CompressionError(
            f"model.path={config.path} is a file: give the folder that has the model's config.json and safetensors."
        )
    if _dequantizes(config) and not from_disk:
        raise CompressionError("model.dequantize=true reads a layer at a time, and this command reads them all.")
    if config.get("weights") is not None and not from_disk:
        raise CompressionError(
            f"model.weights={config.weights} is read a layer at a time, with model.load=auto or disk, and only so."
        )
    try:
        processor = None if config.tokenizer is None else _processor(config)
        build = partial(_on_meta, auto_class, _dequantizes(config)) if from_disk else partial(_in_memory, auto_class)
        model = build(config.path, dtype=config.dtype, trust_remote_code=config.trust_remote_code, **extra)
    except CompressionError:
        raise
    except (OSError, ValueError, ImportError) as error:
        remedy = ""
        if isinstance(error, ImportError) and _method(config.path) in METHODS:
            remedy = " Without it, compress takes model.dequantize=true, and evaluate model.load=disk."
        raise CompressionError(f"model.path={config.path} cannot be loaded: {_told(error, config)}{remedy}") from error
    return model.eval(), processor


def find_processor(config: DictConfig) -> Any:
    """The folder's processor; None where there is none that can be loaded."""
    try:
        return _processor(config) if _has_processor(config) else None
    except CompressionError:
        return None


def _has_processor(config: DictConfig) -> bool:
    return config.tokenizer is not None and has_processor(config.tokenizer)


def _processor(config: DictConfig) -> Any:
    try:
        return load_processor(config.tokenizer, config.trust_remote_code)
    except (OSError, ValueError, ImportError, TypeError) as error:
        has_model = (Path(config.path) / "config.json").is_file()
        if not has_model:  # which is what is wrong
            raise
        raise CompressionError(
            f"model.tokenizer={config.tokenizer} cannot be loaded: {error} Name the folder that has it; or, for "
            "data=custom whose loader needs none, and recipes that need no data, give model.tokenizer=null."
        ) from error


def _in_memory(auto_class: Any, path: str, **options: Any) -> PreTrainedModel:
    """`from_pretrained`, but it may not make up parameters that the checkpoint lacks."""
    model: PreTrainedModel
    try:
        model, found = auto_class.from_pretrained(path, output_loading_info=True, **options)
    except (RuntimeError, AttributeError, KeyError, TypeError) as error:  # shapes that do not fit, weights it packs
        raise CompressionError(
            f"model.path={path}: transformers cannot load it ({type(error).__name__}: {error}). What "
            "lightning-compress has written, it reads with model.load=disk."
        ) from error
    if missing := sorted(found["missing_keys"]):
        remedy = (
            "model.load=disk reads what lightning-compress has written"
            if _method(path) is not None
            else "Name the class that was trained, with model.auto_class"
        )
        raise CompressionError(
            f"transformers does not find {len(missing)} parameters of {type(model).__name__} in model.path={path} and "
            f"would draw them at random: {listed(missing, 3)}. {remedy}."
        )
    return model


def load_config_only(config: DictConfig) -> PreTrainedModel:
    """A transformers model with its parameters on the meta device, from a folder that may hold no weights, or from a
    config.json.

    Raises:
        CompressionError: no such folder or class, or transformers cannot read it.
    """
    auto_class, extra = _class_and_options(config)
    try:
        dequantize = _dequantizes(config)
        model = _on_meta(auto_class, dequantize, config.path, config.dtype, config.trust_remote_code, **extra)
    except CompressionError:
        raise
    except Exception as error:  # the model's own code, of what its configuration says
        said = _told(error, config)
        if not isinstance(error, OSError | ValueError | AttributeError | ImportError):  # which say little by themselves
            said = f"{type(error).__name__}: {said}"
        raise CompressionError(f"model.path={config.path} cannot be built: {said}") from error
    if told := left_out(config, model):
        warnings.warn(told, RunWarning, stacklevel=2)
    model.eval()
    return model


def left_out(config: DictConfig, model: nn.Module) -> str | None:
    """What is to be told where the model is not all that its folder holds: another class than was trained, a part of
    the model alone, layers that transformers does not have."""
    folder, name = weights_place(config), type(model).__name__
    trained = [str(each) for each in getattr(model.config, "architectures", None) or ()]
    if folder.is_dir() and has_safetensors(folder):
        _, others = tensor_loads(model, stored_tensors(folder), folder)
        weights = [each for each in others if each.endswith(".weight")]  # not what a mask or a frequency was kept as
        if not weights:
            return None
        told = f"{folder} has {len(weights)} weights that {name} has no place for, so they are left out"
        told = f"{told}: {listed(weights, 3)}."
    elif trained and name not in trained:
        told = f"{config.path} is a {trained[0]}, and taken for a {name}, which may be a part of it."
    else:
        return None
    autos = ((auto, getattr(transformers, auto)._model_mapping) for auto in _AUTO_CLASSES)
    makes = [auto for auto, known in autos if _made_by(known, type(model.config)) & {*trained} - {name}]
    return f"{told} model.auto_class={makes[0]} makes a {trained[0]}." if makes else told


def _made_by(known: Mapping[type, Any], kind: type) -> set[str]:
    """The classes of an Auto class for a kind of configuration."""
    made = known.get(kind, ())
    return {each.__name__ for each in (made if isinstance(made, tuple) else (made,))}


def _told(error: Exception, config: DictConfig) -> str:
    """What went wrong; where it is the Auto class, which ones know the model."""
    if "Unrecognized configuration class" not in str(error):
        here = Path(config.path).exists()
        told = f"{error} (model.trust_remote_code=true)" if "trust_remote_code" in str(error) else str(error)
        return told if here else f"there is no such folder, and taken for a name on the Hub: {told}"
    kind = type(transformers.AutoConfig.from_pretrained(config.path, trust_remote_code=config.trust_remote_code))
    autos = ((name, getattr(transformers, name, None)) for name in _AUTO_CLASSES)
    known = [name for name, auto in autos if auto is not None and kind in auto._model_mapping]
    remedy = f"give model.auto_class={' or '.join(known)}" if known else "name another with model.auto_class"
    return f"{config.auto_class} does not know a {kind.__name__}; {remedy}."


def _class_and_options(config: DictConfig) -> tuple[Any, dict[str, str]]:
    """The Auto class that `config` names, and what it is called with beside the path and the dtype."""
    auto_class = getattr(transformers, config.auto_class, None)
    if auto_class is None:
        raise CompressionError(
            f"transformers has no class {config.auto_class!r}; use e.g. model.auto_class=AutoModelForCausalLM."
        )
    if not Path(config.path).exists() and (Path(config.path).is_absolute() or config.path.startswith(".")):
        raise CompressionError(f"model.path={config.path}: there is no such folder.")
    check_finished(Path(config.path))
    if (Path(config.path) / "adapter_config.json").is_file():
        raise CompressionError(
            f"model.path={config.path} holds peft's adapters. Merge them into their model first, in Python: "
            f"`AutoPeftModelForCausalLM.from_pretrained({config.path!r}).merge_and_unload().save_pretrained(folder)`; "
            "then give that folder."
        )
    if Path(config.path).is_dir() and not any((Path(config.path) / name).is_file() for name in _CONFIGS):
        found = ": it has GGUF files, which are not read" if any(Path(config.path).glob("*.gguf")) else ""
        raise CompressionError(f"model.path={config.path} has no config.json, so it is no model's folder{found}.")
    if config.dtype != "auto" and not isinstance(getattr(torch, str(config.dtype), None), torch.dtype):
        raise CompressionError(
            f"model.dtype={config.dtype} is none of torch's; use auto, bfloat16, float16 or float32."
        )
    extra = {} if config.attn_implementation is None else {"attn_implementation": config.attn_implementation}
    return auto_class, extra


def _on_meta(
    auto_class: Any, dequantize: bool, path: str, dtype: str, trust_remote_code: bool, **extra: Any
) -> PreTrainedModel:
    """`from_pretrained` but for the parameters' values."""
    config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    if dequantize:
        del config.quantization_config  # what is not there any more when its weights have been read
        config.dtype = config.dtype or torch.bfloat16  # that of what is stored is another
    wanted = config.dtype or stored_dtype(Path(path)) or torch.float32 if dtype == "auto" else getattr(torch, dtype)
    with parameters_on_meta():
        model: PreTrainedModel = auto_class.from_config(
            config, dtype=wanted, trust_remote_code=trust_remote_code, **extra
        )
    kept = "|".join(model._get_dtype_plan(wanted))  # in float32, whatever the others are
    for name, tensor in model.state_dict(keep_vars=True).items():
        if kept and tensor.is_floating_point() and re.search(kept.replace("*", ".*"), name):
            tensor.data = tensor.data.float()
    if (Path(path) / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(path)
    return model
