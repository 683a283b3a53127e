"""The host runtime, on the simulator."""

from tessera.interp.target.csl.host.runtime import MemcpyDataType, MemcpyOrder, SdkRuntime
from tessera.interp.target.csl.host.sdk_layout import (
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
