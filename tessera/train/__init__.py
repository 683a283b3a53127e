"""Training: the loop with its metrics, checkpoints and stop conditions, and batches of arrays."""

from tessera.train.data import Batches
from tessera.train.loop import Loop, evaluate
from tessera.train.metrics import CsvLog, TensorBoardLog

__all__ = ["Batches", "CsvLog", "Loop", "TensorBoardLog", "evaluate"]
