"""The table of what is emitted for an op that is not pointwise: rule(kernel, node) fills `kernel.values`."""

from tessera.op import Rules

visit = Rules("ptx emission")
