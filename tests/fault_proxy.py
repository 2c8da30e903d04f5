"""A proxy on loopback in front of an S3 server that counts requests and breaks chosen ones on purpose."""

import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import BinaryIO, Literal

Kind = Literal["delay", "503", "reset", "lost", "short", "cut"]


@dataclass(slots=True)
class Fault:
    """What to do to the next requests that match.

    Attributes:
        kind: "delay" waits before forwarding; "503" answers without forwarding; "reset" sends half of the reply, then
            a reset; "lost" forwards, and drops the whole reply; "short" sends half of the body with a length to match;
            "cut" sends half of the body with its full length, then closes.
        method: GET, PUT, ...; any where empty.
        path: regular expression, searched in the request's target.
        times: how many requests; -1 for all.
        seconds: of a delay.
        hits: how many it met so far.
    """

    kind: Kind
    method: str = ""
    path: str = ""
    times: int = 1
    seconds: float = 0.0
    hits: int = 0

    def meets(self, method: str, target: str) -> bool:
        return self.times != 0 and self.method in ("", method) and re.search(self.path, target) is not None


@dataclass(frozen=True, slots=True)
class Seen:
    """A request that came, and what went back: status 0 where nothing did."""

    method: str
    target: str
    status: int
    nbytes: int


@dataclass(slots=True)
class _Message:
    start: str
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str:
        return next((value for key, value in self.headers if key.lower() == name), "")

    def encoded(self, body: bytes, length: int) -> bytes:
        kept = [
            (key, value) for key, value in self.headers if key.lower() not in ("content-length", "transfer-encoding")
        ]
        lines = [self.start, *(f"{key}: {value}" for key, value in [*kept, ("Content-Length", str(length))])]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


@dataclass(slots=True)
class FaultProxy:
    """A running proxy.

    Attributes:
        endpoint: http URL to use instead of the server's.
        seen: every request, in the order of their replies.
    """

    endpoint: str
    upstream: tuple[str, int]
    seen: list[Seen] = field(default_factory=list)
    _faults: list[Fault] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, fault: Fault) -> Fault:
        """Break matching requests from now on; the first fault that matches is taken."""
        with self._lock:
            self._faults.append(fault)
        return fault

    def clear(self) -> None:
        """Break nothing more, and forget what was seen."""
        with self._lock:
            self._faults.clear()
            self.seen.clear()

    def count(self, method: str, path: str = "") -> int:
        """How many requests of a method came whose target matches."""
        with self._lock:
            return sum(seen.method == method and re.search(path, seen.target) is not None for seen in self.seen)

    def _take(self, method: str, target: str) -> Fault | None:
        with self._lock:
            for fault in self._faults:
                if fault.meets(method, target):
                    fault.times -= fault.times > 0
                    fault.hits += 1
                    return fault
        return None

    def _note(self, seen: Seen) -> None:
        with self._lock:
            self.seen.append(seen)

    def _serve(self, client: socket.socket) -> None:
        """One connection, until either side closes it."""
        server: socket.socket | None = None
        try:
            incoming = client.makefile("rb")
            while (request := _read(incoming, "")) is not None:
                method, target = request.start.split(" ")[:2]
                fault = self._take(method, target)
                if fault is not None and fault.kind == "503":
                    self._note(Seen(method, target, 503, 0))
                    client.sendall(b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\n\r\n")
                    continue
                if fault is not None and fault.kind == "delay":
                    time.sleep(fault.seconds)
                if server is None:
                    server = socket.create_connection(self.upstream)
                server.sendall(request.encoded(request.body, len(request.body)))
                reply = _read(server.makefile("rb"), method)
                if reply is None:
                    return
                kind = fault.kind if fault is not None else ""
                if kind == "lost":
                    self._note(Seen(method, target, 0, 0))
                    _reset(client)
                    return
                half = reply.body[: len(reply.body) // 2]
                full = int(reply.header("content-length") or 0) if method == "HEAD" else len(reply.body)
                body, length = (half, len(half)) if kind == "short" else (reply.body, full)
                if kind in ("reset", "cut"):
                    body = half
                # Before it is sent: whoever has the answer finds it counted.
                self._note(Seen(method, target, int(reply.start.split(" ")[1]), len(body)))
                client.sendall(reply.encoded(body, length))
                if kind == "reset":
                    _reset(client)
                if kind in ("reset", "cut"):
                    return
        except (OSError, ValueError):
            pass  # a client or server that went away ends its connection, nothing else
        finally:
            client.close()
            if server is not None:
                server.close()


@contextmanager
def fault_proxy(endpoint: str) -> Iterator[FaultProxy]:
    """Run a proxy in front of an http endpoint for the time of the with block."""
    host, port = endpoint.removeprefix("http://").split(":")
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        proxy = FaultProxy(f"http://127.0.0.1:{listener.getsockname()[1]}", (host, int(port)))

        def accept() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=proxy._serve, args=(client,), daemon=True).start()

        acceptor = threading.Thread(target=accept, daemon=True)
        acceptor.start()
        try:
            yield proxy
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            acceptor.join(5)


def _read(source: BinaryIO, answers: str) -> _Message | None:
    """One request, or the reply to a request of method `answers`; None where the connection ended."""
    start = source.readline().decode("latin-1").rstrip("\r\n")
    if not start:
        return None
    headers = []
    while line := source.readline().decode("latin-1").rstrip("\r\n"):
        name, _, value = line.partition(":")
        headers.append((name, value.strip()))
    message = _Message(start, headers, b"")
    bodiless = answers == "HEAD" or start.split(" ")[1] in ("204", "304")
    if message.header("transfer-encoding").lower() == "chunked" and not bodiless:
        message.body = _chunked(source)
    elif not bodiless:
        size = int(message.header("content-length") or 0)
        message.body = source.read(size)
        if len(message.body) < size:
            return None
    return message


def _chunked(source: BinaryIO) -> bytes:
    parts = []
    while size := int(source.readline().split(b";")[0], 16):
        parts.append(source.read(size))
        source.readline()
    while source.readline().strip():
        pass
    return b"".join(parts)


def _reset(client: socket.socket) -> None:
    """Close with RST instead of FIN."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
