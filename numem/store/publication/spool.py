"""The spool: pieces that exist but are not yet published, one file per node, named by causal id.

    8 bytes   magic "NMSPOOL1"
    8 bytes   length of the header, little-endian
    16 bytes  xxh3-128 of the header
    header    JSON: the node, and (content id, length, xxh3-128, offset) of every piece
    payload   the pieces, each at a multiple of 64 bytes behind the header

A file is written under a temporary name and renamed when complete, without a sync: what a crash takes from the spool is
recomputed. Everything is checked when it is read.
"""

import json
import os
import struct
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from numem.errors import IntegrityError, StorageFullError
from numem.identity.digest import ID_BYTES, Buffer, checksum, content_id
from numem.state.node import Node
from numem.store import barrier
from numem.store.catalog.nodes import node_document, node_from_document
from numem.store.lance_errors import is_full

_MAGIC = b"NMSPOOL1"
_HEAD = struct.Struct("<8sQ16s")
_SUFFIX = ".stage"
_LINE = 64
# A header holds facts, not payload; a longer one is damage.
_HEADER_LIMIT = 1 << 28


@dataclass(frozen=True, slots=True)
class StagedPiece:
    """A piece in a spool file."""

    content: bytes
    nbytes: int
    xxh3: bytes
    offset: int


@dataclass(frozen=True, slots=True)
class Staged:
    """A node in the spool and where its pieces lie in the file."""

    node: Node
    pieces: tuple[StagedPiece, ...]
    path: Path

    def load(self, piece: StagedPiece, view: memoryview, key: bytes | None) -> None:
        """Fill a buffer with a piece and check it against its content id.

        Raises:
            IntegrityError: the file is gone, shorter than its header says, or holds other bytes.
        """
        try:
            with open(self.path, "rb", buffering=0) as file:
                file.seek(piece.offset)
                got = _read_all(file, view)
        except OSError as error:
            raise IntegrityError(f"spool: {self.path.name} cannot be read ({error.strerror})") from error
        if got != piece.nbytes:
            raise IntegrityError(
                f"spool: {self.path.name} ends after {got} of {piece.nbytes} bytes of piece {piece.content.hex()}"
            )
        if content_id(view, key) != piece.content:
            raise IntegrityError(f"spool: {self.path.name} holds other bytes than piece {piece.content.hex()}")


class Spool:
    """Directory of staged nodes."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __contains__(self, node: bytes) -> bool:
        return self._path(node).exists()

    def ids(self) -> list[bytes]:
        """Causal ids that have a file, in name order."""
        if not self._directory.is_dir():
            return []
        names = sorted(entry.name for entry in os.scandir(self._directory) if entry.name.endswith(_SUFFIX))
        found = []
        for name in names:
            try:
                node = bytes.fromhex(name.removesuffix(_SUFFIX))
            except ValueError:
                continue  # not ours: left alone
            if len(node) == ID_BYTES:
                found.append(node)
        return found

    def put(self, node: Node, payloads: Sequence[Buffer]) -> int:
        """Write a node with its payloads; returns the payload bytes.

        Raises:
            StorageFullError: nothing is left behind.
        """
        views = [memoryview(payload).cast("B") for payload in payloads]
        header, offsets = _header(node, views)
        self._directory.mkdir(parents=True, exist_ok=True)
        temporary = self._directory / f".{uuid.uuid4().hex}.tmp"
        try:
            with open(temporary, "wb", buffering=0) as file:
                _write_all(file, header)
                at = len(header)
                for view, offset in zip(views, offsets, strict=True):
                    _write_all(file, bytes(offset - at))
                    _write_all(file, view)
                    at = offset + len(view)
            os.replace(temporary, self._path(node.id))
        except OSError as error:
            temporary.unlink(missing_ok=True)
            if is_full(error):
                raise StorageFullError(
                    f"spool: no space left for node {node.id.hex()}; free some and stage it again"
                ) from error
            raise
        barrier.reached("staged", node.id.hex())
        return sum(len(view) for view in views)

    def open(self, node: bytes) -> Staged:
        """Header of a staged node.

        Raises:
            IntegrityError: no such file, or a damaged or short one.
        """
        path = self._path(node)
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                head = file.read(_HEAD.size)
                if len(head) < _HEAD.size:
                    raise IntegrityError(f"spool: {path.name} has {size} bytes, too few for a header")
                magic, length, digest = _HEAD.unpack(head)
                if magic != _MAGIC or length > min(_HEADER_LIMIT, size):
                    raise IntegrityError(f"spool: {path.name} does not start with a spool header")
                header = file.read(length)
        except OSError as error:
            raise IntegrityError(f"spool: {path.name} cannot be read ({error.strerror})") from error
        if xxhash.xxh3_128_digest(header) != digest:
            raise IntegrityError(f"spool: the header of {path.name} is damaged")
        staged = _parse(header, path)
        end = max((piece.offset + piece.nbytes for piece in staged.pieces), default=0)
        if staged.node.id != node or size < end:
            raise IntegrityError(f"spool: {path.name} has {size} bytes, its header says {end}")
        return staged

    def discard(self, node: bytes) -> None:
        """Forget a staged node."""
        self._path(node).unlink(missing_ok=True)

    def set_aside(self, node: bytes, quarantine: Path) -> None:
        """Move a damaged file away for inspection."""
        quarantine.mkdir(parents=True, exist_ok=True)
        path = self._path(node)
        try:
            os.replace(path, quarantine / f"{path.name}.{uuid.uuid4().hex[:8]}")
        except FileNotFoundError:
            return

    def _path(self, node: bytes) -> Path:
        return self._directory / f"{node.hex()}{_SUFFIX}"


def _header(node: Node, views: Sequence[memoryview]) -> tuple[bytes, list[int]]:
    pieces = [
        [content.hex(), len(view), checksum(view).hex()] for content, view in zip(node.pieces, views, strict=True)
    ]
    body = json.dumps({"node": node_document(node), "pieces": pieces}, separators=(",", ":")).encode()
    offsets, at = [], _round(_HEAD.size + len(body))
    for view in views:
        offsets.append(at)
        at = _round(at + len(view))
    return _HEAD.pack(_MAGIC, len(body), xxhash.xxh3_128_digest(body)) + body, offsets


def _parse(header: bytes, path: Path) -> Staged:
    try:
        tree = json.loads(header)
        node = node_from_document(tree["node"])
        pieces, at = [], _round(_HEAD.size + len(header))
        for content, nbytes, xxh3 in tree["pieces"]:
            pieces.append(StagedPiece(bytes.fromhex(content), int(nbytes), bytes.fromhex(xxh3), at))
            at = _round(at + int(nbytes))
    except (ValueError, KeyError, TypeError) as error:
        raise IntegrityError(f"spool: the header of {path.name} cannot be read ({error})") from error
    if tuple(piece.content for piece in pieces) != node.pieces:
        raise IntegrityError(f"spool: the header of {path.name} names other pieces than its node")
    return Staged(node, tuple(pieces), path)


def _round(offset: int) -> int:
    return -(-offset // _LINE) * _LINE


def _write_all(file: Any, data: Buffer) -> None:
    view = memoryview(data)
    while len(view):
        view = view[file.write(view) :]


def _read_all(file: Any, view: memoryview) -> int:
    total = 0
    while total < len(view):
        got = file.readinto(view[total:])
        if not got:
            break
        total += got
    return total
