"""SIMT machine of the PTX emulator: lanes, registers, memory, barriers and the scheduler."""
