"""The runtime of PTX artifacts: GPU programs, the emulator, driver calls, launch buffers."""
