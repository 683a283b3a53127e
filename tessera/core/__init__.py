"""tessera.core"""
