"""Many runs of one model in one test."""

from typing import Any

import pytest

from lightning_compress.calibration import prepare
from lightning_compress.report import html


@pytest.fixture
def one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a test of one model on one data set: it is traced once, and no report has a figure; both take longer than
    the runs. That a second trace is the same is tested by runs that continue in other processes
    (`distributed/test_ranks.py`) and by the other tests here."""
    found: list[Any] = []

    def trace_on(*given: Any) -> Any:
        if not found:
            found.append(record(*given))
        return found[0]

    record = prepare.trace_on
    monkeypatch.setattr(prepare, "trace_on", trace_on)
    monkeypatch.setattr(html, "error_figure", lambda _: "")
