"""Refusals: the ops for which this target has no row, with the reason that its error states."""

from tessera.codegen.coverage import MESH_OPS_REASON, list_mesh_ops

# Refusals: the ops for which this target has no row, with the reason that its error states.


REFUSED = dict.fromkeys(list_mesh_ops(), MESH_OPS_REASON)


# Emission tables: the rows of each op as LLVM IR.
