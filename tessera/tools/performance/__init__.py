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

__all__ = ["Device", "EmpiricalModel", "PerformanceModel", "PerformancePredictor", "RooflineModel", "device_of", "time"]
