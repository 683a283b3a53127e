"""tessera.frontend"""
