"""tessera.lower.graph_to_schedule"""
