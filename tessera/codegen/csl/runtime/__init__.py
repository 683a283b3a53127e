"""tessera.codegen.csl.runtime"""
