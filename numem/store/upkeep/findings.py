"""What the doctor finds, and what its repair did."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from numem.store.reports import Recovered


class Severity(StrEnum):
    """How bad a finding is."""

    NOTE = "note"  # nothing is wrong with what the memory holds, and nothing has to be done
    REPAIRABLE = "repairable"  # opening the memory or `repair` mends it without loss
    LOSS = "loss"  # something that was acknowledged cannot be had from this memory any more


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as it should be.

    Attributes:
        severity: see `Severity`.
        place: what it is about: a table, a volume, a file, a node.
        what: one line.
        remedy: what to do, one line.
    """

    severity: Severity
    place: str
    what: str
    remedy: str


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """Outcome of a diagnosis.

    Attributes:
        findings: in the order in which they were made: catalog, volumes, nodes, spool, ledger.
        tables, volumes, nodes, copies, staged: what was looked at.
        ms: wall time.
    """

    findings: tuple[Finding, ...] = ()
    tables: int = 0
    volumes: int = 0
    nodes: int = 0
    copies: int = 0
    staged: int = 0
    ms: float = 0.0

    @property
    def ok(self) -> bool:
        """Nothing but notes."""
        return not any(finding.severity is not Severity.NOTE for finding in self.findings)

    def of(self, severity: Severity | str) -> tuple[Finding, ...]:
        """Findings of one severity."""
        return tuple(finding for finding in self.findings if finding.severity == severity)


@dataclass(frozen=True, slots=True)
class RepairReport:
    """Outcome of a repair.

    Attributes:
        before, after: what a diagnosis found.
        done: what was mended, in order.
        lost: what could not be had back, each named in one line.
    """

    before: DoctorReport
    after: DoctorReport
    done: tuple[Recovered, ...] = ()
    lost: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Nothing is left to do, and nothing was lost."""
        return self.after.ok and not self.lost


def some(names: Iterable[str], most: int = 3) -> str:
    """The first few of some names, and how many more there are."""
    known = sorted(names)
    rest = f" and {len(known) - most} more" if len(known) > most else ""
    return ", ".join(known[:most]) + rest
