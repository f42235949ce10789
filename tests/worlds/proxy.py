"""A proxy in the environment that knows nothing of this machine's processes, as a company's does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

VARIABLES = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")


@contextmanager
def refusing_proxy() -> Iterator[tuple[dict[str, str], list[str]]]:
    """The variables that name it, and the addresses for which it was asked. It answers 403."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def parse_request(self) -> bool:
            """Refuses each method."""
            if super().parse_request():
                asked.append(self.path)
                self.send_error(403)
            return False

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        address = f"http://127.0.0.1:{server.server_address[1]}"
        yield dict.fromkeys(VARIABLES, address) | {"no_proxy": "", "NO_PROXY": ""}, asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
