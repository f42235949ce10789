"""What K,V of the weights before a refresh are worth. See `__main__`."""
