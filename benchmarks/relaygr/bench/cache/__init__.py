"""What the prefix cache itself costs, and what its rules save. See `__main__`."""
