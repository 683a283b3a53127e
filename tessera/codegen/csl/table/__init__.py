"""tessera.codegen.csl.table"""
