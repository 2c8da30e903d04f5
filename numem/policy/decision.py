"""A decision: what was known, every alternative with its predicted cost, the choice, and later what it cost.

    regret = (cost of the choice - least cost of any alternative) / cost of the choice

Measured where every alternative was executed; elsewhere an estimate from the latest rates, and labelled so. Values
only: writing them down is `numem.lineage.decisions`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
        others: further causal ids that it is about: the other victims of one plan, the other nodes of one promotion.
    """

    kind: str
    request: str
    subject: bytes
    policy: str
    inputs: Mapping[str, Term]
    alternatives: tuple[Alternative, ...]
    choice: str
    others: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        names = [a.name for a in self.alternatives]
        if len(set(names)) != len(names) or self.choice not in names:
            raise InputError(f"decision {self.kind!r}: choice {self.choice!r} must be one of the distinct {names}")

    @property
    def chosen(self) -> Alternative:
        return next(a for a in self.alternatives if a.name == self.choice)

    def to_body(self) -> dict[str, Any]:
        """Plain JSON of everything but kind and subject, which the record of a decision holds itself.

        Raises:
            InputError: an input or term that is no number, text, truth value or None.
        """
        return {
            "request": self.request,
            "policy": self.policy,
            "inputs": plain(self.inputs),
            "alternatives": [
                {
                    "name": a.name,
                    "cost_ms": None if a.cost_ms is None else finite(a.cost_ms),
                    "terms": plain(a.terms),
                    "declined": a.declined,
                }
                for a in self.alternatives
            ],
            "choice": self.choice,
            "others": [id.hex() for id in self.others],
        }

    @classmethod
    def from_body(cls, kind: str, subject: bytes, body: Mapping[str, Any]) -> "Decision":
        """The decision that `to_body` wrote.

        Raises:
            InputError: the body is not one of a decision.
        """
        try:
            return cls(
                kind,
                _text(body["request"]),
                subject,
                _text(body["policy"]),
                plain(body["inputs"]),
                tuple(
                    Alternative(
                        _text(a["name"]),
                        None if a["cost_ms"] is None else float(a["cost_ms"]),
                        plain(a["terms"]),
                        _text(a["declined"]),
                    )
                    for a in body["alternatives"]
                ),
                _text(body["choice"]),
                tuple(bytes.fromhex(id) for id in body["others"]),
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise InputError(f"decision {kind!r}: its body is not one ({type(error).__name__}: {error})") from error


@dataclass(frozen=True, slots=True)
class Measured:
    """What doing one of the alternatives cost.

    Attributes:
        choice: name of the alternative that was executed.
        cost_ms: measured, in the unit of the predictions.
        terms: what the cost is made of.
    """

    choice: str
    cost_ms: float
    terms: Mapping[str, Term] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Regret:
    """Regret of a choice, in [0, 1): measured, or estimated from predictions where not everything was executed."""

    value: float
    measured: bool

    @property
    def label(self) -> str:
        return "measured" if self.measured else "estimated"


@dataclass(frozen=True, slots=True)
class Recorded:
    """A decision that was written down, and what became of it.

    Attributes:
        id: 32 hex digits, the same in every process.
        when_ns: ns since the epoch.
        measured: executions, the first of which is what happened; the others were made to compare.
    """

    id: str
    when_ns: int
    decision: Decision
    measured: tuple[Measured, ...] = ()

    @property
    def took(self) -> Measured | None:
        """What happened."""
        return self.measured[0] if self.measured else None

    @property
    def costs(self) -> dict[str, float]:
        """Measured cost of each alternative that was executed; the first execution of each counts."""
        return {m.choice: m.cost_ms for m in reversed(self.measured)}

    def regret(self, choice: str | None = None) -> Regret | None:
        """Regret of a choice (default: of what was executed, else chosen); None where no cost of it is known.

        Declined alternatives were never open, and do not count unless they were executed all the same.
        """
        choice = choice or (self.took.choice if self.took else self.decision.choice)
        measured = self.costs
        able = [a for a in self.decision.alternatives if not a.declined]
        if choice in measured and all(a.name in measured for a in able):
            return Regret(regret(measured, choice), True)
        costs = {a.name: a.cost_ms for a in able if a.cost_ms is not None} | measured
        return Regret(regret(costs, choice), False) if choice in costs else None


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


def mean(values: Iterable[float]) -> float | None:
    """Mean of some values; None of none."""
    known = list(values)
    return math.fsum(known) / len(known) if known else None


def plain(terms: Mapping[str, Any]) -> dict[str, Term]:
    """Terms as JSON can hold them; a number that is not finite becomes None.

    Raises:
        InputError: a value that is no number, text, truth value or None.
    """
    out: dict[str, Term] = {}
    for name, value in terms.items():
        if type(value) is float:
            out[name] = value if math.isfinite(value) else None
        elif value is None or type(value) in (int, str, bool):
            out[name] = value
        else:
            out[name] = _number(name, value)
    return out


def finite(value: float) -> float | None:
    """A cost as JSON can hold it; None where it is not finite, as for a tier that never answers."""
    value = float(value)
    return value if math.isfinite(value) else None


def _number(name: str, value: Any) -> Term:
    """A number of another library (a NumPy scalar) as a plain one."""
    try:
        return value if isinstance(value, str) else finite(value)
    except (TypeError, ValueError) as error:
        raise InputError(f"decision: term {name!r} is {value!r}; give a number, text, truth value or None") from error


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value
