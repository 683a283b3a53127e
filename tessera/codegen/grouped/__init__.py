"""Groups of tiles as one program: each op is done for all tiles, the leading axis of every block that differs."""

from tessera.codegen.grouped import (  # they fill the table of rewrites
    control,
    exchange,
    mbarriers,
    memory,
    pauses,
    reports,
)
from tessera.codegen.grouped.rewrite import ungroup

assert control and exchange and mbarriers and memory and pauses and reports
__all__ = ["ungroup"]
