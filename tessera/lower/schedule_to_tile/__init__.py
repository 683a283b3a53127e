"""tessera.lower.schedule_to_tile"""
