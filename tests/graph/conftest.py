"""Where recording is what is tested."""

import pytest


@pytest.fixture(autouse=True)
def recorded_once() -> None:
    """Every model is recorded, whatever was before (see `recordings.py`)."""
