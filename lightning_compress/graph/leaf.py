"""A call of a module, of a method of one or of a function, as something an fx graph can hold."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NoReturn

from torch import Tensor, fx, nn


@dataclass(frozen=True)
class Grouped:
    """A call `(x, token, counts)` that lets experts run, each on rows of its own (see `experts.GroupedLinear`).

    Attributes:
        experts: names of the modules that hold them.
        first: the number of the first of them.
        members: for each of them the names of the Linears that read its rows.
        gathers: the rows are picked from x by `token`; otherwise they are those of x.
        reads_hidden: x is the model's hidden state, so that a channel means the same to all experts.
        begins: the name of the subgraph that begins with this call, if one does.
    """

    experts: tuple[str, ...]
    first: int
    members: tuple[tuple[str, ...], ...]
    gathers: bool
    reads_hidden: bool
    begins: str | None = None


@dataclass(frozen=True)
class Within:
    """What a call of a method or a function needs beside its arguments.

    Attributes:
        modules: names of the modules that it calls.
        tensors: names of the parameters and buffers that it may read itself.
    """

    modules: tuple[str, ...]
    tensors: tuple[str, ...]


@dataclass(frozen=True)
class Leaf:
    """Target of a `call_function` node: call the module (or the method, or `package.module:function`) of this qualified
    name with the node's arguments.

    The name is resolved by the executor, so a graph holds no reference to a module.

    Attributes:
        grouped: what it calls, if it is a call of experts.
        within: what it needs, if it is a call of a method or a function.
        lender: the module whose weight it multiplies with, if it owns none (see `recipe.forms.Rows`).
        hooked: somebody's forward pre-hooks may change what it is called with.

    >>> Leaf("model.layers.0.mlp").__name__
    'model_layers_0_mlp'
    """

    name: str
    grouped: Grouped | None = None
    within: Within | None = None
    lender: str | None = None
    hooked: bool = False

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the modules that own the weights."""
        if self.within is not None:
            return self.within.modules
        return (self.weights_of,) if self.grouped is None else self.grouped.experts

    @property
    def weights_of(self) -> str:
        """Name of the module that owns the weight of a call that is neither grouped nor of a method."""
        return self.lender or self.name

    def function(self, root: nn.Module) -> Callable[..., object]:
        """What it calls."""
        if self.within is None:
            return root.get_submodule(self.name)
        place, key = place_of(root, self.name)
        method: Callable[..., object] = getattr(place, key)
        return method

    @property
    def owner(self) -> str | None:
        """Name of the module whose code it is; None: a function's."""
        if self.within is None:
            return self.name
        return None if ":" in self.name else self.name.rpartition(".")[0]

    @property
    def __name__(self) -> str:
        """What fx names the node after."""
        return self.name.replace(".", "_") or "root"

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        """Never called: fx demands that a target is callable."""
        raise TypeError(f"{self} is run by graph.execute, which knows the model")


def place_of(root: nn.Module, name: str) -> tuple[nn.Module | ModuleType, str]:
    """Whose attribute the method or function of this name is, and what it is called there."""
    if ":" in name:
        place, _, key = name.partition(":")
        return sys.modules[place], key
    owner, _, key = name.rpartition(".")
    return root.get_submodule(owner), key


def leaf_input(node: fx.Node) -> fx.Node:
    """The value that a leaf is called with, positional (`linear(x)`), by keyword (`linear(input=x)`) or in a container
    (`layer((x, y))`): the first there is."""
    found = _inputs(node)
    if not found:
        raise ValueError(f"{node.name} is called without a tensor")
    return found[0]


def first_tensor(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int | str, Tensor]:
    """What a module that maps one tensor is called with, whatever its parameter is called, and where that is.

    Raises:
        ValueError: there is no tensor among the arguments.
    """
    given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for place, value in given:
        if isinstance(value, Tensor):
            return place, value
    raise ValueError("a module that is quantized was called without a tensor")


def takes_a_value(node: fx.Node) -> bool:
    """Whether it has a `leaf_input`: position embeddings may be called with sizes alone."""
    return bool(_inputs(node))


def _inputs(node: fx.Node) -> list[fx.Node]:
    outermost = [value for value in (*node.args, *node.kwargs.values()) if isinstance(value, fx.Node)]
    return outermost or list(node.all_input_nodes)
