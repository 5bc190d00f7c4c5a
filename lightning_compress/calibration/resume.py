"""The manifest of an output folder: what a run is made of, and which of its subgraphs are finished.

`manifest.jsonl` starts with a line of fingerprints; then comes one line per finished subgraph, in order, with the
shards that hold it and their checksums, and after them one per shard of what no subgraph holds. A line is appended, and
synced, after its shards are in place, so whenever a run dies, the lines that are there are true. What was being written
then is lost: at most one subgraph.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from transformers import PreTrainedConfig

from lightning_compress.calibration.records import ModuleRecord, SubgraphRecord
from lightning_compress.errors import OutputDirectoryError
from lightning_compress.graph.configs import configs_of
from lightning_compress.graph.leaf import Leaf
from lightning_compress.graph.synthesize import parts_of
from lightning_compress.graph.trace import Traced
from lightning_compress.memory.files import side_by_side

MANIFEST = "manifest.jsonl"
_SCHEMA = 4
_SOFTWARE = ("lightning-compress", "torch", "transformers", "compressed-tensors")
_SAMPLES = 256
_OPTIONS = (bool, int, float, str, type, torch.dtype, FunctionType, BuiltinFunctionType)
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_OVER = "resume='never' (on the command line calibration.resume=never)"


@dataclass(frozen=True)
class Shard:
    """A safetensors file that is in place.

    Attributes:
        name: of the file.
        sha256: of its content.
        nbytes: of its content.
        keys: names of the tensors in it.
    """

    name: str
    sha256: str
    nbytes: int
    keys: tuple[str, ...]


@dataclass(frozen=True)
class Finished:
    """One line of the manifest.

    Attributes:
        record: what happened in the subgraph; None for what no subgraph holds.
        shards: the files that hold its tensors.
    """

    record: SubgraphRecord | None
    shards: tuple[Shard, ...]

    @property
    def title(self) -> str:
        """What a user knows it by."""
        if self.record is not None:
            return f"subgraph {self.record.name}"
        return f"{', '.join([key for shard in self.shards for key in shard.keys][:2])}, ..."


def fingerprints(
    recipe: Mapping[str, object],
    layout: object,
    root: nn.Module,
    weights: str,
    batches: Iterable[Any],
    traced: Traced | None = None,
) -> dict[str, str]:
    """Digests of everything that decides the result; runs that agree in all of them can continue one another.

    Args:
        recipe: as plain containers.
        layout: schedule and subgraphs, as plain containers.
        root: the model; its configurations, and of every tensor in memory the sum of its bits, and up to 256 evenly
            spaced values.
        weights: the fingerprint of the others' source.
        batches: the calibration set, all of it.
        traced: what the model computes of them; None: nothing is run.
    """
    state = {**dict(root.named_buffers()), **root.state_dict()}  # also buffers that no checkpoint stores
    configs = [_settings(config) for config in configs_of(root)]
    graph = [] if traced is None else [_digest(each.encode()) for each in _operations(traced.graph)]
    inside = [] if traced is None else list(_inside_calls(root, traced.graph))
    constants = {} if traced is None else traced.constants
    return {
        "recipe": _digest(_json(recipe)),
        "layout": _digest(_json(layout)),
        "model": _digest(
            weights.encode(),
            _json([configs, graph, inside, () if traced is None else traced.presets]),
            *(part for name, value in {**state, **constants}.items() for part in _described(name, value, _SAMPLES)),
        ),
        "data": data_fingerprint(batches),
        "software": _digest(_json(versions())),
    }


def versions() -> dict[str, str]:
    """Of the packages that decide the result."""
    return {name: version(name) for name in _SOFTWARE}


def _settings(config: PreTrainedConfig) -> dict[str, object]:
    """What a configuration says of what is computed: not where it is from, or who has written it."""
    return {key: value for key, value in config.to_dict().items() if key[0] != "_" and key != "transformers_version"}


def _operations(graph: fx.Graph) -> Iterator[str]:
    """A line for every node; addresses of objects, which change from run to run, are left out."""
    for node in graph.nodes:
        target = getattr(node.target, "__qualname__", None) or str(node.target)
        yield re.sub(r"0x[0-9a-f]+", "", f"{node.name} {node.op} {target} {node.args} {node.kwargs}")


def _inside_calls(root: nn.Module, graph: fx.Graph) -> Iterator[str]:
    """What is run as one call, and so has no nodes: for every module in it a line of its class and plain attributes."""
    leaves = dict.fromkeys(node.target for node in graph.nodes if isinstance(node.target, Leaf))
    owners = [(leaf.name, leaf.owner) for leaf in leaves if leaf.owner is not None]
    for prefix, owner in owners:
        for name, module in root.get_submodule(owner).named_modules(prefix=prefix):
            options = {key: value for key, value in vars(module).items() if key[0] != "_" and _is_option(key, value)}
            yield _ADDRESS.sub("", f"{name} {type(module).__qualname__} {sorted(options.items())}")


def _is_option(name: str, value: object) -> bool:
    if isinstance(value, tuple):
        return all(_is_option(name, item) for item in value)
    if isinstance(value, partial):
        return _is_option(name, (value.func, *value.args, *value.keywords.values()))
    return name not in ("training", "name_or_path") and (value is None or isinstance(value, _OPTIONS))


def data_fingerprint(batches: Iterable[Any]) -> str:
    """The digest of a calibration set, all of it."""
    leaves = (part for batch in batches for part in parts_of(batch) if part.kind is None)
    return _digest(*(piece for leaf in leaves for piece in _described(leaf.path, leaf.value, None)))


def _described(name: str, value: object, num_samples: int | None) -> Iterable[bytes]:
    yield name.encode()
    if not isinstance(value, Tensor):
        yield _in_words(value)
        return
    yield f"{value.dtype} {list(value.shape)}".encode()
    if value.is_meta:
        return
    flat = value.detach().reshape(-1)
    step = max(flat.numel() // num_samples, 1) if num_samples else 1
    if step > 1:
        yield str(_bit_sum(flat)).encode()
    yield flat[::step].cpu().contiguous().view(torch.uint8).numpy().tobytes()


def _in_words(value: object) -> bytes:
    """The same in every process: `repr` has addresses, sets in any order, and of a large array the ends."""
    if isinstance(value, np.ndarray) and value.dtype != object:
        return f"{value.dtype} {value.shape} ".encode() + value.tobytes()
    return _ADDRESS.sub("", repr(sorted(map(repr, value)) if isinstance(value, set | frozenset) else value)).encode()


def _bit_sum(flat: Tensor) -> int:
    """Of a tensor's bytes, as integers of 64 bits, modulo 2⁶⁴: another one wherever one value differs."""
    data = flat.contiguous().view(torch.uint8)
    if data.storage_offset() % 8:
        data = data.clone()
    whole = len(data) // 8 * 8
    return int(data[:whole].view(torch.int64).sum()) + int(data[whole:].sum())


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, default=str).encode()


@dataclass(frozen=True)
class Begun:
    """What may be chosen by what is free as a run begins: one that continues it does the same.

    Attributes:
        expert_parts: in how many parts it has experts.
        from_disk: whether it reads its weights from files as it goes.
    """

    expert_parts: int = 1
    from_disk: bool = False


def start_manifest(folder: Path, given: Mapping[str, str], begun: Begun) -> None:
    """Write a new manifest that holds the fingerprints, and what the run has chosen."""
    header = {"schema": _SCHEMA, "fingerprints": dict(given), **asdict(begun)}
    replace_file(folder / MANIFEST, json.dumps(header).encode() + b"\n")


def begun_run(folder: Path) -> Begun | None:
    """What a manifest's run has chosen; None where no manifest says so."""
    path = folder / MANIFEST
    try:
        header = json.loads(path.read_bytes().partition(b"\n")[0])
        return Begun(int(header["expert_parts"]), bool(header["from_disk"]))
    except (OSError, ValueError, TypeError, KeyError):  # `read_manifest` says what is wrong with it
        return None


def append_finished(folder: Path, finished: Finished) -> None:
    """Append a line; it is on disk when this returns."""
    with (folder / MANIFEST).open("ab") as file:
        file.write(json.dumps(asdict(finished)).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def differences(folder: Path, given: Mapping[str, str]) -> list[str]:
    """In what the run that a folder's manifest is of differs from the one with the `given` fingerprints.

    Raises:
        OutputDirectoryError: the manifest cannot be read.
    """
    path = folder / MANIFEST
    try:
        header = json.loads(path.read_bytes().partition(b"\n")[0])
        known, schema = dict(header["fingerprints"]), header["schema"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise OutputDirectoryError(
            f"{path} cannot be read ({type(error).__name__}: {error}), so what was begun there cannot be continued. "
            f"Give another output_dir, or {_OVER} to start over there."
        ) from error
    differing = [name for name, digest in given.items() if known.get(name) != digest]
    return differing + ([] if schema == _SCHEMA else ["the manifest's schema"])


def read_manifest(folder: Path, given: Mapping[str, str], now: Begun) -> list[Finished]:
    """The lines of an interrupted run, if it was the same run as the one with the `given` fingerprints, `now` begun.

    A last line that was cut off or damaged is dropped from the file; so is everything from the first shard that is not
    there. Other shards are read and compared with their checksums.

    Raises:
        OutputDirectoryError: the manifest is of another run, or cannot be read, or a shard is not what it says.
    """
    path = folder / MANIFEST
    if differing := differences(folder, given):
        then, remedy = begun_run(folder), ""
        if "model" in differing and then is not None and then.from_disk != now.from_disk:
            where = "read from files as it went" if then.from_disk else "all in memory"
            load = "disk" if then.from_disk else "memory"
            remedy = f" Its weights were {where}, and are not now: with model.load={load} it may be the same."
        elif differing == ["model"]:
            remedy = " If it was interrupted in this process, some weights are quantized: load the model anew to go on."
        raise OutputDirectoryError(
            f"{folder} holds an unfinished run that differs in {' and '.join(differing)}, so it cannot be continued."
            f"{remedy} Give another output_dir, or {_OVER} to start over there."
        )
    lines = [line for line in path.read_bytes().split(b"\n")[:-1] if line]
    finished: list[Finished] = []
    for number, line in enumerate(lines[1:], 2):
        try:
            entry = _parsed(json.loads(line))
            if entry.record is not None and entry.record.index != len(finished):
                raise ValueError(f"it is of subgraph {entry.record.index}; did two runs write here at once?")
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines):
                break
            raise OutputDirectoryError(
                f"Line {number} of {path} is damaged ({type(error).__name__}: {error}). Delete it and all behind it, "
                f"and what they say is computed anew; or give {_OVER} to start over."
            ) from error
        if not all((folder / shard.name).is_file() for shard in entry.shards):
            break
        finished.append(entry)
    side_by_side(lambda of: _check_shard(folder, *of), [(entry, shard) for entry in finished for shard in entry.shards])
    whole = b"\n".join(lines[: 1 + len(finished)]) + b"\n"
    if path.read_bytes() != whole:
        replace_file(path, whole)
    return finished


def _parsed(line: dict[str, Any]) -> Finished:
    record = line["record"]
    if record is not None:
        modules = tuple(ModuleRecord(**_with_tuples(module)) for module in record["modules"])
        record = SubgraphRecord(**{**record, "modules": modules})
    return Finished(record, tuple(Shard(**_with_tuples(shard)) for shard in line["shards"]))


def _with_tuples(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}


def _check_shard(folder: Path, entry: Finished, shard: Shard) -> None:
    path = folder / shard.name
    if path.stat().st_size != shard.nbytes or file_digest(path) != shard.sha256:
        raise OutputDirectoryError(
            f"{path}, which holds {entry.title}, is not what was written (its size or checksum differs from the "
            "manifest). Restore it, or delete it: then it and everything behind it is computed anew."
        )


def written_shards(folder: Path) -> list[Shard]:
    """Those in a finished folder's manifest."""
    entries = [_parsed(json.loads(line)) for line in (folder / MANIFEST).read_text(encoding="utf-8").splitlines()[1:]]
    return [shard for entry in entries for shard in entry.shards]


def file_digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that it holds either what it held, or all of `content`."""
    with replacing(path) as partial:
        partial.write_bytes(content)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """What is written inside under the name that this gives is `path` afterwards, synced; on an error it is removed."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        sync(partial)
        partial.rename(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Let a file's content, or the names in a folder, survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
