"""Answers from the cost model: the best layout and why, the fewest devices, the whole run.

Importing this package does not import torch.
"""
