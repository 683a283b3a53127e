"""Arguments of other types: a typed error of the caller's line, and none from within."""

import pytest

import tessera as ts
from tessera.core.io import as_path
from tessera.errors import ArgumentError, FileError

GRADS = ts.ones((2, 3))
CALLS = {
    "clip_grad_norm": lambda value: ts.clip_grad_norm(GRADS, value),
    "nas.Controller": ts.nas.Controller,
    "federated.secure_aggregate": ts.federated.secure_aggregate,
    "meta.generate": ts.meta.generate,
    "serving.ABTest": ts.serving.ABTest,
    "monitoring.DriftDetector.load": ts.monitoring.DriftDetector.load,
}


@pytest.mark.parametrize("name", CALLS)
def test_values_of_other_types(name):
    for value in (None, -1, float("nan"), {}):
        with pytest.raises(ArgumentError):
            CALLS[name](value)


@pytest.mark.parametrize("path", ["a\0b", "x" * 300])
def test_paths_that_no_file_has(path):
    with pytest.raises(FileError, match="cannot be a path"):
        as_path(path)
