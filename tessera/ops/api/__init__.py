"""tessera.ops.api"""
