"""What enters the tiers in RAM, and when: at publication, at a second touch, or by promotion.

A piece in RAM needs no fact: the catalog must know the piece, and the tier itself says whether it holds it.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from numem.errors import InputError, IntegrityError, NotFoundError
from numem.identity.digest import content_id
from numem.policy.eviction.admission import SecondTouch
from numem.store.catalog.catalog import Catalog
from numem.store.config import TierSpec
from numem.store.payload.pieces import Piece
from numem.store.reading.host import Host
from numem.store.reading.reader import Reader
from numem.store.reading.runs import Request
from numem.store.reports import PromoteReport

NO_ROOM = "the tier has no room for it"


class Hosting:
    """Fills the tiers in RAM of one open memory.

    Args:
        hosts: tier name -> tier.
        specs: tier name -> its specification, at least of `hosts`.
    """

    def __init__(
        self,
        hosts: Mapping[str, Host],
        specs: Mapping[str, TierSpec],
        catalog: Catalog,
        reader: Reader,
        key_of: Callable[[bytes], bytes | None],
    ) -> None:
        self._hosts = hosts
        self._through = [host for name, host in hosts.items() if specs[name].write == "through"]
        self._selective = [(host, SecondTouch()) for name, host in hosts.items() if specs[name].write == "selective"]
        self._catalog = catalog
        self._reader = reader
        self._key_of = key_of

    def touched(self, requests: Sequence[Request]) -> None:
        """Keep what a read delivered, from its second touch on. The bytes were verified by the read."""
        for host, seen in self._selective:
            for request in requests:
                if seen.use(request.content) and request.content not in host:
                    host.put(request.content, request.view, request.placement.xxh3)

    def published(self, pieces: Iterable[Piece]) -> None:
        """Keep what was made durable, where the tier is written through."""
        if not self._through:
            return
        for piece in pieces:
            wanting = [host for host in self._through if piece.content not in host]
            if not wanting:
                continue
            buffer = bytearray(piece.nbytes)
            try:
                piece.load(memoryview(buffer))
            except IntegrityError:
                continue  # published from another source, or reported as damaged
            for host in wanting:
                host.put(piece.content, buffer, piece.xxh3)

    def promote(self, ids: Sequence[bytes], name: str) -> PromoteReport:
        """Copy the pieces of nodes into a tier, compared with their content ids.

        Raises:
            NotFoundError: a node that is not published; nothing was copied.
        """
        started = time.perf_counter()
        host = self._hosts[name]
        self._catalog.refresh("placements", "nodes")
        scopes: dict[bytes, bytes] = {}
        for id in ids:
            node = self._catalog.nodes.get(id)
            if node is None:
                raise NotFoundError(f"promote: no node {id.hex()} in this memory; publish it first")
            for content in node.pieces:
                scopes.setdefault(content, node.scope)
        failed: dict[str, str] = {}
        promoted, nbytes = 0, 0
        wanted = [content for content in scopes if content not in host]
        for content in wanted:
            size, reason = self._copy(content, scopes[content], name)
            nbytes += size
            promoted += not reason
            if reason:
                failed[content.hex()] = reason
        ms = (time.perf_counter() - started) * 1e3
        return PromoteReport(promoted, len(scopes) - len(wanted), nbytes, ms, failed)

    def discard(self, contents: Iterable[bytes]) -> int:
        """Let go of pieces everywhere in RAM; how many copies there were."""
        return sum(host.discard(content) for content in contents for host in self._hosts.values())

    def _copy(self, content: bytes, scope: bytes, name: str) -> tuple[int, str]:
        """Bytes copied, and why not."""
        sources = self._reader.elsewhere(content, name)
        if not sources:
            return 0, "no readable replica in another tier"
        try:
            key = self._key_of(scope)
        except InputError as error:
            return 0, str(error)
        buffer = bytearray(sources[0].nbytes)

        def verify(view: memoryview) -> str:
            return "" if content_id(view, key) == content else "bytes are not those of the content id"

        reason = self._reader.read_from_others(content, memoryview(buffer), name, verify)
        if not reason and not self._hosts[name].put(content, buffer, sources[0].xxh3):
            reason = NO_ROOM
        return (0, reason) if reason else (len(buffer), "")
