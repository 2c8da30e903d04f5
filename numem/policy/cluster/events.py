"""What routers and workers tell each other and themselves: plain values.

router -- Offer ----> worker        worker -- Accept, Reject, Delta, Complete, Fail, Report ----> router
router -- Withdraw -> worker        each   -- Timer ----> itself
"""

from dataclasses import dataclass

from numem.policy.cluster.ranking import Wish, Worker


@dataclass(frozen=True, slots=True)
class Assignment:
    """One attempt at one request: what every message about it is fenced by."""

    request: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Submit:
    """A client asks."""

    wish: Wish


@dataclass(frozen=True, slots=True)
class Cancel:
    """A client no longer wants a request."""

    request: str


@dataclass(frozen=True, slots=True)
class Report:
    """A worker's newest observation of itself."""

    worker: Worker


@dataclass(frozen=True, slots=True)
class Offer:
    assignment: Assignment
    wish: Wish


@dataclass(frozen=True, slots=True)
class Withdraw:
    assignment: Assignment


@dataclass(frozen=True, slots=True)
class Accept:
    assignment: Assignment


@dataclass(frozen=True, slots=True)
class Reject:
    assignment: Assignment
    reason: str


@dataclass(frozen=True, slots=True)
class Delta:
    """One generated token; index counts from 0."""

    assignment: Assignment
    index: int


@dataclass(frozen=True, slots=True)
class Complete:
    """All `count` tokens were sent."""

    assignment: Assignment
    count: int


@dataclass(frozen=True, slots=True)
class Fail:
    assignment: Assignment
    reason: str


@dataclass(frozen=True, slots=True)
class Timer:
    """Time has passed: for a router without any progress beyond `mark` tokens (-1: not accepted), for a worker the end
    of phase number `mark`."""

    assignment: Assignment
    mark: int


Event = Submit | Cancel | Report | Offer | Withdraw | Accept | Reject | Delta | Complete | Fail | Timer


@dataclass(frozen=True, slots=True)
class Send:
    """Effect: a message on its way to a worker or to the router."""

    to: str
    event: Event


@dataclass(frozen=True, slots=True)
class After:
    """Effect: the event comes back to its sender after so many ticks."""

    ticks: int
    event: Timer


@dataclass(frozen=True, slots=True)
class Emit:
    """Effect: the client receives token `index` of its request."""

    request: str
    index: int


@dataclass(frozen=True, slots=True)
class End:
    """Effect: the client learns how its request ended."""

    request: str
    outcome: str
    reason: str = ""


Effect = Send | After | Emit | End
ROUTER = "router"
