"""Decisions in plain sentences with numbers: what was done, what it was expected to cost, what it cost, what else there was."""

from collections.abc import Iterable, Mapping

from numem.policy.decision import Alternative, Decision, Measured, Recorded, Term

SHORT = 12
# Alternatives of an eviction that a sentence names.
_NAMED = 4


def explain(decision: Decision, *measured: Measured) -> list[str]:
    """What was decided and what became of it, a sentence each.

    Args:
        measured: executions of alternatives, the first of which is what happened.
    """
    lines = {"arrive": _arrive, "evict": _evict, "promote": _promote, "drop": _drop}.get(decision.kind, _other)(
        decision, measured
    )
    if decision.kind == "arrive":
        lines += _regret(Recorded("", 0, decision, measured))
    return lines


def alternative(one: Alternative, measured: Mapping[str, float]) -> str:
    """One alternative with its terms, or why it was declined."""
    costs = [] if one.cost_ms is None else [f"predicted {ms(one.cost_ms)}"]
    costs += [f"took {ms(measured[one.name])}"] if one.name in measured else []
    said = ", ".join(costs) or "no cost known"
    if one.declined:
        said = f"declined: {one.declined}" + (f" ({said})" if costs else "")
    terms = terms_of(one.terms)
    return f"{one.name}: {said}{f'; {terms}' if terms else ''}"


def terms_of(terms: Mapping[str, Term]) -> str:
    """Terms on one line."""
    return ", ".join(f"{name} {number(value)}" for name, value in terms.items() if value is not None)


def number(value: Term) -> str:
    """A term as people read it."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def counted(value: Term, one: str, many: str = "") -> str:
    """A number of things: "1 state", "1,200 states", "2 entries"."""
    return f"{number(value)} {one if value == 1 else many or one + 's'}"


def ms(value: float) -> str:
    """A time: whole ms, or three digits where it is short."""
    return f"{value:,.0f} ms" if value >= 10 else f"{value:.3g} ms"


def _arrive(decision: Decision, measured: tuple[Measured, ...]) -> list[str]:
    took = measured[0] if measured else None
    name = took.choice if took else decision.choice
    by_name = {a.name: a for a in decision.alternatives}
    done = by_name.get(name, Alternative(name))
    tokens = decision.inputs.get("tokens")
    known = {**done.terms, **(took.terms if took else {})}
    rows = known.get("restored", known.get("loaded", known.get("tokens"))) if ":" in name else known.get("tokens")
    how, _, tier = name.partition(":")
    of = f"{number(rows)} of {counted(tokens, 'token')}" if tokens is not None and rows is not None else "its tokens"
    said = {
        "restore": f"restored {of} from {tier}",
        "two-ended": f"restored {of} from {tier}, from the back, while the others were computed from the front",
        "resident": f"reused {of} that were in pages",
        "recompute": f"computed {counted(tokens, 'token')}" if tokens is not None else "computed its tokens",
    }.get(how, f"chose {name}")
    parts = [] if done.cost_ms is None else [f"predicted {ms(done.cost_ms)}"]
    other = _compared(decision, done)
    if other is not None and other.cost_ms is not None:
        parts.append(f"{_way(other.name)} {ms(other.cost_ms)}")
    parts.append(f"took {ms(took.cost_ms)}" if took else "it has not been measured")
    lines = [f"{said}: {', '.join(parts)}"]
    if done.terms.get("probe"):
        lines.append(f"what {tier or 'computing'} costs was not known: this measured it, while computing went on")
    if name != decision.choice:
        lines.append(f"{decision.choice} was chosen ({decision.policy}), and could not be carried out")
    return lines


def _compared(decision: Decision, done: Alternative) -> Alternative | None:
    """What the done one is held against: recompute, or for that one the cheapest other that was open."""
    others = [a for a in decision.alternatives if a.name != done.name and a.cost_ms is not None]
    plain = [a for a in others if a.name == "recompute"]
    able = [a for a in others if not a.declined]
    found = plain or sorted(able, key=lambda a: a.cost_ms or 0.0)
    return found[0] if found else None


def _way(name: str) -> str:
    how, _, tier = name.partition(":")
    return f"{how} from {tier}" if tier else how


def _regret(recorded: Recorded) -> list[str]:
    found = recorded.regret()
    if found is None:
        return []
    why = "every alternative was executed" if found.measured else "from predictions; not every alternative was executed"
    if sum(not a.declined for a in recorded.decision.alternatives) == 1:
        why = "no other alternative was open"
    return [f"regret {found.value:.1%} ({found.label}: {why})"]


def _evict(decision: Decision, measured: tuple[Measured, ...]) -> list[str]:
    known = decision.inputs
    gone = [decision.subject, *decision.others] if decision.subject else list(decision.others)
    count = known.get("nodes", known.get("evictions", len(gone)))
    what = counted(count, "state" if "nodes" in known else "kept sequence")
    size = f" ({counted(known['bytes'], 'byte')})" if "bytes" in known else ""
    why = f": {known['reason']}" if known.get("reason") else ""
    lines = [f"evicted {what}{size} from {known.get('tier', 'a tier')} by {decision.policy}{why}"]
    if "required_pages" in known:
        lines.append(
            f"pages needed {number(known['required_pages'])}, free before {number(known.get('free_pages'))}, free after "
            f"{number(known.get('free_pages_after_eviction'))}"
        )
    elif "used" in known:
        limit = known.get("capacity")
        room = f" of {number(limit)}" if limit is not None else ""
        lines.append(f"states there {number(known.get('resident'))}, bytes used {number(known['used'])}{room}")
    leaving = int(count) if isinstance(count, int | float) else len(gone)
    lines += _listed("went", decision.alternatives[:leaving])
    lines += _listed("stayed", decision.alternatives[leaving:])
    return lines


def _listed(what: str, alternatives: Iterable[Alternative]) -> list[str]:
    found = list(alternatives)
    if not found:
        return []
    named = "; ".join(
        f"{a.name.removeprefix('evict:')[:SHORT]} ({terms_of(a.terms)})" if a.terms else a.name[:SHORT]
        for a in found[:_NAMED]
    )
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return [f"{what}: {named}{more}"]


def _promote(decision: Decision, measured: tuple[Measured, ...]) -> list[str]:
    known = decision.inputs
    took = known.get("ms")
    line = (
        f"promoted {counted(known.get('pieces'), 'piece')} of {counted(1 + len(decision.others), 'state')} "
        f"({counted(known.get('bytes'), 'byte')}) to {known.get('tier')}, from {decision.choice.removeprefix('from:')}"
        + (f", in {ms(took)}" if isinstance(took, int | float) else "")
    )
    return [line, *([f"{counted(known['failed'], 'piece')} could not be copied"] if known.get("failed") else [])]


def _drop(decision: Decision, measured: tuple[Measured, ...]) -> list[str]:
    known = decision.inputs
    line = (
        f"dropped {counted(known.get('entries'), 'cache entry', 'cache entries')} "
        f"({counted(known.get('bytes'), 'byte')}) at the limit {known.get('reason')}, {number(known.get('waiting'))} "
        "waiting"
    )
    return [line, str(known["sentence"])] if known.get("sentence") else [line]


def _other(decision: Decision, measured: tuple[Measured, ...]) -> list[str]:
    chosen = decision.chosen
    parts = [] if chosen.cost_ms is None else [f"predicted {ms(chosen.cost_ms)}"]
    parts += [f"took {ms(measured[0].cost_ms)}"] if measured else []
    known = terms_of(decision.inputs)
    return [
        f"{decision.kind}: chose {decision.choice} by {decision.policy}{': ' if parts else ''}{', '.join(parts)}",
        *([f"known: {known}"] if known else []),
    ]
