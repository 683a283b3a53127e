"""Training: the loop with its metrics, checkpoints and stop conditions."""

__all__: list[str] = []
