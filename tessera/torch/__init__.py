"""PyTorch bridge: programs of PyTorch as functions of Tessera values (`torch.export`, ATen)."""
