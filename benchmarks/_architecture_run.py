"""One family from its configuration to the checkpoint that transformers has read back."""

import math
import re
import time
import traceback
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L
import torch
from _architecture_configs import tiny_config
from _architecture_inputs import Sample, randomize, sample, with_positions
from _architecture_kinds import LEAST_SHARE, MOST_HIDDEN, Family
from torch import Tensor, fx, nn
from transformers import PreTrainedModel

from lightning_compress import Compressor
from lightning_compress.calibration.batches import collect
from lightning_compress.calibration.prepare import calibrating, trace_on
from lightning_compress.calibration.target import find_target
from lightning_compress.errors import UntraceableModelError
from lightning_compress.graph.configs import without_cache
from lightning_compress.graph.execute import execute
from lightning_compress.graph.leaf import Leaf
from lightning_compress.graph.synthesize import flatten_batch
from lightning_compress.graph.targets import sequential_modules
from lightning_compress.graph.trace import Traced
from lightning_compress.graph.unfold import unfolded
from lightning_compress.recipe.load import load_recipe
from lightning_compress.recipe.resolve import Excluded, resolve
from lightning_compress.report.report import Report

GROUP = 16
REPRODUCED = 1e-5
"""Largest difference of outputs that counts as the same."""
_MEANT = ("ignored by the recipe", "name it in `targets`", "never calls it on")


@dataclass
class Result:
    """A row of the table. `failed`: the stage that did not work, or ''."""

    kind: str
    model_type: str
    class_name: str
    failed: str = ""
    reason: str = ""
    where: str = ""
    without_positions: str = ""
    round_trip: str = ""
    fed: str = ""
    num_targets: int = 0
    num_quantized: int = 0
    quantized_share: float = 0.0
    modules: list[str] = field(default_factory=list)
    num_leaves: int = 0
    num_subgraphs: int = 0
    num_stages: int = 0
    strategy: str = ""
    fallbacks: list[tuple[str, str, int]] = field(default_factory=list)
    trace_difference: float | None = None
    loaded_with: str = ""
    reload_difference: float | None = None
    different: list[str] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    total_s: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def try_family(family: Family) -> Result:
    """Do it all. Whatever goes wrong is the result."""
    result = Result(family.kind, family.model_type, family.class_name, failed="config")
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            model = build(family)
            result.failed = "inputs"
            fed = sample(model, family.kind)
            result.fed = fed.fed
            result.failed = "trace"
            try:
                _compress(model, fed, result)
            except UntraceableModelError as error:
                given = with_positions(model, fed)
                if given is None:
                    raise
                result.without_positions, result.fed = _first_line(error), given.fed
                _compress(model, given, result)
        except Exception as error:
            tell(result, error)
    result.warnings = sorted({" ".join(str(item.message).split())[:300] for item in caught if _is_ours(item)})
    result.total_s = round(time.perf_counter() - start, 2)
    return result


def _is_ours(item: warnings.WarningMessage) -> bool:
    return item.category.__module__.startswith("lightning_compress")


def build(family: Family) -> PreTrainedModel:
    torch.manual_seed(0)
    model_class = family.model_class()
    model: PreTrainedModel = model_class(tiny_config(family.kind, family.model_type, model_class)).float().eval()
    randomize(model)
    return model


def _compress(model: PreTrainedModel, fed: Sample, result: Result) -> None:
    with unfolded(model):
        linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    result.num_targets = len(linears)
    recipe = four_bits(linears, result)
    result.trace_difference = _trace_difference(model, fed, recipe, result)
    result.failed = "compress"
    trainer = L.Trainer(
        strategy="sequential_onload", accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    batches = list(fed.batches)
    with TemporaryDirectory() as folder:
        report = Compressor(trainer).compress(model, recipe=recipe, output_dir=Path(folder, "out"), dataloaders=batches)
    _read(report, model, result)
    if not result.loaded_with.startswith("transformers"):
        result.round_trip = _round_trip(model)


def _round_trip(model: PreTrainedModel) -> str:
    """Whether transformers reads what it saves itself of this model, as plain weights: '' or why not."""
    with TemporaryDirectory() as folder:
        try:
            model.save_pretrained(folder)
            loaded: Any = type(model).from_pretrained(folder, output_loading_info=True)
        except Exception as error:
            return _first_line(error)
    missing = sorted(loaded[1]["missing_keys"])
    return f"it does not find {', '.join(missing[:3])}" if missing else ""


def four_bits(linears: Collection[nn.Linear], result: Result) -> dict[str, Any]:
    """4 bits with GPTQ, in groups where these divide all widths, else per channel."""
    grouped = all(module.in_features % GROUP == 0 for module in linears)
    result.strategy = "group" if grouped else "channel"
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": result.strategy}
    weights |= {"group_size": GROUP} if grouped else {}
    return {"modifiers": [{"algorithm": "gptq", "scheme": {"weights": weights}}]}


def _trace_difference(model: PreTrainedModel, fed: Sample, recipe: dict[str, Any], result: Result) -> float | None:
    """The largest difference of the graph's outputs from the model's, relative to the largest output."""
    target = find_target(model)
    with calibrating(model), unfolded(model):
        names = tuple(resolve(load_recipe(recipe), model).assignments)
        boundaries = sequential_modules(model, None, names)
        data = collect(fed.batches)
        traced = trace_on(target, names, boundaries, data)
        leaves = {node.target.name for node in traced.graph.nodes if isinstance(node.target, Leaf)}
        result.num_leaves = len(leaves)
        result.num_stages = len(leaves & set(names))
        result.classes = sorted({type(model.get_submodule(n)).__name__ for n in boundaries})
        batch = data.batches[-1]
        torch.manual_seed(0)  # some models draw numbers in `forward`
        outputs = _outputs(traced, model, batch)
        torch.manual_seed(0)
        with without_cache(model):  # with one, FSMT leaves its causal mask out
            returned, structure = flatten_batch(target.step(batch))
        expected = dict(zip(structure.paths, returned, strict=True))
    differences = [
        float((outputs[path].double() - tensor.double()).abs().max() / tensor.double().abs().max().clamp(min=1e-12))
        for path, tensor in expected.items()
        if path in outputs and tensor.is_floating_point() and tensor.numel()
    ]
    return max(differences, default=None)


def _outputs(traced: Traced, model: nn.Module, batch: Any) -> dict[str, Tensor]:
    nodes = list(traced.graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    values: dict[fx.Node, object] = dict(zip(inputs, flatten_batch(batch)[0], strict=True))
    execute(nodes[:-1], values, model, traced.constants, torch.device("cpu"), {})
    found = {}
    for path, node in zip(traced.outputs, nodes[-1].args[0], strict=True):
        value = values.get(node)
        if isinstance(value, Tensor):
            found[path] = value
    return found


def _read(report: Report, model: nn.Module, result: Result) -> None:
    """What the report says."""
    result.failed = ""
    result.num_quantized = len(report.modules)
    result.num_subgraphs = len(report.subgraphs)
    result.quantized_share = _share(report)
    result.modules = list(dict.fromkeys(_kind_of(module.module) for module in report.modules))
    modules = dict(model.named_modules())
    result.fallbacks = [(_class_of(modules, each.module), each.reason, len(each.hidden)) for each in report.fallbacks]
    verification = report.verification
    assert verification is not None
    result.loaded_with = verification.loaded_with
    result.reload_difference = verification.max_abs_difference
    result.different = list(verification.different_modules)
    if not verification.loaded_with.startswith("transformers"):
        result.reason = verification.loaded_with  # of transformers' refusal; the checkpoint is right
    if verification.different_modules:
        result.failed, result.reason = "reload", f"different weights: {', '.join(verification.different_modules[:3])}"
    elif not verification.passed:
        result.failed, result.reason = "reload", verification.verdict
    elif result.trace_difference is not None and result.trace_difference > REPRODUCED:
        result.failed, result.reason = "trace", f"the graph's outputs differ by {result.trace_difference:.2g}"
    elif result.num_leaves < 2 or most_hidden(result.fallbacks) > MOST_HIDDEN * result.num_quantized:
        result.failed, result.reason = "trace", "most of the model is a single call"
    elif result.quantized_share < LEAST_SHARE:
        largest = max(_missed(report), key=lambda each: math.prod(each.shape))
        result.failed = "recipe"
        result.reason = f"{result.quantized_share:.0%} of its weights are quantized; left are such as {largest.module}"


def most_hidden(fallbacks: Sequence[tuple[str, str, int]]) -> int:
    """How many targets the single call holds that holds most."""
    return max((hidden for _, _, hidden in fallbacks), default=0)


def _missed(report: Report) -> list[Excluded]:
    """Matrices left alone that a user would expect to be quantized: nobody said so, they are no embedding and no
    convolution, and not in a tower."""
    towers = {_part(each.module) for each in report.excluded if "outside the language model" in each.reason}
    return [
        each
        for each in report.excluded
        if not any(word in each.reason for word in _MEANT)
        and not any(word in f"{each.module} {each.class_name}".lower() for word in ("embed", "conv", "position"))
        and _part(each.module) not in towers
    ]


def _kind_of(name: str) -> str:
    """The last part of a module's name that is no number (`attention.self.0` of a Sequential is `self.*`)."""
    *others, last = re.sub(r"\d+", "*", name).split(".")
    return last if last != "*" or not others else f"{others[-1]}.*"


def _part(name: str) -> str:
    return ".".join(name.split(".")[:2])


def _share(report: Report) -> float:
    quantized = sum(math.prod(module.shape) for module in report.modules)
    return quantized / (quantized + sum(math.prod(each.shape) for each in _missed(report)))


def _class_of(modules: Mapping[str, nn.Module], name: str) -> str:
    """Of a module, or of a method with its name."""
    if name in modules:
        return type(modules[name]).__name__
    owner, _, method = name.rpartition(".")
    return f"{type(modules[owner]).__name__}.{method}"


def tell(result: Result, error: Exception) -> None:
    frames = traceback.extract_tb(error.__traceback__)
    result.reason = _first_line(error)
    inner = [frame for frame in frames if "/models/" in frame.filename or "/lightning_compress/" in frame.filename]
    result.where = " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed((inner or list(frames))[-4:]))
    cause = error.__cause__
    if cause is not None:
        inner = list(traceback.extract_tb(cause.__traceback__))[-5:]
        chain = " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(inner))
        result.where = f"{type(cause).__name__} at {chain} | {result.where}"
    if result.failed in ("trace", "compress"):
        result.failed = _stage(error, [frame.filename for frame in frames])


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:600]


def _stage(error: Exception, files: list[str]) -> str:
    """By the part of the package that raised."""
    if isinstance(error, UntraceableModelError):
        return "trace"
    places = {
        "export/verify": "reload", "export/": "export", "recipe/": "recipe", "calibration/loop": "calibrate",
        "calibration/solve": "calibrate", "calibration/flow": "calibrate", "algorithms/": "calibrate",
    }  # fmt: skip
    return next((stage for part, stage in places.items() if any(part in file for file in files)), "trace")
