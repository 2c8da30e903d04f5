"""A local server that stands in for the Hugging Face hub: it lists and serves one small repository, and plays faults."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

REPO = "someone/tiny"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = (".safetensors", "tokenizer.model")


class Hub:
    """State of the server.

    Attributes:
        files: the repository, by name.
        commit: its head.
        requests: "METHOD path" of every request; ranges: (name, Range header); tokens: Authorization headers.
        replaced: name -> bytes served in place of the listed ones.
        broken: name -> status answered in place of the file.
        cut: name -> bytes after which the connection is closed.
        moved: name -> address that the file is redirected to.
        status: statuses answered to the next requests, whatever they are for.
        listed: keys that replace those of a file's entry in the listing.
    """

    def __init__(self, directory: Path) -> None:
        self.files = {str(f.relative_to(directory)): f.read_bytes() for f in directory.rglob("*") if f.is_file()}
        self.files |= {"README.md": b"# hello", "pytorch_model.bin": b"pickle", "onnx/model.safetensors": b"other"}
        self.commit = COMMIT
        self.requests: list[str] = []
        self.ranges: list[tuple[str, str]] = []
        self.tokens: set[str | None] = set()
        self.replaced: dict[str, bytes] = {}
        self.broken: dict[str, int] = {}
        self.cut: dict[str, int] = {}
        self.moved: dict[str, str] = {}
        self.status: list[int] = []
        self.listed: dict[str, dict[str, Any]] = {}
        self.url = ""

    def info(self) -> dict[str, Any]:
        """The listing, as the hub's API gives it."""
        siblings = []
        for name, data in self.files.items():
            entry: dict[str, Any] = {"rfilename": name, "size": len(data)}
            entry["blobId"] = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            if name.endswith(LARGE):
                entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            siblings.append(entry | self.listed.get(name, {}))
        return {"id": REPO, "sha": self.commit, "siblings": siblings, "private": False, "tags": [], "downloads": 0}


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.serve(body=False)

        def do_GET(self) -> None:
            self.serve(body=True)

        def serve(self, body: bool) -> None:
            path = self.path.split("?")[0]
            hub.requests.append(f"{self.command} {path}")
            hub.tokens.add(self.headers.get("Authorization"))
            if hub.status:
                return self.reply(b"not now", {}, body, hub.status.pop(0))
            base = f"/api/models/{REPO}"
            if path in (base, f"{base}/revision/{COMMIT}"):
                return self.reply(json.dumps(hub.info()).encode(), {"Content-Type": "application/json"}, body)
            prefix = f"/{REPO}/resolve/{COMMIT}/"
            name = path.removeprefix(prefix)
            if not path.startswith(prefix) or name not in hub.files:
                return self.reply(b"no", {}, body, 404)
            if name in hub.broken:
                return self.reply(b"broken", {}, body, hub.broken[name])
            if name in hub.moved:
                return self.reply(b"", {"Location": hub.moved[name]}, body, 302)
            data = hub.replaced.get(name, hub.files[name])
            headers = {"ETag": f'"{hashlib.sha256(hub.files[name]).hexdigest()}"', "X-Repo-Commit": COMMIT}
            asked = self.headers.get("Range")
            if asked is None or not body:
                return self.reply(data, headers, body, cut=hub.cut.get(name))
            hub.ranges.append((name, asked))
            begin = int(asked.removeprefix("bytes=").split("-")[0])
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
            self.reply(data[begin:], headers, body, 206, cut=hub.cut.get(name))

        def reply(
            self, data: bytes, headers: dict[str, str], body: bool, status: int = 200, cut: int | None = None
        ) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(key, value)
            self.end_headers()
            if body:
                self.wfile.write(data if cut is None else data[:cut])
            if cut is not None:
                self.close_connection = True

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler


@contextmanager
def serving(directory: Path) -> Iterator[Hub]:
    """Serve a model directory on loopback."""
    state = Hub(directory)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(state))
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
