"""The cost model: predicts the seconds, memory and traffic of a training step, for all candidates at once.

Importing this package does not import torch.
"""
