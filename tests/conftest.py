"""Fixtures of all tests."""

import numpy as np
import pytest


@pytest.fixture
def rng():
    """A generator with a fixed seed."""
    return np.random.default_rng(0)
