"""Emission table of LLVM IR: the rows, and the refusals: ops without a row, with the reason that the error states."""

from tessera.codegen.coverage import MESH_OPS_REASON, list_mesh_ops

REFUSED = dict.fromkeys(list_mesh_ops(), MESH_OPS_REASON)
