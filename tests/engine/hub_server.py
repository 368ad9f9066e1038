"""A stand-in for the Hugging Face Hub: a folder of files behind the two requests that downloads need.

huggingface_hub asks for other paths too; those are 404. `cuts` says after how many bytes the next answers
of a file break off; `refuse` answers everything of a repository with one status.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Repositories by name; `log` holds (method, file, Range header)."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, Path] = {}
        self.refuse: dict[str, tuple[int, str]] = {}
        self.cuts: dict[str, list[int]] = {}
        self.log: list[tuple[str, str, str | None]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is no news."""


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        path = self.path.split("?")[0].strip("/")
        repo, _, rest = path.partition("/resolve/")
        revision, _, name = rest.partition("/")
        asked = self.headers.get("Range")
        self.server.log.append((self.command, name, asked))
        if repo in self.server.refuse:
            status, code = self.server.refuse[repo]
            return self.fail(status, code)
        if repo not in self.server.repos:
            return self.fail(404, "RepoNotFound")
        if revision not in ("main", COMMIT):
            return self.fail(404, "RevisionNotFound")
        file = self.server.repos[repo] / name
        if not file.is_file():
            return self.fail(404, "EntryNotFound")
        data = file.read_bytes()
        start = int(asked.removeprefix("bytes=").split("-")[0]) if asked else 0
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - start))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{len(data)}-{name}"')
        self.end_headers()
        if body:
            cuts = self.server.cuts.get(name)
            end = start + cuts.pop(0) if cuts else len(data)
            self.wfile.write(data[start:end])
            if end < len(data):
                self.wfile.flush()
                self.close_connection = True
                self.connection.close()

    def fail(self, status: int, code: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


@contextmanager
def serve() -> Iterator[Hub]:
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        thread.join()
        hub.server_close()
