"""Compares a converted model with the scores that its source gave (docs/checkpoints.md)."""
