"""The two tiers of the prefix cache."""

from __future__ import annotations

import enum


class Tier(enum.StrEnum):
    """Where a page lies. On the CPU both are plain memory."""

    HBM = "hbm"
    DRAM = "dram"
