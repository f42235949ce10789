"""One reload that comes layer by layer: a request may be ranked on its first layers while the last are on their way.

The copier `launch`es every layer and says when the first is `begun`; whoever reads the pages waits for each layer
just before it reads it (`wait`, the engine's `layer_ready` hook). All or nothing: once it has `failed`, what was
computed on it is to be discarded. No torch and no device here; any thread may call anything.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class ReloadFailedError(RuntimeError):
    """A layer of a prefix did not arrive. What was computed on the prefix is worth nothing."""


class LayerArrival:
    """The layers of one reload."""

    def __init__(self, num_layers: int) -> None:
        self._lock = threading.Lock()
        self._waits: list[Callable[[], None] | None] = [None] * num_layers
        self._begun = False
        self._failed = False
        self._callbacks: list[Callable[[], None]] = []

    @property
    def begun(self) -> bool:
        """Whether the first layer is there, and nothing is known to have failed."""
        return self._begun and not self._failed

    @property
    def failed(self) -> bool:
        return self._failed

    def add_begun_callback(self, callback: Callable[[], None]) -> None:
        """Calls `callback()` once the first layer is there, at once if it is; never if the reload fails before."""
        with self._lock:
            if self._failed:
                return
            if not self._begun:
                self._callbacks.append(callback)
                return
        callback()

    def launch(self, low: int, high: int, wait: Callable[[], None]) -> None:
        """For the copier: layers [low, high) are on their way; `wait()` makes the caller's stream wait for them."""
        with self._lock:
            self._waits[low:high] = [wait] * (high - low)

    def begin(self) -> None:
        """For the copier: the first layer is there, and all are on their way."""
        with self._lock:
            if self._failed or self._begun:
                return
            self._begun = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def fail(self) -> None:
        """It will not be complete."""
        with self._lock:
            self._failed = True
            self._callbacks = []

    def wait(self, layer: int) -> None:
        """The calling thread's stream goes on when the layer is there. Raises ReloadFailedError if it does not come."""
        wait = self._waits[layer]
        if self._failed or wait is None:
            raise ReloadFailedError(f"layer {layer} of a prefix was not reloaded")
        try:
            wait()
        except Exception as error:
            self.fail()
            raise ReloadFailedError(f"layer {layer} of a prefix was not reloaded: {error}") from error
