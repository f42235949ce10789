"""The generative ranker: configuration, weights, layers, and the engine that runs them (docs/model.md)."""
