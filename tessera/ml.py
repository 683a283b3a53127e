"""`ts.ml`: what learns from measurements."""

from tessera.performance.predictor import PerformancePredictor

__all__ = ["PerformancePredictor"]
