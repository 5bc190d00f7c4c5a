"""Buffers that a forward writes to in eval mode too: counters, running means.

A batch must not see what the others wrote, or the result would depend on their order, and on how many ranks share them.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, final

from torch import Tensor, nn

from lightning_compress.graph.compat import pytree


@final
class KeptBuffers:
    """What some buffers hold, to be put back whenever a forward has written to them.

    One that has been replaced stays so: other attributes may say by what (a rotary embedding's longest length).

    Args:
        root: the model.
        names: of the buffers.
    """

    def __init__(self, root: nn.Module, names: Iterable[str]) -> None:
        self._kept: list[tuple[dict[str, Tensor | None], str, Tensor, Tensor]] = []
        for name in names:
            owner, _, key = name.rpartition(".")
            buffer = root.get_buffer(name)
            self._kept.append((root.get_submodule(owner)._buffers, key, buffer, buffer.detach().clone()))

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Within: a batch may write to them; all of them hold what they did after it, also where it fails."""
        try:
            yield
        finally:
            for buffers, key, buffer, before in self._kept:
                if buffers[key] is buffer:
                    buffer.copy_(before)

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Whatever the body writes to them is undone after it."""
        before = [buffers[key] for buffers, key, _, _ in self._kept]
        contents = [None if buffer is None else buffer.clone() for buffer in before]
        yield
        for (buffers, key, _, _), buffer, content in zip(self._kept, before, contents, strict=True):
            buffers[key] = buffer
            if buffer is not None and content is not None:
                buffer.copy_(content)

    def apart(self, values: dict[Any, object]) -> dict[Any, object]:
        """The values, with copies of those that are what such a buffer holds now."""
        if not self._kept:
            return values
        storages = {buffer.untyped_storage()._cdata for _, _, buffer, _ in self._kept}

        def copied(leaf: object) -> object:
            is_one = isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata in storages
            return leaf.clone() if isinstance(leaf, Tensor) and is_one else leaf

        return {key: pytree.tree_map(copied, value) for key, value in values.items()}
