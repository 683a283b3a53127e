"""Processing element: its compiled program, task scheduler, DSD operations, microthreads, lockstep execution."""
