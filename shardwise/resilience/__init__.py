"""Surviving faults: who trains together, who is alive, who is slow."""
