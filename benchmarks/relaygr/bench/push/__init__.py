"""The cost of a new model revision, which makes every prefix cold at once: lateness before, during and after a push."""
