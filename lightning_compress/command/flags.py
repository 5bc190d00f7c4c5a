"""Options that are yes or no. Hydra takes `no` and `off` for strings, and a string is true."""

from omegaconf import DictConfig, OmegaConf

from lightning_compress.errors import CompressionError

_FLAGS = frozenset({
    "trust_remote_code", "verify", "keep_activations", "packing", "gradient_checkpointing", "offload",
    "enable_checkpointing", "enable_model_summary", "enable_progress_bar", "dequantize",
})  # fmt: skip
_KNOWN = ("lightning_compress.", "lightning.")
"""What `_target_`s begin with whose arguments are known."""
_WORDS = {"yes": True, "on": True, "true": True, "1": True, "no": False, "off": False, "false": False, "0": False}


def with_flags(config: DictConfig) -> DictConfig:
    """A configuration whose flags, wherever they are but in arguments of the user's own code, are booleans; it is
    changed.

    Raises:
        CompressionError: another word.
    """
    _set_flags(config, "")
    return config


def _set_flags(node: DictConfig, path: str) -> None:
    if not str(node.get("_target_", _KNOWN[0])).startswith(_KNOWN):
        return
    for key in list(node):
        if OmegaConf.is_missing(node, key) or OmegaConf.is_interpolation(node, key):
            continue
        value, name = node[key], f"{path}{key}"
        if isinstance(value, DictConfig):
            _set_flags(value, f"{name}.")
        elif key in _FLAGS and value is not None:
            word = str(value).lower()
            if word not in _WORDS:
                raise CompressionError(f"{name}={value} is neither yes nor no: give {name}=true or {name}=false.")
            node[key] = _WORDS[word]
