"""Performance models: counts of a kernel, and predictions from them, for `ts.autotune`."""

from time import perf_counter as time

from tessera.tools.performance.cost_models import (
    Device,
    EmpiricalModel,
    PerformanceModel,
    PerformancePredictor,
    RooflineModel,
    device_of,
)
from tessera.tools.performance.warm_start import HybridModel, ModelError, WarmStart, measure_error

__all__ = [
    "Device",
    "EmpiricalModel",
    "HybridModel",
    "ModelError",
    "PerformanceModel",
    "PerformancePredictor",
    "RooflineModel",
    "WarmStart",
    "device_of",
    "measure_error",
    "time",
]
