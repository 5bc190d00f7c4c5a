"""Mixtures of experts as what they are made of: a Linear for every projection of every expert.

transformers keeps the experts of a layer as stacked parameters [E, O, I] (some transposed, some with gate and up
interleaved), and runs them in a loop over those that were hit, which no graph can hold. Within `unfold.unfolded`, the
module that owns them is replaced by `Experts`, whose Linears are views of the same memory: what is written to one is
written to the original. Their names are those of checkpoints (`mlp.experts.3.gate_proj`), so recipes, reports, exports
and sources of weights know nothing of stacks.

Tokens are sorted by expert, and pass two `GroupedLinear`s: single calls of the graph, of which each expert's Linears
read some rows (see `leaf.Grouped`). So an expert's statistics are those of the tokens that were routed to it, and the
down projections are solved on what the quantized gates and ups compute.

Llama 4 calls its stack with every token for every expert, those zero that are not routed there. Zeros stay zeros, so
they are sorted behind all experts and left out.

Experts may be run in parts, one range of them after the other: each is a subgraph of its own then, so that the weights
and the statistics of one part are all that is there at a time. What parts add to a token is summed in float32 (with
Llama 4, where an expert's rows are its own, there is nothing to sum).

Alternatives not taken: sending every token to every expert (other tools; E / k times the work, and statistics of tokens
that the expert never sees), and keeping stacks in the recipe, which every later part would have to take apart.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from transformers.core_model_loading import WeightConverter
from transformers.quantizers.base import MODULES_TO_PATCH_FOR_QUANTIZATION
from transformers.utils.quantization_config import QuantizationMethod

from lightning_compress.errors import CompressionError
from lightning_compress.graph.compat import FakeTensor
from lightning_compress.graph.leaf import Grouped
from lightning_compress.graph.values import is_symbolic


@final
@dataclass(frozen=True)
class Stack:
    """How a module keeps its experts; all but `num_every` is what transformers' decorator `use_experts_implementation`
    says of a class.

    Attributes:
        num_experts: E.
        has_gate: there is a gate beside the up projection, in one parameter with it.
        has_bias: there are biases.
        is_transposed: matrices are [E, I, O].
        is_concatenated: gates come before ups; otherwise they take turns.
        num_every: it is called with [E T, H], every token for every expert, of which at most so many are not zeros, k;
            0: with the choice.
    """

    num_experts: int
    has_gate: bool = True
    has_bias: bool = False
    is_transposed: bool = False
    is_concatenated: bool = True
    num_every: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """Of the parameters, weights first."""
        weights = ("gate_up_proj" if self.has_gate else "up_proj", "down_proj")
        return (*weights, *(f"{name}_bias" for name in weights if self.has_bias))


@final
class GroupedLinear(nn.Module):
    """The outputs [S, O] of S rows that are sorted by expert, each by its expert's Linears, one after the other.

    Owns nothing: the Linears are children of `Experts`.

    Args:
        experts: whose these are.
        projections: which of each expert's Linears.
        part: which experts; rows of others are left as zeros.
        begins_part: it is the first of several that run this part.
        gathers: it reads [T, I], of which the rows are picked.
        interleaved: the outputs of two projections take turns.
        reads_hidden: it reads the model's hidden state.
    """

    experts: "Experts"

    def __init__(
        self,
        experts: "Experts",
        projections: tuple[str, ...],
        part: range,
        *,
        begins_part: bool = False,
        gathers: bool = False,
        interleaved: bool = False,
        reads_hidden: bool = False,
    ) -> None:
        super().__init__()
        self.__dict__.update(experts=experts)  # not a child
        self.projections = projections
        self.part = part
        self.begins_part = begins_part
        self.gathers = gathers
        self.interleaved = interleaved
        self.reads_hidden = reads_hidden

    def grouped(self, name: str) -> Grouped:
        """What the graph has to know of a call of this module, which has the qualified name `name`."""
        owner = name.rpartition(".")[0]
        experts = tuple(f"{owner}.{number}" for number in self.part)
        members = tuple(tuple(f"{expert}.{each}" for each in self.projections) for expert in experts)
        title = f"{owner}[{self.part.start}:{self.part.stop}]" if self.begins_part else None
        return Grouped(experts, self.part.start, members, self.gathers, self.reads_hidden, title)

    def forward(self, x: Tensor, token: Tensor, counts: Tensor) -> Tensor:
        """Run the experts.

        Args:
            x: [S, I], sorted by expert; or, if this `gathers`, [T, I], of which the rows are picked.
            token: int64 [S], for each row the token that it is of.
            counts: int64 [E], how many rows each expert has; there may be more behind those, which are nobody's.
        """
        first = self.experts.linears(self.part[0], self.projections)
        sizes = [linear.out_features for linear in first]
        result = x.new_empty(token.shape[0], sum(sizes))
        if is_symbolic(result.shape[0]):
            return result
        bounds = [0, *accumulate(sizes_of(counts, token.shape[0]))]
        if bounds[-1] > token.shape[0]:
            raise CompressionError(
                f"Experts are given {bounds[-1]} rows that are not zero, and at most {token.shape[0]} were expected: "
                "for each token no more than `num_experts_per_tok` of the model's configuration says."
            )
        places = result.unflatten(-1, (-1, len(sizes))).unbind(-1) if self.interleaved else result.split(sizes, -1)
        for number in self.part:
            rows = slice(*bounds[number : number + 2])
            if rows.start < rows.stop:
                inputs = x[token[rows]] if self.gathers else x[rows]
                for place, linear in zip(places, self.experts.linears(number, self.projections), strict=True):
                    place[rows] = linear(inputs)
        result[: bounds[self.part.start]] = 0
        result[bounds[self.part.stop] :] = 0
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
        stack: how they are kept.
        names: of the projections in checkpoints: of gate (if there is one), up and down.
        num_parts: in how many parts they are run; no more than there are experts.
        is_assembled: transformers makes the stacks of single experts when it reads a checkpoint.
    """

    folded: Any  # what the decorator gives a class has no type
    signature: inspect.Signature

    def __init__(
        self, folded: nn.Module, stack: Stack, names: tuple[str, ...], num_parts: int = 1, is_assembled: bool = True
    ) -> None:
        super().__init__()
        self.__dict__.update(folded=folded, signature=inspect.signature(folded.forward))
        self.is_assembled = is_assembled
        self.stack = stack
        self.names = names
        for number in range(stack.num_experts):
            self.add_module(str(number), nn.Module())
        for key in self.stacks:
            for name, part in self.split(key, getattr(folded, key).detach()).items():
                path, _, local = name.rpartition(".")
                place, _, projection = path.partition(".")
                expert = self.get_submodule(place)
                if local == "weight":
                    linear = nn.Linear(part.shape[1], part.shape[0], bias=stack.has_bias, device="meta")
                    expert.add_module(projection, linear)
                expert.get_submodule(projection).register_parameter(local, nn.Parameter(part, requires_grad=False))
        self.parts: list[range] = []
        self.divide(num_parts)
        self.normalizes: bool = getattr(self.folded, "has_post_expert_norm", False)
        if self.normalizes:
            self.add_module("post_expert_norm", self.folded.post_expert_norm)

    def divide(self, num_parts: int) -> None:
        """Run the experts in so many parts from now on."""
        for number in range(len(self.parts)):
            del self._modules[f"up_{number}"], self._modules[f"down_{number}"]
        self.parts = _parts(self.num_experts, num_parts)
        *up, down = self.names
        interleaved = self.stack.has_gate and not self.stack.is_concatenated
        how = {"gathers": not self.stack.num_every, "interleaved": interleaved, "begins_part": len(self.parts) > 1}
        for number, part in enumerate(self.parts):
            self.add_module(f"up_{number}", GroupedLinear(self, tuple(up), part, reads_hidden=True, **how))
            self.add_module(f"down_{number}", GroupedLinear(self, (down,), part))

    @property
    def num_experts(self) -> int:
        """E."""
        return self.stack.num_experts

    @property
    def stacks(self) -> tuple[str, ...]:
        """Names of the stacked parameters in the module that this replaces, weights first."""
        return self.stack.names

    def split(self, key: str, stack: Tensor, first: int = 0) -> dict[str, Tensor]:
        """Of a stack, or of a part of one from expert `first` on, the Linears' parameters, as views, by their names
        here (`3.gate_proj.weight`)."""
        local = "bias" if key.endswith("_bias") else "weight"
        *up, down = self.names
        names = [down] if key.startswith("down_proj") else up
        found: dict[str, Tensor] = {}
        for number, part in enumerate(stack.unbind(0), first):
            rows = part.t() if local == "weight" and self.stack.is_transposed else part
            size = len(rows) // len(names)
            for place, name in enumerate(names):
                if self.stack.is_concatenated:
                    found[f"{number}.{name}.{local}"] = rows[place * size : (place + 1) * size]
                else:
                    found[f"{number}.{name}.{local}"] = rows[place :: len(names)]
        return found

    def joined(self, key: str, tensor: Tensor) -> Tensor:
        """A parameter as checkpoints of ours have it: expert by expert, as it is here."""
        return tensor

    def linears(self, number: int, projections: tuple[str, ...]) -> list[nn.Linear]:
        """Some projections of an expert."""
        expert = cast(nn.Module, self._modules[str(number)])  # `get_submodule` takes long for so many calls
        return [cast(nn.Linear, expert._modules[name]) for name in projections]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """As the module that this replaces: hidden states [T, H], chosen experts [T, k] and their weights [T, k]; or
        hidden states [E T, H], expert by expert."""
        values = self.signature.bind(*args, **kwargs).arguments.values()
        return self._of_every_token(*values) if self.stack.num_every else self._of_chosen(*values)

    def _of_chosen(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        num_tokens, num_chosen = chosen.shape
        of_row, order = chosen.reshape(-1).sort(stable=True)
        token, back = torch.div(order, num_chosen, rounding_mode="trunc"), order.argsort()
        counts = self._counts(of_row)

        def of_tokens(number: int) -> Tensor:
            y = self._run(number, x, token, counts)[back].view(num_tokens, num_chosen, -1) * weights[..., None]
            summed: Tensor = y.sum(1, dtype=torch.promote_types(y.dtype, torch.float32))
            return summed

        return self._sum(of_tokens).to(x.dtype)

    def _of_every_token(self, x: Tensor) -> Tensor:
        num_tokens = x.view(self.num_experts, -1, x.shape[-1]).shape[1]
        row = torch.arange(x.shape[0], device=x.device)
        expert = torch.div(row, num_tokens, rounding_mode="floor")
        of_row, order = torch.where(x.ne(0).any(-1), expert, self.num_experts).sort(stable=True)
        counts, order = self._counts(of_row), order[: num_tokens * self.stack.num_every]
        rows, token = x[order], order % num_tokens
        y = self._sum(lambda number: self._run(number, rows, token, counts))
        return torch.zeros_like(x).index_copy(0, order, y)

    def _counts(self, of_row: Tensor) -> Tensor:
        """How many rows each expert has, int64 [E], of the experts that rows are for; E itself stands for none."""
        counts = torch.zeros(self.num_experts + 1, dtype=torch.int64, device=of_row.device)
        return counts.scatter_add(0, of_row, torch.ones_like(of_row))[:-1]

    def _sum(self, of_part: Callable[[int], Tensor]) -> Tensor:
        """Of what all parts make."""
        total = of_part(0)
        for number in range(1, len(self.parts)):
            total = total + of_part(number)
        return total

    def _run(self, number: int, x: Tensor, token: Tensor, counts: Tensor) -> Tensor:
        """What a part of the experts makes of rows [S, H] that are sorted by expert; zeros of those of others."""
        hidden = self.get_submodule(f"up_{number}")(x, token, counts)
        if not self.stack.has_gate:
            hidden = self.folded.act_fn(hidden)
        elif self.stack.num_every:
            gate, up = hidden.chunk(2, dim=-1)
            hidden = up * self.folded.act_fn(gate)
        else:
            hidden = self.folded._apply_gate(hidden)
        y: Tensor = self.get_submodule(f"down_{number}")(hidden, token, counts)
        if not self.normalizes:
            return y
        part, ends, row = self.parts[number], counts.cumsum(0), torch.arange(y.shape[0], device=y.device)
        others = (row < ends[part.start] - counts[part.start]) | (row >= ends[part.stop - 1])
        return cast(Tensor, self.get_submodule("post_expert_norm")(y)).masked_fill(others[:, None], 0)


def _parts(num_experts: int, number: int) -> list[range]:
    """
    >>> _parts(8, 3), _parts(2, 4)
    ([range(0, 2), range(2, 5), range(5, 8)], [range(0, 1), range(1, 2)])
    """
    number = min(number, num_experts)
    bounds = [num_experts * part // number for part in range(number + 1)]
    return [range(*each) for each in pairwise(bounds)]


def stack_of(module: nn.Module) -> Stack | None:
    """How a module keeps experts as stacked parameters: as transformers describes it, or takes them apart where it
    reads compressed files; None: it does not."""
    described = [field.name for field in fields(Stack) if field.name != "num_every"]
    if all(hasattr(module, name) for name in described):
        stack = Stack(**{name: getattr(module, name) for name in described})
    elif _is_taken_apart(module) and isinstance(number := getattr(module, "num_experts", None), int):
        stack = Stack(number, is_transposed=True, num_every=number)
    else:
        return None
    parameters = [getattr(module, name, None) for name in stack.names[:2]]
    return stack if all(isinstance(each, nn.Parameter) and each.ndim == 3 for each in parameters) else None


def _is_taken_apart(module: nn.Module) -> bool:
    known: Mapping[str, Any] = MODULES_TO_PATCH_FOR_QUANTIZATION
    entry = known.get(type(module).__name__, {})
    return QuantizationMethod.COMPRESSED_TENSORS in entry.get("quantization_methods", ())


def projection_names(conversions: Iterable[object], path: str, has_gate: bool) -> tuple[str, ...]:
    """What checkpoints call the projections of the experts at `path` in a model: gate (if there is one), up, down.

    Those of families whose checkpoints hold stacks have the names that most others use.
    """
    first, last = ("gate_up_proj" if has_gate else "up_proj"), "down_proj"
    usual = {"gate_up_proj": ("gate_proj", "up_proj"), "up_proj": ("up_proj",), "down_proj": ("down_proj",)}
    usual |= assembled(conversions, path, (first, last))
    return (*usual[first], *usual[last])


def assembled(conversions: Iterable[object], path: str, stacks: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Of the stacks at `path` in a model those that are made of single experts when a checkpoint is read, each with
    what checkpoints call the projections in it."""
    found: dict[str, tuple[str, ...]] = {}
    for conversion in (each for each in conversions if isinstance(each, WeightConverter)):
        for stack in stacks:
            ends = [re.sub(r"\\(.)", r"\1", target).lstrip("^") for target in conversion.target_patterns]
            if len(ends) == 1 and f".{path}.{stack}".endswith(ends[0]) and "*" in conversion.source_patterns[0]:
                sources = [pattern.removesuffix(".weight") for pattern in conversion.source_patterns]
                found[stack] = tuple(source.rpartition(".")[2] for source in sources)
    return found
