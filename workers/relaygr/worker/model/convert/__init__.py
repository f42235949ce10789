"""Converts checkpoints of other implementations (docs/checkpoints.md)."""
