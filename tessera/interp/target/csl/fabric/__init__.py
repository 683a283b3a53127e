"""Fabric: routers, routes, queues and wavelets between PEs."""
