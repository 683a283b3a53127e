"""ONNX tests need the extra `onnx`; without it they are not collected."""

import importlib.util
import os
import pickle
import warnings

import pytest

from tessera.core.io import lock_file

collect_ignore_glob = [] if importlib.util.find_spec("onnx_ir") else ["test_*.py"]


@pytest.fixture(scope="session")
def node_tests(tmp_path_factory):
    """ONNX's own node tests, by name. It takes 8 s to make them: the first worker does so for all."""
    folder = tmp_path_factory.getbasetemp()
    file = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "node_tests.pickle"
    with lock_file(file):
        if not file.exists():
            file.write_bytes(pickle.dumps(make_node_tests()))
    return pickle.loads(file.read_bytes())


def make_node_tests():
    """The cases by name; making their data overflows in places, of which NumPy warns."""
    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {case.name: case for case in load_model_tests(kind="node")}
