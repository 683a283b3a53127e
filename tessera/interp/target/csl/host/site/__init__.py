"""Put on sys.path by `cs_python` alone: the simulator's stand-in for the vendor's host package."""
