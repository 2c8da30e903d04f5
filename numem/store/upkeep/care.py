"""`Memory.care`: what keeps a memory small, whole and true over the years."""

from collections.abc import Iterable

from numem.errors import NotFoundError
from numem.store.catalog.compact import KEEP_VERSIONS_S, LEAST, CompactReport, compact
from numem.store.session import Session
from numem.store.upkeep.archive import Archive, ArchivedVolume, ArchiveReport
from numem.store.upkeep.collect import DEAD_FRACTION, GRACE_S, CollectReport, collect
from numem.store.upkeep.forget import ForgetReport, forget
from numem.store.upkeep.maintain import MaintainReport, lane, maintain
from numem.store.upkeep.scrub import Scrubber, ScrubReport


class Care:
    """Maintenance, repair and deletion of one open memory. One process at a time: the others get LeaseHeldError."""

    def __init__(self, parts: Session) -> None:
        self._parts = parts

    def maintain(
        self,
        *,
        retain_s: float | None = None,
        grace_s: float = GRACE_S,
        dead_fraction: float = DEAD_FRACTION,
        keep_versions_s: float = KEEP_VERSIONS_S,
        least: int = LEAST,
    ) -> MaintainReport:
        """One round of everything that is due; see `maintain`."""
        return maintain(
            self._parts,
            retain_s=retain_s,
            grace_s=grace_s,
            dead_fraction=dead_fraction,
            keep_versions_s=keep_versions_s,
            least=least,
        )

    def compact(self, *, least: int = LEAST, keep_versions_s: float = KEEP_VERSIONS_S) -> CompactReport:
        """Keep of every catalog table the facts that still say something, in one fragment, and remove old versions.

        Args:
            least: fragments below which a table is let be, unless a quarter of its facts are superseded.
            keep_versions_s: age from which versions go; a handle that stands on an older one reads the newest instead.
        """
        with lane(self._parts) as (_, fence):
            return compact(
                self._parts.catalog, self._parts.volume_gone, least=least, keep_versions_s=keep_versions_s, fence=fence
            )

    def collect(
        self, *, retain_s: float | None = None, grace_s: float = GRACE_S, dead_fraction: float = DEAD_FRACTION
    ) -> CollectReport:
        """Let go of what nothing reaches, and give back the space of dead pieces; see `collect`.

        Args:
            retain_s: retire nodes that no branch, pin, lease or demand reaches once they are older, in seconds; None
                keeps every published node.
            grace_s: age in seconds below which nothing is taken.
            dead_fraction: dead share of a volume above which its living pieces are written anew.
        """
        with lane(self._parts) as (_, fence):
            return collect(self._parts, retain_s=retain_s, grace_s=grace_s, dead_fraction=dead_fraction, fence=fence)

    def forget(
        self,
        *,
        scope: bytes | None = None,
        branch: str | None = None,
        ids: Iterable[bytes] | None = None,
        actor: str,
        reason: str,
    ) -> ForgetReport:
        """Delete for good: a tenant's scope, what only a branch reaches (with the branch), or nodes and their children.

        Tokens and payload leave spool, volumes and every version of the catalog; `unreached` in the report names what
        may still hold some of it.

        Raises:
            InputError: not exactly one of scope, branch and ids.
            NotFoundError: no such scope, branch or node.
        """
        with lane(self._parts) as (_, fence):
            return forget(self._parts, scope=scope, branch=branch, ids=ids, actor=actor, reason=reason, fence=fence)

    def forgotten(self, ids: Iterable[bytes]) -> frozenset[bytes]:
        """Those of these causal ids that were forgotten and not published again since."""
        self._parts.catalog.refresh("nodes")
        return frozenset(self._parts.catalog.forgotten().keys() & set(ids))

    def scrub(
        self,
        *,
        tier: str | None = None,
        budget_bytes: int | None = None,
        budget_s: float | None = None,
        repair: bool = True,
    ) -> ScrubReport:
        """Read copies and compare them with their content ids, those first that were looked at longest ago.

        What is bad is quarantined, and (with `repair`) made anew in its tier from a good copy in any other, archives
        included; so is what reads found bad before.

        Args:
            tier: this one alone; default all on disk, and archives.
            budget_bytes, budget_s: stop after so much; the next call goes on there. A budget below the size of a piece
                still allows one.
        """
        return Scrubber(self._parts).run(tier, budget_bytes, budget_s, repair)

    def close_volumes(self) -> tuple[str, ...]:
        """Close the volumes of the home tier that writers of this node would go on with, those of other live processes
        excepted; returns their names. A closed volume never changes again, and can be archived."""
        self._parts.committer.flush()
        return tuple(self._parts.home.seal_volumes())

    def archive(self, tier: str = "archive", *, close: bool = False) -> ArchiveReport:
        """Copy closed volumes of the home tier to an archive, those that are not there yet.

        Args:
            tier: a tier with `write="archive"`.
            close: close the open volumes first, see `close_volumes`.
        """
        archive = self._archive(tier)
        if close:
            self.close_volumes()
        return archive.copy(self._parts.home, self._parts.home.closed_volumes())

    def archived(self, tier: str = "archive") -> tuple[ArchivedVolume, ...]:
        """Volumes that an archive holds, in name order."""
        return self._archive(tier).volumes()

    def restore_volume(self, volume: str, tier: str = "archive") -> int:
        """Bring a volume back from an archive to the home tier; returns its bytes.

        Raises:
            NotFoundError: it is not in the archive.
            IntegrityError: the archive's copy is damaged; nothing of it became visible.
            StoreError: it holds pieces that were let go of on purpose; `scrub` makes new copies of the others.
        """
        return self._archive(tier).restore(self._parts.home, volume)

    def _archive(self, name: str) -> Archive:
        archive = self._parts.archives.get(name)
        if archive is None:
            known = ", ".join(self._parts.archives) or "none"
            raise NotFoundError(f'no archive {name!r} in this memory (it has {known}); give a tier write="archive"')
        return archive
