"""What to try after an attempt at recording a model has failed, and what to tell about it.

In this order: a leaf's output shape is found in another way (see `record`); the module that failed, or the one around
a leaf for which that did not help, and all of its class, become single calls, unless that hid everything; a number of
rows that the model insists on becomes a constant; a method that was running becomes a single call (see `methods`); any
other size becomes a constant; the branches that values decide are those that all batches take, and numbers that
code takes for constants those that all have (see `decisions`); a function that was running becomes a single call,
before a size becomes a constant of which batches have other numbers.
"""

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from traceback import walk_tb
from typing import NamedTuple

from torch import nn

from lightning_compress.errors import UnsupportedModelError, UntraceableModelError
from lightning_compress.graph.compat import GuardOnDataDependentSymNode
from lightning_compress.graph.cut import Body, Cut
from lightning_compress.graph.decisions import DifferentBranchesError
from lightning_compress.graph.failures import ExchangeError, SetFromOutsideError, UnrecordedTensorError, at
from lightning_compress.graph.leaf import place_of
from lightning_compress.graph.methods import Method, running_functions, running_methods
from lightning_compress.graph.names import is_in
from lightning_compress.graph.observed import Observed, observe
from lightning_compress.graph.python_functions import line_of
from lightning_compress.graph.synthesize import Synthetic


class TraceFallbackWarning(UserWarning):
    """Targets are hidden inside modules that could only be recorded as single calls."""


AS_A_WHOLE = "run as a whole"
OF_ONE_SIZE = "recorded for batches of one size"
OF_ONE_PATH = "recorded with the branches that all batches take"


@dataclass(frozen=True)
class Fallback:
    """A module, a method of one, or a function, that could not be recorded as asked.

    Attributes:
        module: its name; "": of the model.
        reason: why it could not.
        hidden: targets inside it, which have no node of their own.
        how: what became of it instead.
    """

    module: str
    reason: str
    hidden: tuple[str, ...] = ()
    how: str = AS_A_WHOLE


@dataclass(frozen=True)
class Failure:
    """The innermost module that an attempt failed in ('' for code outside all modules), and why.

    Attributes:
        fixed: if the code took one size of the batch for a constant, the (tensor, dimension) pairs of that size.
        are_rows: that size is the number of rows.
        is_ragged: it is none, and batches have other numbers of it, so that a constant does not serve them.
    """

    module: str
    error: Exception
    fixed: frozenset[tuple[int, int]] = frozenset()
    are_rows: bool = False
    is_ragged: bool = False


Fixed = frozenset[tuple[int, int]]


class Way(NamedTuple):
    """How a model is recorded: which sizes are constants, and with which options of `synthesize`."""

    fixed: Fixed
    options: dict[str, bool]


def fall_back(
    root: nn.Module, cut: Cut, fixed: Fixed, failure: Failure, targets: frozenset[str]
) -> tuple[Cut, Fixed, list[Fallback]]:
    """The next thing to try after a failure, and what to tell about it.

    Raises:
        UntraceableModelError: nothing is left.
    """
    if isinstance(failure.error, ExchangeError):
        raise untraceable(root, failure)
    name, reason = failure.module, _first_line(failure.error)
    new = failure.fixed - fixed
    why = f"the graph serves batches of one size only, where the model demands it: {reason}"
    one_size = [Fallback(name, why, how=OF_ONE_SIZE)]
    if name in cut.methods:
        if new:
            return replace(cut, observed={}), fixed | new, one_size
        others = {other: method for other, method in cut.methods.items() if other != name}
        return replace(cut, methods=others, given_up=cut.given_up | {name}), fixed, []  # others are seen to run then
    if name in cut.leaves:
        body = cut.bodies.get(name, Body.SYMBOLIC)
        if body is not Body.OBSERVED and not isinstance(failure.error, UnrecordedTensorError):
            mates = [other for other, module in cut.leaves.items() if type(module) is type(cut.leaves[name])]
            told = [Fallback(name, f"its output shape is taken from a run of it: {reason}")]
            return replace(cut, bodies={**cut.bodies, **dict.fromkeys(mates, Body(body + 1))}), fixed, told
        name = max((each for each in cut.containers if not each or name.startswith(f"{each}.")), key=len)
    opaque = _opaque_instead(cut, name, targets)
    hidden = [each for each in cut.boundaries if is_in(each, opaque)]
    if opaque and (not hidden or len(hidden) < len(cut.boundaries)):
        return _with_opaque(cut, opaque), fixed, _told_of_opaque(opaque, reason, targets)
    running = [
        f"{name}.{method}" if name else method for method in running_methods(cut.containers[name], failure.error)
    ]
    left = [method for method in running if method not in cut.methods and method not in cut.given_up]
    if new and (failure.are_rows or not left) and not failure.is_ragged:
        return replace(cut, observed={}), fixed | new, one_size  # of other batches, of which nothing has been seen
    if left:
        return _with_method(root, cut, left[0]), fixed, [_told_of_method(left[0], reason)]
    if isinstance(failure.error, GuardOnDataDependentSymNode) and not cut.decides:
        told = [Fallback(name, f"it takes the branches that all batches take: {reason}", how=OF_ONE_PATH)]
        return replace(cut, decides=True), fixed, told
    functions = running_functions(cut.containers[name], failure.error)
    if left := [each for each in functions if each not in cut.methods and each not in cut.given_up]:
        return _with_method(root, cut, left[0]), fixed, [_told_of_method(left[0], reason)]
    if new:
        return replace(cut, observed={}), fixed | new, one_size
    if opaque:  # with all layers, which is the last resort
        return _with_opaque(cut, opaque), fixed, _told_of_opaque(opaque, reason, targets)
    raise untraceable(root, failure)


def _with_method(root: nn.Module, cut: Cut, method: str) -> Cut:
    """What is seen anew: calls within it are its own from now on."""
    return replace(cut, methods={**cut.methods, method: Method(*place_of(root, method))}, observed={})


def _told_of_method(name: str, reason: str) -> Fallback:
    return Fallback(name, f"recorded as a single call: {reason}")


def _with_opaque(cut: Cut, opaque: Mapping[str, nn.Module]) -> Cut:
    containers = {key: module for key, module in cut.containers.items() if key not in opaque}
    bodies = {**cut.bodies, **dict.fromkeys(opaque, Body.STATIC)}  # on symbolic sizes they just failed
    return replace(cut, leaves={**cut.leaves, **opaque}, containers=containers, bodies=bodies)


def _told_of_opaque(opaque: Collection[str], reason: str, targets: Collection[str]) -> list[Fallback]:
    return [Fallback(n, f"recorded as a single call: {reason}", _inside([n], targets)) for n in opaque]


def _inside(names: Sequence[str], targets: Collection[str]) -> tuple[str, ...]:
    return tuple(sorted(target for target in targets if is_in(target, names)))


def in_the_end(cut: Cut, fallbacks: Mapping[str, Fallback], targets: Collection[str]) -> tuple[Fallback, ...]:
    """What is left of what was told: without methods that were given up, with the targets that others run."""
    hidden = {name: _inside(method.calls, targets) for name, method in cut.methods.items()}
    left = [each for name, each in fallbacks.items() if name not in cut.given_up]
    return tuple(replace(each, hidden=hidden.get(each.module, each.hidden)) for each in left)


def _opaque_instead(cut: Cut, failed: str, targets: frozenset[str]) -> dict[str, nn.Module]:
    """Containers to record as single calls: the failed one and all of its class. Empty: that would hide everything."""
    module = cut.containers[failed]
    mates = {n: m for n, m in cut.containers.items() if n and type(m) is type(module)}
    in_layer = is_in(failed, cut.boundaries)
    left = {name for name in targets | cut.boundaries if not any(name.startswith(f"{n}.") for n in mates)}
    return mates if in_layer or (failed and left) else {}


def with_observations(
    root: nn.Module,
    cut: Cut,
    runs: Sequence[Callable[[], object]],
    told: Mapping[str, Fallback],
    *,
    can_run: bool,
) -> Cut:
    """Do the real runs that leaves with `Body.OBSERVED` wait for, if any does; `told` says why."""
    wanted = {n: cut.leaves[n] for n, body in cut.bodies.items() if body is Body.OBSERVED and n not in cut.observed}
    methods = {name: method for name, method in cut.methods.items() if name not in cut.observed}
    if not wanted and not methods:
        return cut
    names = [*wanted, *methods]
    if not can_run and any(parameter.is_meta for parameter in root.parameters()):
        name = min(names, key=lambda name: (name not in told, name))
        reason = told[name].reason if name in told else "it has to be run"
        raise untraceable(root, Failure(name, RuntimeError(f"{reason} (and the weights for a run are not here)")))
    try:
        found = [observe(root, cut.leaves, cut.methods, run) for run in runs]
    except Exception as error:
        raise untraceable(root, Failure(min(names), error)) from error
    returned = {name: [each[name].returned for each in found] for name in names}
    knowing = {name: _knowing(method, [each[name] for each in found]) for name, method in methods.items()}
    return replace(cut, observed={**cut.observed, **returned}, methods={**cut.methods, **knowing})


def _knowing(method: Method, seen: Sequence[Observed]) -> Method:
    return replace(
        method,
        calls=tuple(sorted(set().union(*(each.calls for each in seen)))),
        sets=tuple(set().union(*(each.sets for each in seen))),
        reads=tuple(sorted(set().union(*(each.reads for each in seen)))),
        writes=any(each.writes for each in seen),
    )


def untraceable(root: nn.Module, failure: Failure) -> UntraceableModelError:
    """The error that names what failed, and the remedy; what says both itself is taken as it is."""
    where = f"{failure.module or 'the model itself'} ({_owner(root, failure.module)})"
    checked = (
        "Check that the model runs on this batch, as `forward(batch)` or as a `calibration_step(self, batch)` of the "
        "LightningModule says; if it does, "
    )
    if isinstance(failure.error, GuardOnDataDependentSymNode):
        checked = "It branches on values that its layers compute, which are not known before the run: "
    elif isinstance(failure.error, DifferentBranchesError):
        checked = "Give batches that take the same one; or "
    elif isinstance(failure.error, SetFromOutsideError):
        checked = "Hand it over as an argument; or "
    remedy = "give the code a function or module of its own, which is then recorded as a single call"
    if failure.module:
        remedy = f"name a class of layers around this code in `sequential_targets`, or {remedy}"
    line = line_of(reversed([*walk_tb(failure.error.__traceback__)]))
    message = (
        f"cannot record {where} as a graph{at(line)}: {_first_line(failure.error).rstrip('.')}. {checked}{remedy}."
    )
    if isinstance(failure.error, UnsupportedModelError):
        message = str(failure.error)
    error = UntraceableModelError(message)
    error.__cause__ = failure.error
    return error


def warn(root: nn.Module, fallbacks: Collection[Fallback]) -> None:
    """One warning per class of modules that hide targets."""
    by_class: dict[str, list[Fallback]] = {}
    for fallback in fallbacks:
        if fallback.hidden:
            by_class.setdefault(_owner(root, fallback.module), []).append(fallback)
    for name, group in by_class.items():
        names = f"{group[0].module} and {len(group) - 1} more" if len(group) > 1 else group[0].module
        warnings.warn(f"{name} ({names}) is {group[0].reason}", TraceFallbackWarning, stacklevel=3)


def _owner(root: nn.Module, name: str) -> str:
    """The class of a module, or of the one whose method is named."""
    modules = dict(root.named_modules(remove_duplicate=False))
    return type(modules[name] if name in modules else place_of(root, name)[0]).__name__


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def otherwise(error: UntraceableModelError, tried: Synthetic, rows: Fixed, fixed: Fixed, ways: list[Way]) -> Way:
    """For another try where sizes do not fit together, which of them are constants, and how batches are made: because
    a model takes so many rows together, with a multiple of the true batch's rows; then with those constant that are no
    rows, as other batches show; then with all of them constant, unless batches have other numbers of them; because
    values tell of sizes (how long each row is), with the true batches.

    Args:
        error: of the last try.
        tried: what that recorded.
        rows, fixed: sizes of rows, and those that were constants.
        ways: that were taken so far; what is returned is added.

    Raises:
        UntraceableModelError: the given one, where it is about something else or no way is left.
    """
    kind, way = type(error.__cause__), Way(frozenset(), {"as_they_are": True})
    are_left = kind is RuntimeError and not rows <= fixed and (tried.has_ragged_rows or fixed == tried.staying)
    if (tried.is_true and not are_left) or kind not in (RuntimeError, IndexError, ValueError, AssertionError):
        raise error
    if kind is RuntimeError and tried.has_fewer_rows:
        way = Way(frozenset(), {"repeats_rows": True})
    elif kind is RuntimeError and not tried.staying <= fixed:
        way = Way(tried.staying, {"repeats_rows": True})
    elif kind is RuntimeError and not rows <= fixed and (tried.is_true or not tried.has_ragged_rows):
        way = Way(rows, {"repeats_rows": True, "as_they_are": False})
    if way in ways:
        raise error
    ways.append(way)
    return way
