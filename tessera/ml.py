"""`ts.ml`: what learns from measurements."""

from tessera.tools.performance.cost_models import PerformancePredictor

__all__ = ["PerformancePredictor"]
