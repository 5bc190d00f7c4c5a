"""Run nodes of a traced graph on real tensors.

The executor is a loop over nodes, not a compiled module: which nodes run together, where their inputs come from and
when values die is decided by the caller, batch by batch. Constants of the graph follow the device of the run.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast
from zlib import crc32

import torch
from torch import Tensor, fx, nn

from lightning_compress.errors import CalibrationDataError
from lightning_compress.graph.expected import check_expected
from lightning_compress.graph.leaf import Leaf
from lightning_compress.graph.values import map_nested


def execute(
    nodes: Sequence[fx.Node],
    values: MutableMapping[Any, object],
    root: nn.Module,
    constants: Mapping[str, Tensor],
    device: torch.device,
    drop_after: Mapping[fx.Node, Sequence[fx.Node]],
    seed: int | None = None,
) -> None:
    """Run `nodes` in order; results go to `values`.

    Args:
        nodes: part of a graph in execution order; `get_attr` nodes are resolved where used, and may be left out.
        values: what the nodes read, and what they compute. Placeholders are put in by the caller. Sizes are plain ints.
        root: owner of the modules and tensors that the graph names.
        constants: `Traced.constants`.
        device: what device arguments recorded in the graph are replaced by.
        drop_after: after this node, these values are deleted.
        seed: every node draws what it and this say, whatever else ran before; None: nothing is drawn.

    Raises:
        CalibrationDataError: the batch has token ids or positions that an embedding has no row for.
    """

    def resolve(argument: object) -> object:
        if isinstance(argument, fx.Node):
            return attribute(argument, root, constants, device) if argument.op == "get_attr" else values[argument]
        return device if isinstance(argument, torch.device) else argument

    with torch.no_grad():
        for node in nodes:
            if node.op == "call_function":
                args, kwargs = _mapped(node.args, resolve), _mapped(node.kwargs, resolve)
                if seed is not None:
                    torch.manual_seed(crc32(f"{seed} {node.name}".encode()))
                function = node.target.function(root) if isinstance(node.target, Leaf) else node.target
                try:
                    if isinstance(function, nn.Embedding):
                        check_rows(function, [*args, *kwargs.values()])
                    values[node] = cast(Callable[..., object], function)(*args, **kwargs)
                except Exception as error:
                    if isinstance(error, IndexError) and isinstance(function, nn.Embedding):
                        raise CalibrationDataError(_out_of_range(_name(node), function)) from error
                    error.add_note(_where(node, function, [*args, *kwargs.values()]))
                    raise
                check_expected(
                    node, {read: values[read] for read in node.all_input_nodes if read in values}, values[node]
                )
            for dead in drop_after.get(node, ()):
                values.pop(dead, None)


def _mapped(argument: Any, resolve: Callable[[object], object]) -> Any:
    """An argument of a node with its leaves resolved; lists and dicts are the call's own: code may write to them, and
    not to fx's."""
    within = partial(_mapped, resolve=resolve)
    if isinstance(argument, slice):
        return slice(within(argument.start), within(argument.stop), within(argument.step))
    if isinstance(argument, list):
        return [*map(within, argument)]
    return map_nested(argument, within) if isinstance(argument, dict | tuple) else resolve(argument)


def _where(node: fx.Node, function: object, arguments: Sequence[object]) -> str:
    """What failed, and what it was given, for an error that says neither."""
    name = f"{_name(node)} ({type(function).__name__})" if isinstance(node.target, Leaf) else _name(node)
    given = [f"{list(each.shape)} {each.dtype}" for each in arguments if isinstance(each, Tensor)]
    return f"This was {name} on calibration data, given {', '.join(given) or 'no tensor'}."


def _name(node: fx.Node) -> str:
    """Of the module or operator that it calls."""
    return node.target.name if isinstance(node.target, Leaf) else str(node.target)


def check_rows(table: nn.Embedding, arguments: Sequence[object]) -> None:
    """As the call itself does on a CPU; on a GPU that would make every later operation fail."""
    for ids in arguments:
        if isinstance(ids, Tensor) and ids.device.type != "cpu" and ids.numel():
            least, most = int(ids.min()), int(ids.max())
            if least < 0 or most >= table.num_embeddings:
                raise IndexError(f"{least} to {most} of {table.num_embeddings} rows")


@contextmanager
def rows_checked(root: nn.Module) -> Iterator[None]:
    """Within: tables on a GPU look at what they are asked for before they are.

    Raises:
        IndexError: within, for rows that one has not.
    """

    def check(name: str, table: nn.Embedding, arguments: Sequence[object]) -> None:
        try:
            check_rows(table, arguments)
        except IndexError as error:
            raise IndexError(_out_of_range(name, table)) from error

    tables = [(name, module) for name, module in root.named_modules() if isinstance(module, nn.Embedding)]
    handles = [table.register_forward_pre_hook(partial(check, name)) for name, table in tables]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _out_of_range(name: str, table: nn.Embedding) -> str:
    return (
        f"{name} ({type(table).__name__}) has {table.num_embeddings} rows, and a batch asks for one behind them. For "
        "positions, give shorter samples (data.max_length); for tokens, the model's own tokenizer."
    )


def attribute(node: fx.Node, root: nn.Module, constants: Mapping[str, Tensor], device: torch.device) -> object:
    """The tensor that a `get_attr` node names: a constant of the trace, or a parameter or buffer of `root`."""
    name = str(node.target)
    if name in constants:
        tensor: object = constants[name]
    else:
        owner, _, key = name.rpartition(".")
        tensor = getattr(root.get_submodule(owner), key)
    return tensor.to(device) if isinstance(tensor, Tensor) and tensor.device != device else tensor
