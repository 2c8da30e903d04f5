"""What random operations on the resident plane are compared with, and the disturbances among them."""

import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from numem import LM, Memory
from numem.errors import CapacityError, DeadlineError, IntegrityError, StorageFullError, StoreError
from numem.runtime.engine import pages_for_lanes
from numem.runtime.paging.pages import layers_of
from numem.runtime.paging.pool import PagePool
from numem.runtime.sampling import Sampler
from numem.state.groups import Floor
from numem.state.spec import StateSpec
from numem.store.catalog.catalog import Facts
from numem.store.catalog.facts import State
from tests.store_fixtures import flip, sidecars

REFUSED = "a publication that was made to fail"
STEPS = 12
LANES = 8
SAMPLERS = (Sampler(), Sampler(temperature=0.8, seed=3), Sampler(temperature=1.2, top_k=40, top_p=0.9, seed=8))


@dataclass(frozen=True, slots=True)
class Trace:
    """What a sequence generates alone: tokens, bytes of the logits they were chosen from, and cache rows
    [2, layers, rows, width]."""

    generated: tuple[int, ...]
    logits: tuple[bytes, ...]
    kv: np.ndarray


class Alone:
    """Runs of one sequence by itself, made once each."""

    def __init__(self, lm: LM) -> None:
        self.lm = lm
        self.spec = lm.decoder.spec
        self._session = lm.session(pages=pages_for_lanes(1, 1024))
        self._known: dict[tuple[tuple[int, ...], Sampler], Trace] = {}

    def __call__(self, tokens: tuple[int, ...], sampler: Sampler) -> Trace:
        key = tokens, sampler
        if key not in self._known:
            with self._session.start(tokens) as c:
                logits = []
                for _ in range(STEPS):
                    c.step(sampler)
                    assert c.logits is not None
                    logits.append(c.logits.tobytes())
                self._known[key] = Trace(tuple(c.tokens[len(tokens) :]), tuple(logits), cache(c.kv(), self.spec))
        return self._known[key]


def cache(raw: np.ndarray, spec: StateSpec) -> np.ndarray:
    """Cache bytes as rows, uint8 [2, layers, rows, bytes of a row]."""
    item = 4 if spec.dtype == "float32" else 2
    return raw.reshape(2, spec.slabs[0].members, -1, spec.slabs[0].width * item)


def same_rows(found: np.ndarray, expected: np.ndarray, floors: Sequence[Floor], spec: StateSpec) -> bool:
    """Whether all rows that are held are those expected; of a windowed group, those from its floor on."""
    starts = {floor.group: floor.start for floor in floors}
    rows = found.shape[2]
    return all(
        np.array_equal(found[:, layer, at:], expected[:, layer, at:rows])
        for group in spec.retained
        for at in [starts.get(group.id, 0)]
        for layer in layers_of(group)
    )


class Prompts:
    """Prompts that begin alike: roots, and branches that leave them anywhere."""

    def __init__(self, seed: int, longest: int) -> None:
        self._rng = random.Random(seed)
        self.longest = longest
        self._made: list[tuple[int, ...]] = []

    def pick(self) -> tuple[int, ...]:
        """One that was picked before, a branch of one, or another root."""
        rng = self._rng
        kind = rng.random()
        if len(self._made) < 3 or kind < 0.08:
            long = rng.randint(min(276, self.longest), self.longest)
            length = rng.choice((1, 16, 17, rng.randint(2, 80), rng.randint(240, 275), long, long, self.longest))
            tokens = self._random(length)
        elif kind < 0.5:
            return rng.choice(self._made)
        else:
            origin = rng.choice(self._made)
            cut = rng.choice((rng.randint(1, len(origin)), len(origin), len(origin) // 16 * 16))
            tokens = (*origin[:cut], *self._random(rng.choice((0, 1, 15, 16, 40))))[: self.longest] or origin
        self._made.append(tokens)
        return tokens

    def _random(self, count: int) -> tuple[int, ...]:
        return tuple(self._rng.randrange(256) for _ in range(count))


class Disturbed:
    """What goes wrong in a memory: reads and publications that fail, copies that disappear or move."""

    def __init__(self, memory: Memory, root: Path, rng: random.Random) -> None:
        self.memory = memory
        self._root = root
        self._rng = rng
        self._failing = 0
        self._refusing = 0
        self._read: Callable[..., Any] = memory.read
        self._publish: Callable[..., Any] = memory.publish
        memory.publish = self._refused  # type: ignore[method-assign]  # the point of it
        memory.read = self._faulty  # type: ignore[method-assign]  # the point of it

    def fail_next(self, calls: int) -> None:
        """Let reads fail, or publications."""
        if self._rng.random() < 0.7:
            self._failing = calls
        else:
            self._refusing = calls

    def disturb(self) -> str:
        """One of the ways in which copies change."""
        memory, rng = self.memory, self._rng
        nodes = memory.nodes()
        if not nodes:
            return "nothing durable"
        chosen = rng.sample(nodes, min(len(nodes), 3))
        what = rng.choice(("promote", "promote", "evict", "lose", "flip"))
        if what == "promote":
            # Of a node that lost its copies there is nothing to promote.
            with contextlib.suppress(StoreError, CapacityError):
                memory.promote([node.id for node in chosen], "ssd")
        elif what == "evict":
            with contextlib.suppress(CapacityError):
                memory.residency.evict("ssd", 50_000)
        elif what == "flip":
            files = [path for path in sidecars(self._root) if path.stat().st_size]
            if files:
                path = rng.choice(files)
                flip(path, rng.randrange(path.stat().st_size))
        else:
            # Another process let these copies go.
            parts = memory._parts
            places = [place for content in chosen[0].pieces for place in memory.placements(content)]
            facts = [place.turned(parts.clock.next(), State.EVICTED, "stress") for place in places]
            parts.catalog.append(Facts(placements=facts))
        return f"{what} {[node.id.hex()[:8] for node in chosen]}"

    def _faulty(self, *args: Any, **kwargs: Any) -> Any:
        if self._failing > 0:
            self._failing -= 1
            raise self._rng.choice((IntegrityError, DeadlineError, StoreError))("a read that was made to fail")
        return self._read(*args, **kwargs)

    def _refused(self, *args: Any, **kwargs: Any) -> Any:
        if self._refusing > 0:
            self._refusing -= 1
            raise StorageFullError(REFUSED)
        return self._publish(*args, **kwargs)


def audit(pool: PagePool) -> None:
    """The books of a pool agree."""
    stats = pool.stats()
    assert stats.free + stats.resident + stats.reserved == stats.physical, stats
    assert min(stats.free, stats.resident, stats.reserved) >= 0, stats
    pool.check()


def seeded(sampler: Sampler, sample: int) -> Sampler:
    """The sampler of one of several samples."""
    return replace(sampler, seed=sampler.seed + sample) if sample else sampler
