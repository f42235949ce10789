"""Compares the simulation with measured runs; `__main__` describes it."""
