"""Checkpoint folders: whether one may be written to, and reading one into a module that is not transformers'."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.utils.match import match_targets
from huggingface_hub import load_state_dict_from_file
from torch import Tensor, nn

from lightning_compress.calibration.solve import InputQuantizer, quantize_inputs
from lightning_compress.errors import CompressionError, OutputDirectoryError
from lightning_compress.export.packing import unpack

MARKER = "lightning_compress.json"
INCOMPLETE = "INCOMPLETE"


class SavesPretrained(Protocol):
    """A tokenizer or processor."""

    def save_pretrained(self, save_directory: str, /) -> object: ...


def check_output_dir(output_dir: Path) -> None:
    """Raise before the work if the result could not be written.

    Raises:
        OutputDirectoryError: it exists and holds something that is not an earlier output of ours.
    """
    if output_dir.is_file():
        raise OutputDirectoryError(f"output_dir {output_dir} is a file; give a folder.")
    ours = (output_dir / MARKER).is_file() or (output_dir / INCOMPLETE).is_file()
    entries = [path.name for path in output_dir.iterdir()] if output_dir.is_dir() else []
    if not ours and any(name != f".{INCOMPLETE}.partial" for name in entries):  # killed while making the first file
        raise OutputDirectoryError(
            f"output_dir {output_dir} exists and was not written by lightning_compress (no {MARKER} in it). "
            "Give another folder, or remove this one."
        )
    existing = next(parent for parent in (output_dir, *output_dir.absolute().parents) if parent.exists())
    if not _is_writable(existing):
        raise OutputDirectoryError(f"output_dir {output_dir} cannot be written to: no permission for {existing}.")


def load_compressed(module: nn.Module, directory: str | Path) -> nn.Module:
    """Load a compressed checkpoint into a module of the architecture it was made from; returns the module.

    Weights are dequantized into the module's parameters, in their dtype; quantized inputs are quantized by forward
    pre-hooks. For checkpoints of transformers models `from_pretrained` does the same without the original class at
    hand.

    Raises:
        CompressionError: the folder holds no compressed checkpoint, or its tensors do not fit the module.
    """
    directory = Path(directory)
    config_file = directory / "config.json"
    if not config_file.is_file() or "quantization_config" not in (content := json.loads(config_file.read_text())):
        raise CompressionError(
            f"{directory} holds no compressed checkpoint (no config.json with a quantization_config)."
        )
    known = {
        key: value for key, value in content["quantization_config"].items() if key in QuantizationConfig.model_fields
    }
    config = QuantizationConfig.model_validate(known)
    state = _read_state(directory)
    schemes = _schemes(module, config, state)
    for name, scheme in schemes.items():
        local = {
            key.rpartition(".")[2]: state.pop(key)
            for key in list(state)
            if key.rpartition(".")[0] == name and not key.endswith(".bias")
        }
        target = module.get_submodule(name)
        state[f"{name}.weight"] = unpack(local, scheme).to(target.get_parameter("weight").dtype)
        if scheme.input_activations is not None:
            ranges = local.get("input_scale"), local.get("input_zero_point")
            quantize_inputs(target, InputQuantizer(scheme.input_activations, *ranges))
    missing, unexpected = module.load_state_dict(state, strict=False)
    tensors = module.state_dict(keep_vars=True)
    loaded = {id(tensors[key]) for key in state if key in tensors}
    missing = [key for key in missing if id(tensors[key]) not in loaded]  # tied to what was loaded
    if missing or unexpected:
        raise CompressionError(
            f"{directory} does not fit {type(module).__name__}: missing {missing[:5]}, unexpected {unexpected[:5]}."
        )
    return module


def _read_state(directory: Path) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        state.update(load_state_dict_from_file(file))
    return state


def _schemes(
    module: nn.Module, config: QuantizationConfig, state: Mapping[str, Tensor]
) -> dict[str, QuantizationScheme]:
    """The scheme of each module that the checkpoint holds quantized, by the library's own matching rules."""
    by_target = {target: scheme for scheme in config.config_groups.values() for target in scheme.targets}
    quantized = {key.rpartition(".")[0] for key in state if key.endswith(".weight_scale")}
    found: dict[str, QuantizationScheme] = {}
    for name, child in module.named_modules():
        if name in quantized:
            found[name] = by_target[match_targets(name, child, list(by_target))[0]]
    return found


def checkpoint_names(root: nn.Module) -> dict[str, str]:
    """Module names as the original checkpoint has them, where transformers renames on loading."""
    conversions = getattr(root, "_weight_conversions", None)
    if not conversions:
        return {}
    inverted = [conversion.reverse_transform() for conversion in reversed(conversions)]
    names: dict[str, str] = {}
    for name, module in root.named_modules():
        if isinstance(module, nn.Linear):
            key = f"{name}.weight"
            for conversion in inverted:
                renamed, matched = conversion.rename_source_key(key)
                key = renamed if matched is not None else key
            names[name] = key.removesuffix(".weight")
    return names


def _is_writable(path: Path) -> bool:
    try:
        probe = path / ".lightning_compress_probe"
        probe.touch()
        probe.unlink()
    except OSError:
        return False
    return True
