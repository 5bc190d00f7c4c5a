"""Fitting a table into budgets, and what is said when it does not fit."""

from dataclasses import replace

import pytest
import torch

from lightning_compress.errors import BudgetError
from lightning_compress.memory.budget import RESERVE, Budgets, Fit, fit
from lightning_compress.memory.needs import PIECES, Moment, Needs, Requests, as_one
from lightning_compress.memory.placement import MemoryConfig, placement
from lightning_compress.memory.transfer import PIECE

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
MOMENTS = (
    Moment("batch", "", waiting=500, fixed=10, in_flight=60, batch=100, statistics=40),
    Moment("solve", "layer.down", waiting=300, fixed=10, statistics=40, workspace=200),
)
TABLE = (Needs("embed", 20, MOMENTS[:1]), Needs("layer", 100, MOMENTS), Needs("last", 30, MOMENTS[:1]))
NO_LIMIT = Budgets(host=None, held=1000)
ALL = 1000 + 100 + 30 + 500 + 10 + 100 + 40
"""While `layer` runs a batch, with the weights of `last`."""


def test_everything_as_asked_where_there_is_room() -> None:
    found = fit(TABLE, CPU, NO_LIMIT)
    assert (found.depth, found.waiting.host, found.host_bytes, found.notes) == (1, None, ALL, ())
    assert found.device_bytes == ALL - 1000
    assert fit(TABLE, CPU, replace(NO_LIMIT, host=ALL)).waiting.host is None


def test_activations_go_to_the_file_before_the_depth_is_lowered() -> None:
    found = fit(TABLE, CPU, replace(NO_LIMIT, host=ALL - 100))
    assert found.depth == 1
    assert found.waiting.host == ALL - 100 - (1000 + 100 + 30 + 10 + 40 + 200), "what the solve leaves"
    assert found.host_bytes == ALL - 100
    assert "wait in memory, the rest in a file" in found.notes[0]


IN_HEAP = tuple(
    replace(row, moments=tuple(replace(m, heap_waiting=m.waiting, heap_batch=m.batch) for m in row.moments))
    for row in TABLE
)
"""Where a batch has 600 in the C heap, which keeps 360 free if it may."""


def test_what_the_heap_keeps_is_foreseen_as_far_as_there_is_room() -> None:
    """Seen to fail: with more than the budget foreseen, and with the room of a batch not left."""
    found = fit(IN_HEAP, CPU, NO_LIMIT)
    assert (found.host_bytes, found.most_resident) == (ALL + 360, ALL + 360), "nothing is given back before that"
    assert found.device_bytes == ALL - 1000, "tensors alone"
    found = fit(IN_HEAP, CPU, replace(NO_LIMIT, host=ALL + 400))
    assert (found.waiting.host, found.host_bytes, found.most_resident) == (None, ALL + 360, ALL + 200)
    found = fit(IN_HEAP, CPU, replace(NO_LIMIT, host=ALL + 300))
    assert (found.waiting.host, found.host_bytes, found.most_resident) == (None, ALL + 300, ALL + 100)
    lean = fit(IN_HEAP, CPU, replace(NO_LIMIT, is_lean=True))
    assert (lean.waiting.host, lean.host_bytes, lean.most_resident) == (None, ALL + 200, ALL)
    of_host = fit(IN_HEAP, CUDA, NO_LIMIT)
    assert of_host.host_bytes == of_host.most_resident == fit(TABLE, CUDA, NO_LIMIT).host_bytes


def test_activations_go_to_the_file_for_what_a_batch_takes_but_nothing_is_refused_for_it() -> None:
    """Seen to fail: with the tensors of a batch alone."""
    found = fit(IN_HEAP, CPU, replace(NO_LIMIT, host=ALL + 60))
    assert found.waiting.host == 500 - 140 - 60, "a batch takes 200 more than its tensors, and 60 to and from the file"
    assert (found.host_bytes, found.most_resident) == (ALL + 60, ALL - 100)
    least = 1000 + 100 + 10 + 60 + 100 + 40
    of_batches = tuple(replace(row, moments=row.moments[:1]) for row in IN_HEAP)
    assert fit(of_batches, CPU, replace(NO_LIMIT, host=least)).host_bytes == least
    with pytest.raises(BudgetError):
        fit(of_batches, CPU, replace(NO_LIMIT, host=least - 1))


def test_on_the_host_of_a_gpu_a_reserve_is_left_where_it_can_be() -> None:
    """Seen to fail: without it; and without what is on its way from and to the device."""
    taken = 100 + 510 + 60
    assert fit(TABLE, CUDA, replace(NO_LIMIT, host=1001 + int(taken * (1 + RESERVE)))).waiting.host is None
    found = fit(TABLE, CUDA, replace(NO_LIMIT, host=1000 + taken))
    assert found.waiting.host == int(taken / (1 + RESERVE)) - 100 - 10 - 60
    assert fit(TABLE[:1], CUDA, replace(NO_LIMIT, host=1000 + 20 + 10 + 60)).waiting.host == 0


def test_pinned_memory_comes_in_powers_of_two() -> None:
    """On the host of a GPU alone: what of a batch's values waits there may be those that fit worst, but for small
    ones. Seen to fail: with a budget that activations would have been over, and with the mean of all values."""
    table = tuple(replace(row, requests=Requests((row.weights,), ((128, 100), (60, 9)))) for row in TABLE)
    everything = 1000 + 100 + int(510 * 1.28) + int(60 * 1.28)
    found = fit(table, CUDA, NO_LIMIT)
    assert (found.host_bytes, found.device_bytes) == (everything, fit(TABLE, CUDA, NO_LIMIT).device_bytes)
    assert fit(table, CPU, NO_LIMIT) == fit(TABLE, CPU, NO_LIMIT)
    assert fit(table, CUDA, replace(NO_LIMIT, host=1001 + int((everything - 1000) * (1 + RESERVE)))).notes == ()
    for host in (1300, 1400, 1500):
        tight = fit(table, CUDA, replace(NO_LIMIT, host=host))
        assert host - 10 <= 1000 + (tight.host_bytes - 1000) * (1 + RESERVE) <= host
        assert tight.waiting.host is not None


def test_weights_come_through_a_few_pieces_of_pinned_memory() -> None:
    """Seen to fail: with those of a subgraph, and of the next one, pinned as a whole."""
    table = tuple(replace(row, weights=row.weights << 30) for row in TABLE)
    assert fit(table, CUDA, NO_LIMIT).host_bytes == 1000 + PIECES * PIECE + 510 + 60
    assert fit(table, CUDA, NO_LIMIT).device_bytes > 130 << 30


def test_what_goes_to_the_file_and_comes_from_it_counts() -> None:
    """Seen to fail: without `in_flight`."""
    assert fit(TABLE[:1], CPU, replace(NO_LIMIT, activations=0)).host_bytes == 1000 + 20 + 10 + 60 + 100 + 40


def test_depth_is_lowered_if_the_budget_demands_it_and_that_is_said() -> None:
    least = 1000 + 100 + 10 + 40 + 200
    found = fit(TABLE, CPU, replace(NO_LIMIT, host=least))
    assert (found.depth, found.waiting.host) == (0, 0)
    assert found.notes[0] == "prefetch_depth is 0, not 1, to stay within the budget."


def test_the_smallest_budget_that_is_named_holds() -> None:
    with pytest.raises(BudgetError) as caught:
        fit(TABLE, CPU, replace(NO_LIMIT, host=1200))
    message = str(caught.value)
    assert "memory.host_budget=1.17 KiB cannot hold this run, the smallest that can is 1350 bytes" in message
    assert "while layer: layer.down is solved: held by the process before the run" in message
    assert "Lower it by the algorithm rtn for, or `ignore` of, the widest modules; or sequential_targets" in message
    assert fit(TABLE, CPU, replace(NO_LIMIT, host=1350)).host_bytes == 1350
    with pytest.raises(BudgetError):
        fit(TABLE, CPU, replace(NO_LIMIT, host=1349))


@pytest.mark.parametrize(("device", "held"), [(CPU, 1000), (CUDA, 0)])
def test_the_smallest_budget_of_few_batches_is_named(device: torch.device, held: int) -> None:
    """More is on its way than waits, so all in memory takes less. Seen to fail: with all in the file."""
    few = Moment("batch", "", waiting=20, fixed=10, in_flight=60, batch=100, statistics=40)
    least = held + 100 + 20 + 10 + 100 + 40

    def fitted(size: int) -> Fit:
        of_host = replace(NO_LIMIT, host=size)
        of_device = replace(NO_LIMIT, device=size, device_activations=None)
        return fit((Needs("layer", 100, (few,)),), device, of_host if device == CPU else of_device)

    with pytest.raises(BudgetError, match=f"the smallest that can is {least} bytes"):
        fitted(least - 1)
    waiting = fitted(least).waiting
    assert (waiting.host if device == CPU else waiting.device) is None


def test_remedies_are_those_that_would_help() -> None:
    of_batch = (Needs("layer", 0, (Moment("batch", "", batch=500),)),)
    with pytest.raises(BudgetError, match=r"Lower it by a smaller batch size or shorter samples\. What the"):
        fit(of_batch, CPU, replace(NO_LIMIT, host=1100))
    with pytest.raises(BudgetError, match=r"; or weights that stay on disk"):
        fit(of_batch, CPU, replace(NO_LIMIT, host=1100, has_weights=True))
    given = replace(NO_LIMIT, host=1300, activations=400)
    with pytest.raises(BudgetError, match="a smaller activation_budget"):
        fit(TABLE, CPU, given)
    verification = (*of_batch, Needs("the checkpoint", 0, (Moment("verification", "", on_host=900),)))
    with pytest.raises(BudgetError, match=r"Lower it by verify=False, or weights that stay on disk"):
        fit(verification, CPU, replace(NO_LIMIT, host=1600))


def test_a_checkpoint_is_read_back_in_host_memory() -> None:
    """Seen to fail: two models in the device's memory, which never has them."""
    table = (*TABLE[:1], Needs("the checkpoint", 0, (Moment("verification", "", on_host=10**6),)))
    fitted = fit(table, CUDA, NO_LIMIT)
    assert fitted.device_bytes == fit(TABLE[:1], CUDA, NO_LIMIT).device_bytes
    assert fitted.host_bytes > 10**6


def test_what_is_packed_and_written_is_in_host_memory() -> None:
    """Of a device; on a CPU all is there. Seen to fail: with `on_host` counted for the device, and with the statistics
    that are on it counted for the host."""
    solve = replace(MOMENTS[1], on_host=5000)
    written = Moment("write", "", waiting=300, fixed=10, statistics=40, workspace=7, on_host=9000)
    table = (TABLE[0], replace(TABLE[1], moments=(MOMENTS[0], solve, written)), TABLE[2])
    found = fit(table, CUDA, NO_LIMIT)
    assert found.device_bytes == fit(TABLE, CUDA, NO_LIMIT).device_bytes
    assert found.host_bytes == 1000 + 100 + 310 + 9000
    assert fit(table, CPU, NO_LIMIT).device_bytes == 130 + 310 + 40 + 9007
    assert as_one([solve, replace(solve, workspace=300, on_host=1)])[0].on_host == 5000, "each place has its worst"


def test_on_a_device_each_place_has_its_own() -> None:
    """Seen to fail: with batches counted for the host."""
    found = fit(TABLE, CUDA, NO_LIMIT)
    assert found.device_bytes == 100 + 30 + 40 + 200, "weights, the next ones', statistics, the solve"
    assert found.host_bytes == 1000 + 100 + 510 + 60, "through pinned memory, what waits, and what is on its way"
    assert fit(TABLE, CUDA, replace(NO_LIMIT, libraries=7)).device_bytes == found.device_bytes + 7
    assert fit(TABLE[:1], CUDA, NO_LIMIT).device_bytes == 20 + 60 + 100 + 40, "the next batch is copied ahead"
    cached = fit(TABLE, CUDA, replace(NO_LIMIT, device_activations=None))
    assert cached.host_bytes == 1000 + 100
    assert cached.device_bytes == ALL - 1000
    split = fit(TABLE, CUDA, replace(NO_LIMIT, device=400, device_activations=None, host=10000, activations=150))
    assert (split.waiting.device, split.waiting.host) == (30, 150), "what the solve of `layer` leaves, then as asked"
    assert split.device_bytes == 400
    assert split.host_bytes == 1000 + 100 + 150 + 10 + 60
    with pytest.raises(BudgetError, match=r"memory\.device_budget=.* smallest that can is 340 bytes"):
        fit(TABLE, CUDA, replace(NO_LIMIT, device=339))


def test_weights_are_converted_in_host_memory() -> None:
    """Seen to fail: without it for the host of a GPU, and with it on the device."""
    converting = replace(NO_LIMIT, converting=70)
    for device in (CPU, CUDA):
        without, found = fit(TABLE, device, NO_LIMIT), fit(TABLE, device, converting)
        assert found.host_bytes == without.host_bytes + 70
        assert found.device_bytes == without.device_bytes
    with pytest.raises(BudgetError, match="as they are stored, while they are brought into another form 0"):
        fit(TABLE, CPU, replace(converting, host=1100))


def test_under_a_host_budget_activations_wait_in_the_file_until_a_run_is_fitted() -> None:
    """So that an evaluation before the run does not go over it. Seen to fail: with all that is foreseen in the file."""
    given = [MemoryConfig(), MemoryConfig(host_budget="1GiB"), MemoryConfig(host_budget="1GiB", activation_budget=5)]
    given.append(MemoryConfig(host_budget="foreseen"))
    assert [placement(memory, CPU, None).activation_budget for memory in given] == [None, 0, 5, None]
