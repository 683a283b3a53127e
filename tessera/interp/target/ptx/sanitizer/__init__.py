"""Sanitizer of the PTX emulator: race detection, initialisation and synchronisation checks."""
