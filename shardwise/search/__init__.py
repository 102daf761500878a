"""Answers from the model of a step: the best layout and why, the fewest devices, the whole run. Needs no
torch."""
