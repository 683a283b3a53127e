"""The emission table: `rule(ctx, node)` emits an op that is not elementwise and binds its results in `ctx.values`."""

from tessera.ir.rules import Rules

emission_rule = Rules("ptx emission")
