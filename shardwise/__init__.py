"""shardwise plans, proves and runs distributed training of transformer models on PyTorch."""

__version__ = "0.1.0"
