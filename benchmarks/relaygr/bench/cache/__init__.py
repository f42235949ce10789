"""Cost of the prefix cache. See `__main__`."""
