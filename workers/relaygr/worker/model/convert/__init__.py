"""Converts checkpoints of other implementations (docs/convert.md)."""
