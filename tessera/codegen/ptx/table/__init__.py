"""The emission table: rule(emitter, node) emits an op that is not pointwise and fills `emitter.values`."""

from tessera.ir.rules import Rules

emit_node = Rules("ptx emission")
