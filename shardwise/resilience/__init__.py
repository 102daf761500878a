"""Survive faults: who trains together, who is alive, and who is slow."""
