"""What counts as coming back.

One impression uses its prefix several times within its lead time (published or found by the pre-infer job,
found by the ranking request). Counted one by one, every user who comes once would look like a returning one,
and no policy could tell a scan from a hot set. So uses within `VISIT_US` of the one that began a visit belong
to that visit. The idea is the correlated reference period of LRU-K (O'Neil, O'Neil, Weikum, SIGMOD 1993).
"""

from __future__ import annotations

from typing import Final

VISIT_US: Final = 1_000_000
"""Longer than a lead time, shorter than a user takes to ask again."""
