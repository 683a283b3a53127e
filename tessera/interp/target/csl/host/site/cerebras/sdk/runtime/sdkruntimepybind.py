"""The host runtime, on the simulator."""

from tessera.interp.target.csl.host.regions import (
    Color,
    Edge,
    Route,
    RoutingPosition,
    SdkLayout,
    SdkTarget,
    SimfabConfig,
    get_edge_routing,
    get_platform,
)
from tessera.interp.target.csl.host.runtime import SdkRuntime
from tessera.interp.target.csl.host.tensors import MemcpyDataType, MemcpyOrder

__all__ = [
    "Color",
    "Edge",
    "MemcpyDataType",
    "MemcpyOrder",
    "Route",
    "RoutingPosition",
    "SdkLayout",
    "SdkRuntime",
    "SdkTarget",
    "SimfabConfig",
    "get_edge_routing",
    "get_platform",
]
