"""The questions asked of the model of a step: the best layout and why, the fewest devices, the whole run. No
torch."""
