"""Runs librdkafka's admin requests in a child process, for a process that must not end.

librdkafka can abort its process after an admin request that timed out while the broker was away (librdkafka issue
4605). A process that serves therefore asks through an `AdminProcess`: an abort ends the child only, and the next call
starts another one. `ask` is one call with a child of its own.

The function of a call runs in the child, with the child's admin client as its first argument. The function must be
importable. Its arguments and its result are pickled and go through a socket, so no secret is in a command line.

The child needs a Python interpreter and no file. Where it cannot start, as in a server that embeds Python, the calls
raise `CannotStart`.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient

from relaygr.kafka.client_errors import ClientErrors
from relaygr.kafka.clients import make_admin
from relaygr.kafka.settings import KafkaSettings

P = ParamSpec("P")
T = TypeVar("T")

START_S: Final = 30.0
"""Time for the start of the child on a busy machine."""
_SERVE: Final = "import sys; from relaygr.cluster.admin_process import serve; serve(int(sys.argv[1]), sys.argv[2])"
_LAST_WORDS_BYTES: Final = 500
_PIPE_BYTES: Final = 1 << 20
_PR_SET_PDEATHSIG: Final = 1


class CannotStart(KafkaException):
    """The child cannot be started, so nothing was asked."""

    def __init__(self, why: str) -> None:
        super().__init__(KafkaError(KafkaError._FAIL, f"the process that asks Kafka {why}"))


class AdminProcess:
    """A child process with an admin client. One call at a time. Any thread may call `close`, more than once, too."""

    def __init__(self, kafka: KafkaSettings, client_id: str, start_s: float = START_S) -> None:
        """`start` or the first call starts the child, which may take `start_s`."""
        self._start_s = start_s
        # Without the sections of other settings, whose modules the child would import.
        self._kafka = KafkaSettings(**{name: getattr(kafka, name) for name in KafkaSettings.model_fields})
        self._client_id = client_id
        self._is_outdated = False
        self._child: _Child | None = None
        self._closed = False
        self._calling = threading.Lock()

    def start(self, module: str) -> None:
        """Starts the child now, without a wait. It imports `module`, of the functions to come, meanwhile.

        A child that cannot start is an error of the first call.
        """
        with self._calling, contextlib.suppress(CannotStart):
            if self._child is None and not self._closed:
                self._child = _Child(self._kafka, self._client_id, module)

    def call(
        self, timeout_s: float, function: Callable[Concatenate[AdminClient, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """The result of `function(admin, *args, **kwargs)` in the child.

        Raises the exception of the function. Raises KafkaException if the child dies or is closed, or if there is no
        answer within `timeout_s`; the child is then killed. Raises CannotStart if there is no child.
        """
        with self._calling:
            if self._child is not None and self._is_outdated:
                self._child.end()
                self._child = None
            if self._child is None:
                self._is_outdated = False
                self._child = _Child(self._kafka, self._client_id)
            child = self._child
            try:
                if self._closed:
                    raise KafkaException(KafkaError(KafkaError._DESTROY, "the requests to Kafka were stopped"))
                answer = child.ask(self._start_s, timeout_s, (function, args, kwargs))
            except BaseException:
                self._child = None
                child.end()
                raise
        if isinstance(answer, _Failure):
            raise answer.exception()
        return answer  # type: ignore[no-any-return]  # The result of `function`.

    def renew(self) -> None:
        """The next call starts another child, which reads the files of `security` again. Any thread may call it."""
        self._is_outdated = True

    def close(self) -> None:
        """Ends the child. A call in progress, and each later one, raises KafkaException."""
        self._closed = True
        child = self._child
        if child is not None:
            child.kill()
        with self._calling:
            if self._child is not None:
                self._child.end()
                self._child = None

    def __enter__(self) -> AdminProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def ask(
    kafka: KafkaSettings,
    client_id: str,
    timeout_s: float,
    function: Callable[Concatenate[AdminClient, P], T],
    *args: P.args,
    **kwargs: P.kwargs,
) -> T:
    """One `AdminProcess.call`, with a child for this call alone."""
    with AdminProcess(kafka, client_id) as admin:
        return admin.call(timeout_s, function, *args, **kwargs)


@dataclass(frozen=True, slots=True)
class _Failure:
    """The exception of a call, as it is sent to the parent. confluent-kafka's errors cannot be pickled."""

    error: Exception | None
    code: int = 0
    text: str = ""

    @classmethod
    def of(cls, error: Exception) -> _Failure:
        if isinstance(error, KafkaException):
            return cls(None, error.args[0].code(), error.args[0].str())
        if isinstance(error, TimeoutError):
            return cls(None, KafkaError._TIMED_OUT, str(error) or "a request did not end")
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            return cls(None, KafkaError._FAIL, repr(error))
        return cls(error)

    def exception(self) -> Exception:
        return self.error or KafkaException(KafkaError(self.code, self.text))


class _Child:
    """One child process. `kill` may be called by any thread."""

    def __init__(self, kafka: KafkaSettings, client_id: str, module: str = __name__) -> None:
        self._connection, theirs = Pipe()
        self._stderr, stderr = os.pipe()
        # Nobody reads while the child runs, so a full pipe must not stop the child.
        os.set_blocking(stderr, False)
        os.set_blocking(self._stderr, False)
        try:
            self._process = subprocess.Popen(
                [_interpreter(), "-c", _SERVE, str(theirs.fileno()), module],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                # Ctrl-C in the terminal is for the parent, which then closes the child.
                process_group=0,
            )
        except OSError as error:
            self._close()
            raise CannotStart(f"cannot start, as sys.executable is {sys.executable!r}: {error.strerror}") from error
        finally:
            theirs.close()
            os.close(stderr)
        self._started = False
        # A child that has died already is noticed by `ask`.
        with contextlib.suppress(OSError):
            self._connection.send((kafka, client_id))

    def ask(self, start_s: float, timeout_s: float, question: tuple[Any, ...]) -> Any:
        try:
            if not self._started:
                if not self._connection.poll(start_s):
                    raise CannotStart(f"did not start within {start_s:g} s, as {_interpreter()}")
                self._connection.recv()
                self._started = True
            self._connection.send(question)
            if not self._connection.poll(timeout_s):
                text = f"the process that asks Kafka did not answer within {timeout_s:g} s"
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT, text))
            return self._connection.recv()
        except (EOFError, OSError) as error:
            self.kill()
            why = f"ended with {self._process.wait()}{self._last_words()}"
            if not self._started:
                raise CannotStart(why) from error
            raise KafkaException(KafkaError(KafkaError._FAIL, f"the process that asks Kafka {why}")) from error

    def _last_words(self) -> str:
        with contextlib.suppress(BlockingIOError):
            text = os.read(self._stderr, _PIPE_BYTES)[-_LAST_WORDS_BYTES:].decode(errors="replace").strip()
            return f": {text}" if text else ""
        return ""

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        self.kill()
        self._process.wait()
        self._close()

    def _close(self) -> None:
        self._connection.close()
        os.close(self._stderr)


def _interpreter() -> str:
    """The interpreter of this environment. A server that embeds Python, such as uWSGI, is none: it would serve."""
    if Path(sys.executable or "").name.lower().startswith(("python", "pypy")):
        return sys.executable
    return str(Path(sys.exec_prefix, "bin", "python3"))


def serve(descriptor: int, module: str) -> None:
    """The child: answers until its parent closes the connection or dies."""
    # An abort is expected here, and leaves no core file.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        # A request in progress would keep the child alive after the death of the parent.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = Connection(descriptor)
    try:
        kafka, client_id = parent.recv()
        admin = make_admin(kafka, client_id, ClientErrors(client_id, quiet=True))
        importlib.import_module(module)
        parent.send("ready")
        while True:
            function, args, kwargs = parent.recv()
            answer: Any
            try:
                answer = function(admin, *args, **kwargs)
            except Exception as error:
                answer = _Failure.of(error)
            parent.send(answer)
    except (EOFError, OSError):
        # Without the clean-up of librdkafka, which may wait for requests in flight.
        os._exit(0)
