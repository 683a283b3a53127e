"""Debug mode of the Tile interpreter: every access checked, races, meetings, lints."""
