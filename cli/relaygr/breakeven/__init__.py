"""Measures a model on this machine, and tells for which lengths and return gaps the relay saves work."""
