"""For all tests: one thread and a fixed seed, so that every number is the same wherever this runs."""

import gc
from collections.abc import Iterator

import pytest
import torch
import transformers


@pytest.fixture(scope="session", autouse=True)
def quiet() -> None:
    """No progress bars of transformers between the dots."""
    transformers.logging.disable_progress_bar()


@pytest.fixture(scope="session", autouse=True)
def imported() -> None:
    """What was imported stays: the garbage collector need not look at it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def reproducible() -> Iterator[None]:
    """Same seed and threads for each test, whatever ran before."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
