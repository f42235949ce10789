"""`relaygr` with pre-infer workers that queue: they take every job of their partitions, however late."""

from __future__ import annotations

from relaygr.cli.__main__ import main
from relaygr.worker.preinfer import slots
from relaygr.worker.preinfer.decision import Verdict
from relaygr.worker.process import components

if __name__ == "__main__":
    setattr(slots, "decide", lambda *_, **__: Verdict.ACCEPT)  # noqa: B010 - neither module offers it as its own
    setattr(components, "has_share_groups", lambda _: False)  # noqa: B010
    main()
