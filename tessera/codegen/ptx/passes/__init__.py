"""Passes on a tile function before it is emitted: layouts, loops turned around, blocks fetched ahead."""
