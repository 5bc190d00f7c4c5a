"""For all tests: one thread and a fixed seed, so that every number is the same wherever this runs."""

import gc
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
import torch
import transformers
from matplotlib.figure import Figure
from recordings import remembering

from lightning_compress.calibration import evaluate, prepare
from lightning_compress.calibration.recording import trace_on
from lightning_compress.report import figures, html

_recorded = remembering(trace_on)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test that is `sampled(n)`, all cases but every nth are `slow`. The one that takes longest is begun first."""
    items.sort(key=lambda item: "multinode" not in item.path.parts)
    seen: Counter[object] = Counter()
    for item in items:
        marker = item.get_closest_marker("sampled")
        if marker is not None and isinstance(item, pytest.Function):
            if seen[item.function] % marker.args[0]:
                item.add_marker("slow")
            seen[item.function] += 1


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


@pytest.fixture(autouse=True)
def figures_drawn_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The figure of a report's page is drawn, but not laid out and printed as SVG, which takes longer than the run of
    a tiny model (0.3 s, in hundreds of tests). Where it is looked at this is overridden: in `report/` and
    `plugin/test_plan.py`."""

    def drawn(errors: Sequence[tuple[str, float]]) -> str:
        figures.error_figure.__wrapped__(Figure().add_subplot(), errors)  # type: ignore[attr-defined]
        return ""

    monkeypatch.setattr(html, "error_figure", drawn)


@pytest.fixture(autouse=True)
def recorded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """See `recordings.py`."""
    for module in (prepare, evaluate):
        monkeypatch.setattr(module, "trace_on", _recorded)
