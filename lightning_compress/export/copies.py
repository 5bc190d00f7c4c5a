"""Copies of a model that users' code has put things into which cannot be copied."""

import copy
from collections.abc import Mapping
from types import CellType, FunctionType
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from lightning_compress.graph.compat import pytree


def copy_of(root: nn.Module) -> nn.Module:
    """A model like it. What cannot be copied is shared, and so is what is left out of copies (a Trainer). Hooks that
    are functions around what was copied are around the copies."""
    modules, memo = list(root.modules()), with_shared(root, {})
    made = copy.deepcopy(root, memo)
    for module, copied in zip(modules, made.modules(), strict=True):
        left_out = (key for key, value in _copied_of(module).items() if value is None and vars(module)[key] is not None)
        vars(copied).update({key: vars(module)[key] for key in left_out})
        for hooks in (copied._forward_hooks, copied._forward_pre_hooks):
            hooks.update({key: _around(hook, memo) for key, hook in hooks.items()})
    return made


def with_shared(root: nn.Module, memo: Mapping[int, Any]) -> dict[int, Any]:
    """A memo of `copy.deepcopy` (what is in a copy in place of each object, by its id) for a copy of `root`, with what
    modules hold that cannot be copied (locks, kept activations, a profiler that hooks belong to) in its own place."""
    memo = dict(memo)
    whole = {id(module): module for module in root.modules()}  # hooks may belong to one, which is not copied for each
    states = [_copied_of(module) for module in root.modules()]
    attributes = [state[key] for state in states for key in state.keys() - {"_parameters", "_buffers", "_modules"}]
    leaves = {id(leaf): leaf for value in attributes for leaf in pytree.tree_leaves(value)}
    for leaf in leaves.values():
        if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
            memo[id(leaf)] = leaf.detach()
        elif not isinstance(leaf, Tensor | nn.Module):
            try:
                copy.deepcopy(leaf, memo | whole)
            except Exception:
                memo[id(leaf)] = leaf
    return memo


def _around(hook: Any, memo: Mapping[int, Any]) -> Any:
    """A hook; of a function (`lambda *_: self.seen.append(1)`), one that closes over what `memo` has of each object."""
    if not isinstance(hook, FunctionType) or hook.__closure__ is None or CellType() in hook.__closure__:  # one is empty
        return hook
    cells = tuple(CellType(memo.get(id(cell.cell_contents), cell.cell_contents)) for cell in hook.__closure__)
    made = FunctionType(hook.__code__, hook.__globals__, hook.__name__, hook.__defaults__, cells)
    made.__kwdefaults__ = hook.__kwdefaults__
    return made


def _copied_of(module: nn.Module) -> Mapping[str, Any]:
    """What `copy.deepcopy` copies of a module; one that is parametrized has that done, and refuses to be asked."""
    state = vars(module) if parametrize.is_parametrized(module) else module.__getstate__()
    return state if isinstance(state, dict) else {}
