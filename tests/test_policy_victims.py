"""Each policy on traces that are short enough to follow by hand: exactly who leaves, and when."""

import pytest

from numem.errors import CapacityError, InputError
from numem.policy import DEFAULT, NAMES, Key, Policy, make
from numem.policy.eviction.admission import SecondTouch
from numem.policy.eviction.history import History


def use(policy: Policy, key: str, size: int = 1, cost: float = 1.0, parent: str | None = None) -> str:
    """One use of a key; the keys that left for it."""
    if policy.touch(key):
        return ""
    victims = policy.victims(size, key=key)
    assert victims is not None
    for victim in victims:
        policy.evict(victim)
    policy.admit(key, size, cost, parent)
    return "".join(map(str, victims))


@pytest.mark.parametrize(
    ("name", "capacity", "trace", "leaving"),
    [
        # b is the older one when d comes, c when b comes back.
        ("lru", 3, "abcadb", "bc"),
        # a2 b1 c2: b. It comes back with two uses: d1. d comes back with two: of a2 c2 b2 the oldest use is a's.
        ("lfu", 3, "aabccdbd", "bda"),
        # a was used again and moves to main, b goes; b is a ghost and enters main, c goes; c is a ghost, small is empty
        # and the oldest of main is a.
        ("s3fifo", 2, "aabcbc", "bca"),
        # Uses in main are rounds there: at the second c, main is a (one use) and b, so that b goes.
        ("s3fifo", 2, "aabcbac", "bcb"),
        # T1 b, T2 a: b goes for c. b returns from B1: p = 1, so that T2 gives a. a returns from B2: p = 0, T1 gives c.
        ("arc", 2, "abacba", "bac"),
        # Used once: b, then c, although a is the older use.
        ("slru", 2, "aabcd", "bc"),
        # b comes back with its second use, and then a is the older of two in the second segment.
        ("slru", 2, "aabcbc", "bca"),
        # H: a 2, b 1 leaves, L = 1. c 2 is younger than a 2: a leaves, L = 2.
        ("cost", 2, "aabcd", "ba"),
        # a is used again after 1: T = 1, V(a) = 2 + 1 ties with b's 3, and a is the older use. Then b 3, c 4.
        ("interval", 2, "aabcd", "ab"),
        # a is used again after 3: T = 3, V(a) = 4 + 3. b 2, c 3 and d 5 go before it, then it goes before f 7.
        ("interval", 3, "abcadefgh", "bcdea"),
    ],
)
def test_short_traces(name: str, capacity: int, trace: str, leaving: str) -> None:
    policy = make(name, capacity)
    assert "".join(use(policy, key) for key in trace) == leaving


@pytest.mark.parametrize("name", [name for name in NAMES if make(name, 1).leaf_first])
def test_a_parent_leaves_after_its_children(name: str) -> None:
    """A chain goes from its end; what is protected keeps everything that it continues."""
    policy = make(name, 3)
    use(policy, "a")
    use(policy, "b", parent="a")
    use(policy, "c", parent="b")
    assert policy.victims(3) == ["c", "b", "a"]
    assert policy.victims(2) == ["c", "b"]
    assert policy.victims(3) == ["c", "b", "a"]
    assert policy.victims(1, lambda key: key == "c") is None
    assert policy.victims(2, lambda key: key == "b") is None
    assert policy.victims(1, lambda key: key == "b") == ["c"]
    assert use(policy, "d") == "c"
    assert use(policy, "e") == "b"
    assert "a" in policy and len(policy) == policy.used == 3


@pytest.mark.parametrize("name", [name for name in NAMES if make(name, 1).leaf_first])
def test_a_child_may_come_before_its_parent(name: str) -> None:
    policy = make(name, 2)
    use(policy, "child", parent="root")
    use(policy, "root")
    assert policy.victims(1) == ["child"]
    policy.remove("child")
    assert policy.victims(2) == ["root"]


def test_cost_per_unit_times_uses() -> None:
    """H = L + F C / S: per unit a is worth 2, b 1, c 3."""
    policy = make("cost", 10)
    use(policy, "a", 4, 8.0)
    use(policy, "b", 4, 4.0)
    use(policy, "c", 2, 6.0)
    assert policy.victims(4) == ["b"]
    assert policy.victims(8) == ["b", "a"]
    policy.touch("b")
    policy.touch("b")  # 3, used later than c
    assert policy.victims(10) == ["a", "c", "b"]


def test_cost_ages() -> None:
    """What was used often once is overtaken: L rises by 1 with every round of new keys, and hot's 4 is passed."""
    policy = make("cost", 2)
    for _ in range(4):
        use(policy, "hot")
    assert [use(policy, key) for key in "abcdef"] == ["", "a", "b", "c", "hot", "d"]


def test_residency_planning() -> None:
    """The victims of the page plan of issue 4: cold (0.25 a page) and not hot (8.1 a page)."""
    policy = make("cost", 4)
    use(policy, "cold", 2, 0.1 * (10 - 5))
    use(policy, "hot", 2, 0.9 * (20 - 2))
    assert policy.victims(2) == ["cold"]
    assert policy.victims(2, lambda key: key == "cold") == ["hot"]
    assert policy.victims(5) is None and len(policy) == 2


@pytest.mark.parametrize("name", NAMES)
def test_asking_is_no_use(name: str) -> None:
    """mooncake#2187: probes of existence keep nothing resident."""
    policy = make(name, 2)
    use(policy, "a")
    use(policy, "b")
    for _ in range(1000):
        assert "a" in policy
    assert use(policy, "c") == "a"


@pytest.mark.parametrize("name", NAMES)
def test_the_newest_is_not_the_first_to_leave(name: str) -> None:
    """mooncake#3101: what has just been admitted, used before or not, leaves after its equals."""
    policy = make(name, 4)
    for key in "abc":
        policy.admit(key, 1)
    policy.admit("new", 1)
    victims = policy.victims(4)
    assert victims is not None and victims[-1] == "new"


@pytest.mark.parametrize("name", NAMES)
def test_what_was_removed_is_forgotten(name: str) -> None:
    """After a removal a key is like a new one: a policy that never saw it decides alike."""
    seen, fresh = make(name, 2), make(name, 2)
    for _ in range(3):
        use(seen, "x")
    seen.remove("x")
    assert "x" not in seen and seen.used == 0
    for policy in (seen, fresh):
        use(policy, "x")
        use(policy, "y")
        use(policy, "y")
    assert seen.victims(2) == fresh.victims(2) == ["x", "y"]


@pytest.mark.parametrize("name", NAMES)
def test_misuse_changes_nothing(name: str) -> None:
    """mooncake#2286: the account is of this policy's own keys only; a key that leaves twice is counted once."""
    policy = make(name, 4)
    policy.admit("a", 3)
    with pytest.raises(CapacityError, match="3 of 4"):
        policy.admit("b", 2)
    with pytest.raises(InputError, match="already"):
        policy.admit("a", 1)
    for size, cost in ((0, 1.0), (1, -1.0), (1, float("nan"))):
        with pytest.raises(InputError, match="size"):
            policy.admit("b", size, cost)
    assert policy.victims(5) is None
    assert policy.victims(4) == ["a"] and policy.victims(1) == []
    policy.evict("b")
    policy.evict("a")
    policy.evict("a")
    policy.remove("a")
    assert policy.used == len(policy) == 0
    policy.admit("b", 4)
    assert policy.used == 4


@pytest.mark.parametrize("name", NAMES)
def test_a_predicate_that_fails_changes_nothing(name: str) -> None:
    policy = make(name, 3)
    for key in "abc":
        use(policy, key)
    policy.touch("c")
    before = policy.victims(3)

    def broken(key: Key) -> bool:
        if key == "b":
            raise LookupError("b")
        return False

    with pytest.raises(LookupError):
        policy.victims(3, broken)
    assert policy.victims(3) == before and len(policy) == 3


def test_names() -> None:
    assert {"lru", "lfu", "s3fifo", "arc", "slru", "cost", "interval"} == set(NAMES) and DEFAULT in NAMES
    with pytest.raises(InputError, match="mru.*lru, lfu"):
        make("mru", 1)
    with pytest.raises(InputError, match="capacity 0"):
        make("lru", 0)


def test_history_forgets_the_least_recently_used() -> None:
    history = History(limit=2)
    assert [history.use(key) for key in "abacb"] == [1, 1, 2, 1, 1]
    assert [history.uses(key) for key in "abc"] == [0, 1, 1]
    history.forget("b")
    assert history.uses("b") == 0


def test_second_touch() -> None:
    """vllm#35259: what is used once is never written."""
    selective = SecondTouch()
    assert [selective.use(key) for key in "abab"] == [False, False, True, True]
    selective.forget("a")
    assert not selective.use("a") and selective.use("a")
