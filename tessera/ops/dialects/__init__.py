"""tessera.ops.dialects"""
