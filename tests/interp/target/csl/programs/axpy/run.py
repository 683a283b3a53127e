#!/usr/bin/env cs_python
"""Copies x and y to the PEs, launches, copies y back, and compares."""

import argparse
import json

import numpy as np
from cerebras.sdk.runtime.sdkruntimepybind import MemcpyDataType, MemcpyOrder, SdkRuntime

parser = argparse.ArgumentParser()
parser.add_argument("--name")
name = parser.parse_args().name
with open(f"{name}/out.json") as file:
    params = json.load(file)["params"]
width, n = int(params["width"]), int(params["n"])
how = {"streaming": False, "order": MemcpyOrder.ROW_MAJOR, "data_type": MemcpyDataType.MEMCPY_32BIT}

runner = SdkRuntime(name)
x_id, y_id = runner.get_id("x"), runner.get_id("y")
runner.load()
runner.run()
x, y = (np.arange(width * n, dtype=np.float32) * k for k in (1, 3))
runner.memcpy_h2d(x_id, x, 0, 0, width, 1, n, nonblock=True, **how)
runner.memcpy_h2d(y_id, y, 0, 0, width, 1, n, nonblock=True, **how)
runner.launch("axpy", np.float32(2), nonblock=False)
result = np.zeros(width * n, np.float32)
runner.memcpy_d2h(result, y_id, 0, 0, width, 1, n, nonblock=False, **how)
runner.stop()
np.testing.assert_equal(result, 2 * x + y)
print("SUCCESS!")
