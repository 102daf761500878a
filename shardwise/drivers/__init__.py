"""Drivers: how the devices of a run work together. One file each; `registry.py` lists them, `driver.py` says
what each has to answer."""
