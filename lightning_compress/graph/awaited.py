"""Parameters that another tensor stands for, wherever code has kept them.

What takes the place of a parameter in its module (its values, where those are on disk; a fake tensor, while a model is
recorded) does so for code that asks the module while it is there. Others use a weight whose module they do not call
(`F.linear(x, self.embedding.weight)`, a method of a child) or have put it into a list. Given a tensor on the meta
device, some operations (products, convolutions) return uninitialised memory, without an error. Nobody can foresee all
such code, so meanwhile a parameter is of a class of its own, and an operation that is given one is run with what stands
for it. Nothing is paid by operations that are not.

Alternative not taken: a dispatch mode that looks at the tensors of every operation, which costs every operation.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

from torch import Tensor, nn

from lightning_compress.graph.compat import pytree
from lightning_compress.graph.restore import MODULE_DICTS
from lightning_compress.graph.trees import tensors_in

Substitute = Callable[[Tensor], Tensor]

_ABOUT_ITSELF = frozenset(
    (
        Tensor.__hash__,
        Tensor.data_ptr,
        Tensor.dim,
        Tensor.element_size,
        Tensor.is_floating_point,
        Tensor.numel,
        Tensor.size,
        *(
            getattr(Tensor, name).__get__
            for name in ("dtype", "is_meta", "itemsize", "nbytes", "ndim", "requires_grad", "shape")
        ),
    )
)
"""What a parameter can say of itself before its values are here. Its device is none of it: code makes tensors there."""


@final
class Awaited(nn.Parameter):
    """A parameter as `substituted` leaves it."""

    substitute: Substitute

    @classmethod
    def __torch_function__(cls, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ABOUT_ITSELF:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]

        def here(leaf: object) -> object:
            return leaf.substitute(leaf) if isinstance(leaf, Awaited) else leaf

        return func(*pytree.tree_map(here, args), **pytree.tree_map(here, kwargs))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A parameter with the values of what stands for this one."""
        return nn.Parameter(self.substitute(self).clone(), self.requires_grad)


@contextmanager
def substituted(parameters: Iterable[Tensor], substitute: Substitute) -> Iterator[None]:
    """Within: an operation that is given one of the parameters gets `substitute(parameter)` in its place.

    Args:
        parameters: those that others have taken in hand are left to them.
        substitute: gives what stands for one, of its shape and dtype.
    """
    taken = [parameter for parameter in parameters if type(parameter) is nn.Parameter]
    for parameter in taken:
        parameter.__class__ = Awaited
        parameter.substitute = substitute  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for parameter in taken:
            del parameter.substitute  # type: ignore[attr-defined]
            parameter.__class__ = nn.Parameter


def nobody_brings(root: nn.Module) -> list[str]:
    """Names of the tensors on the meta device that are no parameters: buffers, and what modules keep in attributes."""
    known = {id(parameter) for parameter in root.parameters()}
    found = []
    for path, module in root.named_modules():
        kept: Mapping[str, object] = {key: value for key, value in vars(module).items() if key not in MODULE_DICTS}
        for key, value in {**module._buffers, **kept}.items():
            if any(tensor.is_meta and id(tensor) not in known for tensor in tensors_in(value)):
                found.append(f"{path}.{key}" if path else key)
    return found
