"""Core: errors, types, symbolic shapes, effects, pytrees, devices, schedules and files."""
