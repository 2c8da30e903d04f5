"""A decision: what was known, every alternative with its predicted cost, the choice, and later what it cost.

    regret = (cost of the choice - least cost of any alternative) / cost of the choice

Measured where every alternative was executed; elsewhere an estimate from the latest rates, and labelled so. Values
only: writing them down is `numem.lineage.decisions`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from numem.errors import InputError

Term = float | int | str | bool | None


@dataclass(frozen=True, slots=True)
class Alternative:
    """Something that could be done.

    Attributes:
        name: unique within the decision, for example "recompute", "restore:ssd", "two-ended:object", "evict:7f3a".
        cost_ms: predicted cost, None where it could not be predicted.
        terms: what the prediction is made of.
        declined: why it may not be chosen; empty where it may.
    """

    name: str
    cost_ms: float | None = None
    terms: Mapping[str, Term] = field(default_factory=dict)
    declined: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """A choice among alternatives.

    Attributes:
        kind: "arrive" (restore or recompute), "admit", "evict", "preempt", "place", "promote" or "drop".
        request: the request it was made for, or empty.
        subject: causal id of what it is about (the boundary of a prompt, a chunk), or empty.
        policy: name of what chose.
        inputs: what was known.
        alternatives: all of them, the declined ones too.
        choice: name of the chosen one.
    """

    kind: str
    request: str
    subject: bytes
    policy: str
    inputs: Mapping[str, Term]
    alternatives: tuple[Alternative, ...]
    choice: str

    def __post_init__(self) -> None:
        names = [a.name for a in self.alternatives]
        if len(set(names)) != len(names) or self.choice not in names:
            raise InputError(f"decision {self.kind!r}: choice {self.choice!r} must be one of the distinct {names}")

    @property
    def chosen(self) -> Alternative:
        return next(a for a in self.alternatives if a.name == self.choice)


def cheapest(alternatives: Sequence[Alternative]) -> Alternative:
    """The alternative of least predicted cost that is not declined; of equals the first.

    Raises:
        InputError: there is none.
    """
    able = [a for a in alternatives if not a.declined and a.cost_ms is not None]
    if not able:
        raise InputError("decision: every alternative is declined or without a cost")
    return min(able, key=lambda a: a.cost_ms if a.cost_ms is not None else float("inf"))


def regret(costs: Mapping[str, float], choice: str) -> float:
    """Regret of a choice among the costs of all alternatives, in [0, 1)."""
    return (costs[choice] - min(costs.values())) / costs[choice] if costs[choice] > 0 else 0.0
