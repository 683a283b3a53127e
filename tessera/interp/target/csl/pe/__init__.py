"""Processing element: its program, state, scheduler, DSD operations, and lockstep execution of equal tasks."""
