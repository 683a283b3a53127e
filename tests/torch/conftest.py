"""Tests with TorchDynamo, whose own cleanup of compiled frames may fail while memory is collected."""

import gc
import sys

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


@pytest.fixture(scope="module", autouse=True)
def _find_no_test_case():
    """PyTorch's samples look for its own test case in each frame of the stack, for longer than most of them take."""
    modules = [sys.modules.get(f"torch.testing._internal.{name}") for name in ("common_utils", "opinfo.core")]
    with pytest.MonkeyPatch.context() as patch:
        for module in filter(None, modules):
            patch.setattr(module, "extract_test_fn", lambda: None)
        yield
