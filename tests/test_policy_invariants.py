"""What holds for every policy under any sequence of calls, and the ordered ones against models without cleverness."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from numem.policy import NAMES, Policy, make

CAPACITY = 12
# Key k continues k // 2: a binary tree of 31 keys, so that siblings and chains occur.
KEYS = st.integers(1, 31)
CALLS = st.lists(
    st.tuples(st.sampled_from(("use", "use", "use", "use", "remove", "evict")), KEYS, st.frozensets(KEYS, max_size=3)),
    max_size=120,
)


def parent_of(key: int) -> int | None:
    return key // 2 or None


def size_of(key: int) -> int:
    return 1 + key % 3


def snapshot(policy: Policy) -> set[int]:
    return {key for key in range(1, 32) if key in policy}


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(calls=CALLS)
def test_invariants(name: str, calls: list[tuple[str, int, frozenset[int]]]) -> None:
    """Never above capacity; protected keys stay; no child is stranded; a plan changes nothing and is no longer than
    it needs to be."""
    policy = make(name, CAPACITY)
    for call, key, protected in calls:
        before = snapshot(policy)
        if call == "remove":
            policy.remove(key)
        elif call == "evict":
            policy.evict(key)
        elif not policy.touch(key):
            size = size_of(key)
            victims = policy.victims(size, protected.__contains__, key)
            assert snapshot(policy) == before
            if victims is None:
                free = CAPACITY - policy.used
                movable = before - protected
                if policy.leaf_first:
                    movable = {k for k in movable if not any(below(k, p) for p in protected & before)}
                assert free + sum(map(size_of, movable)) < size
                continue
            assert len(set(victims)) == len(victims) and set(victims) <= before - protected
            if victims:
                assert policy.used - sum(size_of(v) for v in before & set(victims[:-1])) + size > CAPACITY
            for victim in victims:
                if policy.leaf_first:
                    assert not any(parent_of(k) == victim for k in snapshot(policy)), "a child is stranded"
                policy.evict(victim)
            policy.admit(key, size, float(key % 5), parent_of(key))
            assert key in policy
        now = snapshot(policy)
        assert policy.used == sum(map(size_of, now)) <= CAPACITY
        assert len(policy) == len(now)


def below(ancestor: int, key: int) -> bool:
    """Whether a key stands below another through keys that continue each other."""
    while key > ancestor:
        key //= 2
    return key == ancestor


@dataclass
class Model:
    """A policy that looks at every key for every victim. `value` is of (uses, age, key)."""

    value: Callable[[int, float, int], float]
    leaf_first: bool
    ages: bool = False
    tick: int = 0
    age: float = 0.0
    uses: dict[int, int] = field(default_factory=dict)
    ranks: dict[int, tuple[float, int]] = field(default_factory=dict)

    def observe(self, key: int) -> None:
        """Learn from a use, before it is counted."""

    def use(self, key: int) -> list[int]:
        """One use of a key; the keys that left for it."""
        self.tick += 1
        self.observe(key)
        self.uses[key] = self.uses.get(key, 0) + 1
        left = []
        while key not in self.ranks and sum(map(size_of, self.ranks)) + size_of(key) > CAPACITY:
            leaves = [k for k in self.ranks if not self.leaf_first or not any(parent_of(c) == k for c in self.ranks)]
            victim = min(leaves, key=self.ranks.__getitem__)
            rank = self.ranks.pop(victim)
            if self.ages:
                self.age = max(self.age, rank[0])
            left.append(victim)
        value = self.value(self.uses[key], self.age, key)
        self.ranks[key] = (max(value, self.ranks.get(key, (value, 0))[0]), self.tick)
        return left


@dataclass
class IntervalModel(Model):
    """Learns the mean interval between first and second uses; `age` is that mean."""

    last: dict[int, int] = field(default_factory=dict)
    seen: int = 0

    def observe(self, key: int) -> None:
        if self.uses.get(key) == 1:
            self.seen += 1
            self.age += (self.tick - self.last[key] - self.age) / self.seen
        self.last[key] = self.tick


def interval_model() -> Model:
    def value(uses: int, interval: float, key: int) -> float:
        return model.tick + interval * (0 if uses == 1 else 1 if uses < 8 else math.log2(uses))

    model = IntervalModel(value, True, age=float(CAPACITY))
    return model


MODELS: dict[str, Callable[[], Model]] = {
    "lru": lambda: Model(lambda uses, age, key: 0.0, False),
    "lfu": lambda: Model(lambda uses, age, key: float(uses), False),
    "slru": lambda: Model(lambda uses, age, key: float(min(uses, 2)), True),
    "cost": lambda: Model(lambda uses, age, key: age + uses * (key % 5) / size_of(key), True, ages=True),
    "interval": interval_model,
}


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=80, deadline=None)
@given(keys=st.lists(KEYS, max_size=150))
def test_equal_to_a_naive_model(name: str, keys: list[int]) -> None:
    policy, model = make(name, CAPACITY), MODELS[name]()
    for key in keys:
        expected = model.use(key)
        if policy.touch(key):
            assert expected == []
            continue
        victims = policy.victims(size_of(key), key=key)
        assert victims == expected
        for victim in victims:
            policy.evict(victim)
        policy.admit(key, size_of(key), float(key % 5), parent_of(key))


@pytest.mark.parametrize("name", NAMES)
def test_bookkeeping_stays_bounded(name: str) -> None:
    """Keys that leave by removal, not by eviction, leave nothing behind: the account of 20,000 ends as it began."""
    policy = make(name, 8)
    for number in range(20_000):
        policy.touch(number)
        policy.admit(number, 1, 1.0, number - 1)
        if number >= 4:
            policy.remove(number - 4)
    held = [value for value in vars(policy).values() if hasattr(value, "__len__")]
    assert all(len(value) < 200 for value in held) and len(policy) == policy.used == 4
