"""Another policy on recorded decisions, offline: what it would have chosen, and what that is known to cost.

arrive   the policy chooses among the recorded alternatives of every prompt. Its cost is the prediction of that time, and
         the measurement where it chose what was executed.
evict    the policy is shown the recorded candidates of every plan as if it had seen them come and be used: each as often
         as recorded, its last use in the recorded order, all uses before that at once. It names victims for the same
         bytes. A victim was needed again where a later record shows it used: promoted into the tier again, or a candidate
         with more uses.

Nothing is executed: what a choice would have changed for the decisions after it is not known.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from numem.errors import InputError
from numem.policy import NAMES, make
from numem.policy.choice import choose
from numem.policy.decision import Alternative, Recorded

RECORDED = "recorded"
HINDSIGHT = "hindsight"
ARRIVE = (RECORDED, "measured", "recompute", "restore", "two-ended", HINDSIGHT)
EVICT = (RECORDED, *NAMES)
POLICIES: Mapping[str, tuple[str, ...]] = {"arrive": ARRIVE, "evict": EVICT}
# Uses of one candidate that are played back: more do not change what a policy makes of it.
_USES = 1024
_EVICT = "evict:"


@dataclass(frozen=True, slots=True)
class Arrivals:
    """A policy over recorded arrivals.

    Attributes:
        decisions, without: replayed, and passed over because no alternative is open to the policy.
        differ: choices that are not what was executed.
        predicted_ms, predicted: total predicted cost of its choices, and of how many a prediction exists.
        measured_ms, measured: total measured cost, and how many of its choices were executed.
        cost_ms: total of the measured cost where there is one, else the predicted.
        regret, exact: mean regret over the decisions where it is known (None where nowhere), and of how many of them it
            is measured; the others are estimates.
    """

    policy: str
    decisions: int
    without: int
    differ: int
    predicted_ms: float
    predicted: int
    measured_ms: float
    measured: int
    cost_ms: float
    regret: float | None
    exact: int


@dataclass(frozen=True, slots=True)
class Evictions:
    """A policy over recorded plans of tiers.

    Attributes:
        plans, without: replayed, and passed over because their records do not hold enough.
        differ: plans with other victims.
        bytes, rows: of all victims.
        again_bytes, again_rows: of victims that were used afterwards, as far as records show: a lower bound.
        regret: again_bytes / bytes, an estimate; None without bytes.
    """

    policy: str
    plans: int
    without: int
    differ: int
    bytes: int
    rows: int
    again_bytes: int
    again_rows: int
    regret: float | None


def arrivals(recorded: Iterable[Recorded], policy: str) -> Arrivals:
    """Replay the "arrive" decisions among `recorded` under a policy of `ARRIVE`.

    recorded    what was executed, else chosen
    measured    the policy of the runtime: a tier that was never measured is probed, else the least predicted cost
    recompute, restore, two-ended    that, by the cheapest tier; where it is not open, rows in pages, else recompute
    hindsight   the least cost, measured where it was executed, else predicted

    Raises:
        InputError: no such policy.
    """
    _known("arrive", policy)
    decisions = without = differ = 0
    predicted: list[float] = []
    measured: list[float] = []
    costs: list[float] = []
    regrets = []
    for one in recorded:
        if one.decision.kind != "arrive":
            continue
        chosen = _choose(one, policy)
        if chosen is None:
            without += 1
            continue
        decisions += 1
        differ += chosen.name != _executed(one)
        if chosen.cost_ms is not None:
            predicted.append(chosen.cost_ms)
        took = one.costs.get(chosen.name)
        if took is not None:
            measured.append(took)
        cost = chosen.cost_ms if took is None else took
        if cost is not None:
            costs.append(cost)
        regrets.append(one.regret(chosen.name))
    known = [found for found in regrets if found is not None]
    return Arrivals(
        policy,
        decisions,
        without,
        differ,
        math.fsum(predicted),
        len(predicted),
        math.fsum(measured),
        len(measured),
        math.fsum(costs),
        math.fsum(found.value for found in known) / len(known) if known else None,
        sum(found.measured for found in known),
    )


def evictions(recorded: Iterable[Recorded], policy: str) -> Evictions:
    """Replay the "evict" decisions of durable tiers among `recorded` under a policy of `EVICT`.

    Raises:
        InputError: no such policy.
    """
    _known("evict", policy)
    history = sorted((one for one in recorded if one.decision.kind in ("evict", "promote")), key=lambda o: o.when_ns)
    later = _uses(history)
    plans = without = differ = nbytes = rows = again_bytes = again_rows = 0
    for one in history:
        if one.decision.kind != "evict":
            continue
        left = _victims(one)
        found = left if policy == RECORDED else _replayed(one, left, policy)
        if not found:
            without += 1
            continue
        plans += 1
        differ += {a.name for a in found} != {a.name for a in left}
        for victim in found:
            size, count = int(victim.terms["bytes"] or 0), int(victim.terms["rows"] or 0)
            nbytes += size
            rows += count
            if _again(later.get((str(one.decision.inputs.get("tier")), victim.name), ()), one.when_ns, victim):
                again_bytes += size
                again_rows += count
    regret = again_bytes / nbytes if nbytes else None
    return Evictions(policy, plans, without, differ, nbytes, rows, again_bytes, again_rows, regret)


def _known(kind: str, policy: str) -> None:
    if policy not in POLICIES[kind]:
        raise InputError(f"replay: no policy {policy!r} of {kind!r} decisions; known: {', '.join(POLICIES[kind])}")


def _executed(one: Recorded) -> str:
    return one.took.choice if one.took else one.decision.choice


def _choose(one: Recorded, policy: str) -> Alternative | None:
    """The policy's choice among the alternatives that are not declined; None where there is none."""
    found = one.decision.alternatives
    if policy == RECORDED:
        return next((a for a in found if a.name == _executed(one)), None)
    able = [a for a in found if not a.declined]
    if policy == "measured":
        try:
            return choose(found)
        except InputError:  # nothing has a cost
            return None
    if policy == HINDSIGHT:
        costs = {a.name: a.cost_ms for a in able if a.cost_ms is not None} | one.costs
        known = [a for a in found if a.name in costs]
        return min(known, key=lambda a: costs[a.name]) if known else None
    by_name = {a.name: a for a in able}
    ways = [a for a in able if a.name.startswith(f"{policy}:")]
    if ways:
        return min(ways, key=lambda a: math.inf if a.cost_ms is None else a.cost_ms)
    return by_name.get("resident") or by_name.get("recompute")


def _victims(one: Recorded) -> list[Alternative]:
    """What left, where the record names all of it with its terms."""
    gone = {_EVICT + id.hex() for id in (one.decision.subject, *one.decision.others)}
    found = [a for a in one.decision.alternatives if a.name in gone]
    return found if len(found) == len(gone) and all(_complete(a) for a in one.decision.alternatives) else []


def _complete(a: Alternative) -> bool:
    return all(isinstance(a.terms.get(name), int) for name in ("bytes", "rows", "uses", "idle"))


def _replayed(one: Recorded, left: Sequence[Alternative], policy: str) -> list[Alternative]:
    """The victims that another policy names for the bytes that had to leave; none where it cannot."""
    candidates = {a.name: a for a in one.decision.alternatives}
    known = one.decision.inputs
    need = int(known.get("need") or 0) - int(known.get("stray_bytes") or 0)
    if not left or need < 1:
        return []
    state = make(policy, max(1, sum(int(a.terms["bytes"] or 1) for a in candidates.values())))
    by_age = sorted(candidates.values(), key=lambda a: -int(a.terms["idle"] or 0))

    def admit(a: Alternative) -> None:
        parent = f"{_EVICT}{a.terms.get('parent')}"
        state.admit(
            a.name, int(a.terms["bytes"] or 1), float(a.terms["rows"] or 0), parent if parent in candidates else None
        )

    often = [a for a in by_age if int(a.terms["uses"] or 1) > 1]
    for a in often:
        admit(a)
        for _ in range(min(_USES, int(a.terms["uses"] or 1)) - 2):
            state.touch(a.name)
    for a in by_age:
        if a in often:
            state.touch(a.name)
        else:
            admit(a)
    named = state.victims(need + state.capacity - state.used, lambda key: bool(candidates[str(key)].declined))
    return [candidates[str(key)] for key in named or ()]


# (when, uses of a candidate then; None where it was promoted)
_Seen = tuple[int, int | None]


def _uses(history: Iterable[Recorded]) -> dict[tuple[str, str], list[_Seen]]:
    """What records tell of each state in each tier, oldest first."""
    found: dict[tuple[str, str], list[_Seen]] = {}
    for one in history:
        tier = str(one.decision.inputs.get("tier"))
        if one.decision.kind == "promote":
            for id in (one.decision.subject, *one.decision.others):
                found.setdefault((tier, _EVICT + id.hex()), []).append((one.when_ns, None))
        else:
            for a in one.decision.alternatives:
                uses = a.terms.get("uses")
                if isinstance(uses, int):
                    found.setdefault((tier, a.name), []).append((one.when_ns, uses))
    return found


def _again(seen: Iterable[_Seen], when_ns: int, victim: Alternative) -> bool:
    """Whether a candidate was used after a plan."""
    before = int(victim.terms["uses"] or 0)
    return any(when > when_ns and (uses is None or uses > before) for when, uses in seen)
