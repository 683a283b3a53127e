"""What is counted of a kernel, and what models predict from it: for `ts.autotune`."""

from time import perf_counter as time

from tessera.performance.devices import Device, device_of
from tessera.performance.models import EmpiricalModel, PerformanceModel, RooflineModel
from tessera.performance.predictor import PerformancePredictor

__all__ = ["Device", "EmpiricalModel", "PerformanceModel", "PerformancePredictor", "RooflineModel", "device_of", "time"]
