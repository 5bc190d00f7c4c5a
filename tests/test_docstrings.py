"""The examples in docstrings are true."""

import doctest
from importlib import import_module
from pkgutil import walk_packages

import pytest

import lightning_compress

MODULES = [module.name for module in walk_packages(lightning_compress.__path__, "lightning_compress.")]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    assert doctest.testmod(import_module(name)).failed == 0


def test_there_are_some() -> None:
    """Else the test above looked in the wrong place."""
    assert doctest.testmod(import_module("lightning_compress.foresight.machine")).attempted > 1
