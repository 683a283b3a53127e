"""Tests with TorchDynamo, whose own cleanup of compiled frames may fail while memory is collected."""

import gc

import pytest

IGNORED = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def pytest_collection_modifyitems(items):
    """Ignore exceptions that no test can catch, in the tests of this folder."""
    for item in items:
        if "tests/torch/" in item.path.as_posix():
            item.add_marker(IGNORED)


@pytest.fixture(scope="module", autouse=True)
def _collect_compiled_frames():
    """Collect the frames of a file here, not in a test of another folder; what is alive is not walked over again."""
    yield
    gc.collect()
    gc.freeze()
