"""Bounds of the messages that settings need too. It imports nothing."""

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
MAX_BEHAVIOURS = 131_072
MAX_SUFFIX_BEHAVIOURS = 4_096
MAX_CANDIDATES = 16_384
MAX_FEATURES = 64
MAX_BUDGET_MS = 600_000
MAX_SCENARIOS = 64
DEFAULT_SCENARIO = "default"
"""The scenario of messages that name none."""
