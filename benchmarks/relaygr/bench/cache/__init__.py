"""Cost of the prefix cache, and savings of its rules. See `__main__`."""
