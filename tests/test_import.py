"""Importing the package leaves the collector of reference cycles as it was, and what is the user's to it."""

import gc
import importlib
import sys

import pytest

import lightning_compress


def test_what_libraries_make_is_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")  # as for whoever imports this first
    mine: list[list[int]] = [[]]
    before = gc.get_freeze_count()
    importlib.reload(lightning_compress)
    assert gc.isenabled()
    assert gc.get_freeze_count() > before
    assert not any(each is mine for each in gc.get_objects())


def test_a_model_that_was_there_before_can_go() -> None:
    before = gc.get_freeze_count()
    importlib.reload(lightning_compress)
    assert gc.isenabled()
    assert gc.get_freeze_count() <= before


def test_a_collector_that_is_off_stays_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    gc.disable()
    try:
        importlib.reload(lightning_compress)
        assert not gc.isenabled()
    finally:
        gc.enable()
