"""ONNX tests need the extra `onnx`; without it they are not collected."""

import importlib.util
import warnings

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("onnx_ir") else ["test_*.py"]


@pytest.fixture(scope="session")
def node_tests():
    """ONNX's own node tests, by name; making their data overflows in places, of which NumPy warns."""
    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {case.name: case for case in load_model_tests(kind="node")}
