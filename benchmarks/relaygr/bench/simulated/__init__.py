"""Holds the simulation against measured runs; `__main__` describes it."""
