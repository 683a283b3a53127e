"""tessera.codegen.csl.passes"""
