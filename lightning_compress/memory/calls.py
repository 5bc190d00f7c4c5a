"""Weights that are on the device while their module runs: for code that calls the model in ways nobody can foresee.

A `validation_step` is the user's own Python, so it is not traced: hooks bring a layer's weights when it is called, and
begin to bring the next one's. Unlike evaluation by subgraphs (`calibration.evaluate`) this reads what does not stay
once for every batch.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
from torch import nn

from lightning_compress.memory.store import WeightStore


@contextmanager
def onloaded_when_called(
    root: nn.Module,
    layers: Sequence[str],
    store: WeightStore,
    *,
    stays: Collection[str] = (),
    prefetch_depth: int = 1,
) -> Iterator[None]:
    """Inside the context a module's own parameters and buffers, and a layer's with all its children, are on the device
    from the call of the module to its return; those of `root` itself always. Parameters whose module is not called, but
    which code uses, are read from disk when it does (see `WeightStore.lending`).

    Args:
        root: the model.
        layers: names of what is brought at a time.
        store: of the model's weights; closed at the end.
        stays: layers whose weights are left on the device after a call; of the others only their homes keep them.
        prefetch_depth: how many layers ahead to bring; behind the last comes the first.
    """
    own = {name: tuple(_own_tensors(name, module)) for name, module in root.named_modules()}

    def bring(name: str) -> AbstractContextManager[None]:
        if name not in layers:
            return store.onload((), own[name])
        return store.onload([name], stays=name in stays)

    def read_ahead(name: str) -> None:
        position = layers.index(name) + 1
        for following in [*layers[position:], *layers[: position - 1]][:prefetch_depth]:
            store.prefetch([following])

    with ExitStack() as stack:
        stack.callback(store.close)
        stack.enter_context(_casts_forgotten())
        stack.enter_context(store.lending())
        stack.enter_context(bring(""))
        for name, module in root.named_modules():
            if name and (name in layers or own[name]):
                stack.enter_context(_around_calls(module, bring, name, read_ahead if name in layers else None))
        yield


@contextmanager
def _casts_forgotten() -> Iterator[None]:
    """Within: autocast keeps no copies of weights, which would stay when these leave, and be used for what comes in
    their place."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextmanager
def _around_calls(
    module: nn.Module,
    bring: Callable[[str], AbstractContextManager[None]],
    name: str,
    read_ahead: Callable[[str], None] | None,
) -> Iterator[None]:
    """Inside: `bring(name)` is entered before each call of `module` and left after it."""
    entered: list[ExitStack] = []  # one per call that has not returned: a module may call itself

    def before(*_: object) -> None:
        stack = ExitStack()
        stack.enter_context(bring(name))
        entered.append(stack)
        if read_ahead is not None:
            read_ahead(name)

    def after(*_: object) -> None:
        if entered:  # not if `before` failed
            entered.pop().close()

    handles = [
        module.register_forward_pre_hook(before, prepend=True),
        module.register_forward_hook(after, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        while entered:
            entered.pop().close()


def _own_tensors(name: str, module: nn.Module) -> Iterator[str]:
    prefix = f"{name}." if name else ""
    for kind in (module.named_parameters, module.named_buffers):
        for key, _ in kind(recurse=False):
            yield f"{prefix}{key}"
