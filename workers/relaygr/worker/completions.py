"""Device events as the cache waits for them: what is to happen once the device has passed a point in its work.

Belongs to one thread, the device's, which records the events and polls them; nothing blocks.
"""

from __future__ import annotations

from collections.abc import Callable

from relaygr.worker.device import Device, Event


class DeviceCompletion:
    """One event. `poll` calls back once it is complete."""

    def __init__(self, event: Event) -> None:
        self._event = event
        self._callbacks: list[Callable[[], None]] = []

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Calls `callback()` at once if the event is complete, else at the `poll` that finds it so."""
        if self._event.done():
            callback()
        else:
            self._callbacks.append(callback)

    def poll(self) -> bool:
        """Calls back if the event is complete; whether nobody waits any more."""
        if self._callbacks and self._event.done():
            callbacks, self._callbacks = self._callbacks, []
            for callback in callbacks:
                callback()
        return not self._callbacks


class DeviceCompletions:
    """Of one device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._waiting: list[DeviceCompletion] = []

    def after_work(self) -> DeviceCompletion:
        """Completes with all work that the calling thread has given to its current stream."""
        self.poll()
        completion = DeviceCompletion(self._device.current_stream().record())
        self._waiting.append(completion)
        return completion

    def poll(self) -> None:
        """Calls back what is complete by now."""
        self._waiting = [each for each in self._waiting if not each.poll()]
