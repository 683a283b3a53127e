"""Deployment: models optimised ahead of time, with quantised or pruned weights, and programs without Python."""

from tessera.deploy.optimisation import OptimisationReport, OptimisedModel, optimize
from tessera.deploy.passes import (
    ConstantFolding,
    FusionSummary,
    MagnitudePruning,
    MemorySummary,
    StaticInt8,
    StructuredPruning,
    WeightFp8,
    WeightInt4,
    WeightInt8,
)
from tessera.deploy.standalone import StandaloneProgram, standalone
from tessera.deploy.web import WebExport, export_web
from tessera.deploy.webassembly import WebModule

__all__ = [
    "ConstantFolding",
    "FusionSummary",
    "MagnitudePruning",
    "MemorySummary",
    "OptimisationReport",
    "OptimisedModel",
    "StandaloneProgram",
    "StaticInt8",
    "StructuredPruning",
    "WebExport",
    "WebModule",
    "WeightFp8",
    "WeightInt4",
    "WeightInt8",
    "export_web",
    "optimize",
    "standalone",
]
