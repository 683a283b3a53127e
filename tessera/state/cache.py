"""Cache policies: the decorators `ts.cache.eviction_policy` and `ts.cache.write_through`."""

from tessera.state.caches import eviction_policy, write_through

__all__ = ["eviction_policy", "write_through"]
