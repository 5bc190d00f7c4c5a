"""Mixtures of experts as what they are made of: a Linear for every projection of every expert.

transformers keeps the experts of a layer as stacked parameters [E, O, I] (some transposed, some with gate and up
interleaved), and runs them in a loop over those that were hit, which no graph can hold. Within `unfold.unfolded`, the
module that owns them is replaced by `Experts`, whose Linears are views of the same memory: what is written to one is
written to the original. Their names are those of checkpoints (`mlp.experts.3.gate_proj`), so recipes, reports, exports
and sources of weights know nothing of stacks.

Tokens are sorted by expert, and pass two `GroupedLinear`s: single calls of the graph, of which each expert's Linears
read some rows (see `leaf.Grouped`). So an expert's statistics are those of the tokens that were routed to it, and the
down projections are solved on what the quantized gates and ups compute.

Alternatives not taken: sending every token to every expert (other tools; E / k times the work, and statistics of tokens
that the expert never sees), and keeping stacks in the recipe, which every later part would have to take apart.
"""

import inspect
import re
from collections.abc import Iterable
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from transformers.core_model_loading import WeightConverter

from lightning_compress.graph.compat import FakeTensor
from lightning_compress.graph.leaf import Grouped
from lightning_compress.graph.values import is_symbolic

_DESCRIBED = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "num_experts")
"""What transformers' decorator `use_experts_implementation` and its classes say about a stack."""


@final
class GroupedLinear(nn.Module):
    """The outputs [S, O] of S rows that are sorted by expert, each by its expert's Linears, one after the other.

    Owns nothing: the Linears are children of `Experts`.
    """

    experts: "Experts"

    def __init__(self, experts: "Experts", projections: tuple[str, ...], *, gathers: bool, interleaved: bool) -> None:
        super().__init__()
        self.__dict__.update(experts=experts)  # not a child
        self.projections = projections
        self.gathers = gathers
        self.interleaved = interleaved

    def grouped(self, name: str) -> Grouped:
        """What the graph has to know of a call of this module, which has the qualified name `name`."""
        owner = name.rpartition(".")[0]
        experts = range(self.experts.num_experts)
        members = tuple(tuple(f"{owner}.{number}.{each}" for each in self.projections) for number in experts)
        return Grouped(owner, members, self.gathers)

    def forward(self, x: Tensor, token: Tensor, counts: Tensor) -> Tensor:
        """Run all experts.

        Args:
            x: [S, I], sorted by expert; or, if this `gathers`, [T, I], of which the rows are picked.
            token: int64 [S], for each row the token that it is of.
            counts: int64 [E], how many rows each expert has.
        """
        first = self.experts.linears(0, self.projections)
        result = x.new_empty(token.shape[0], sum(linear.out_features for linear in first))
        if is_symbolic(result.shape[0]):
            return result
        start = 0
        for number, size in enumerate(sizes_of(counts, token.shape[0])):
            rows = slice(start, start + size)
            start += size
            if size:
                inputs = x[token[rows]] if self.gathers else x[rows]
                outputs = [linear(inputs) for linear in self.experts.linears(number, self.projections)]
                result[rows] = torch.stack(outputs, -1).flatten(-2) if self.interleaved else torch.cat(outputs, -1)
        return result


def sizes_of(counts: Tensor, num_rows: int) -> list[int]:
    """How many rows each expert has; of fake tensors, which cannot say, equal shares."""
    if isinstance(counts, FakeTensor):
        least, more = divmod(num_rows, len(counts))
        return [least + (number < more) for number in range(len(counts))]
    return cast(list[int], counts.tolist())


@final
class Experts(nn.Module):
    """In place of a module of stacked experts: the same function, of a Linear per projection and expert.

    Args:
        folded: the module whose parameters these are; it is no child, but lends its activation.
        names: of the projections in checkpoints: of gate (if there is one), up and down.
    """

    folded: Any  # what the decorator gives a class has no type
    signature: inspect.Signature

    def __init__(self, folded: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.__dict__.update(folded=folded, signature=inspect.signature(folded.forward))
        self.num_experts: int = self.folded.num_experts
        *up, down = self.names = names
        for number in range(self.num_experts):
            self.add_module(str(number), nn.Module())
        for key in self.stacks:
            for name, part in self.split(key, getattr(folded, key).detach()).items():
                path, _, local = name.rpartition(".")
                place, _, projection = path.partition(".")
                expert = self.get_submodule(place)
                if local == "weight":
                    linear = nn.Linear(part.shape[1], part.shape[0], bias=self.folded.has_bias, device="meta")
                    expert.add_module(projection, linear)
                expert.get_submodule(projection).register_parameter(local, nn.Parameter(part, requires_grad=False))
        interleaved = len(up) == 2 and not self.folded.is_concatenated
        self.add_module("up", GroupedLinear(self, tuple(up), gathers=True, interleaved=interleaved))
        self.add_module("down", GroupedLinear(self, (down,), gathers=False, interleaved=False))
        self.normalizes: bool = getattr(self.folded, "has_post_expert_norm", False)
        if self.normalizes:
            self.add_module("post_expert_norm", self.folded.post_expert_norm)

    @property
    def stacks(self) -> tuple[str, ...]:
        """Names of the stacked parameters in the module that this replaces, weights first."""
        weights = ("gate_up_proj" if self.folded.has_gate else "up_proj", "down_proj")
        return (*weights, *(f"{name}_bias" for name in weights if self.folded.has_bias))

    def split(self, key: str, stack: Tensor) -> dict[str, Tensor]:
        """Of a stack the Linears' parameters, as views, by their names here (`3.gate_proj.weight`)."""
        local = "bias" if key.endswith("_bias") else "weight"
        *up, down = self.names
        names = [down] if key.startswith("down_proj") else up
        found: dict[str, Tensor] = {}
        for number, part in enumerate(stack.unbind(0)):
            rows = part.t() if local == "weight" and self.folded.is_transposed else part
            size = len(rows) // len(names)
            for place, name in enumerate(names):
                if self.folded.is_concatenated:
                    found[f"{number}.{name}.{local}"] = rows[place * size : (place + 1) * size]
                else:
                    found[f"{number}.{name}.{local}"] = rows[place :: len(names)]
        return found

    def joined(self, key: str, tensor: Tensor) -> Tensor:
        """A parameter as checkpoints of ours have it: expert by expert, as it is here."""
        return tensor

    def linears(self, number: int, projections: tuple[str, ...]) -> list[nn.Linear]:
        """Some projections of an expert."""
        expert = self.get_submodule(str(number))
        return [cast(nn.Linear, getattr(expert, name)) for name in projections]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """As the module that this replaces: hidden states [T, H], chosen experts [T, k] and their weights [T, k]."""
        x, chosen, weights = self.signature.bind(*args, **kwargs).arguments.values()
        num_tokens, num_chosen = chosen.shape
        of_row, order = chosen.reshape(-1).sort(stable=True)
        counts = torch.zeros(self.num_experts, dtype=torch.int64, device=x.device)
        counts = counts.scatter_add(0, of_row, torch.ones_like(of_row))
        token = torch.div(order, num_chosen, rounding_mode="floor")
        hidden = self.get_submodule("up")(x, token, counts)
        hidden = self.folded._apply_gate(hidden) if self.folded.has_gate else self.folded.act_fn(hidden)
        y = self.get_submodule("down")(hidden, token, counts)
        if self.normalizes:
            y = self.get_submodule("post_expert_norm")(y)
        y = y[order.argsort()].view(num_tokens, num_chosen, y.shape[-1])
        summed: Tensor = (y * weights[..., None]).sum(1)
        return summed.to(x.dtype)


def is_stack(module: nn.Module) -> bool:
    """Whether a module owns experts as stacked parameters, described as transformers does."""
    if not all(hasattr(module, name) for name in _DESCRIBED):
        return False
    stacks = [getattr(module, name, None) for name in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")]
    return all(isinstance(stack, nn.Parameter) and stack.ndim == 3 for stack in stacks)


def projection_names(conversions: Iterable[object], path: str, has_gate: bool) -> tuple[str, ...]:
    """What checkpoints call the projections of the experts at `path` in a model: gate (if there is one), up, down.

    Those of families whose checkpoints hold stacks have the names that most others use.
    """
    usual = {"gate_up_proj": ("gate_proj", "up_proj"), "up_proj": ("up_proj",), "down_proj": ("down_proj",)}
    for conversion in (each for each in conversions if isinstance(each, WeightConverter)):
        for stack in usual:
            ends = [re.sub(r"\\(.)", r"\1", target).lstrip("^") for target in conversion.target_patterns]
            if len(ends) == 1 and f".{path}.{stack}".endswith(ends[0]) and "*" in conversion.source_patterns[0]:
                sources = [pattern.removesuffix(".weight") for pattern in conversion.source_patterns]
                usual[stack] = tuple(source.rpartition(".")[2] for source in sources)
    return (*usual["gate_up_proj" if has_gate else "up_proj"], *usual["down_proj"])
