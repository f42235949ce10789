"""The generative ranker: its configuration, weights, layers, and the engine that runs it in three phases."""
