"""Reports as users get them."""

import pytest


@pytest.fixture(autouse=True)
def figures_drawn_only() -> None:
    """Not here: pages hold their figures."""
