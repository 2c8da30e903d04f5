"""The sharing planner: prefixes computed once, and nothing else."""

import itertools
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from numem.errors import InputError
from numem.identity.chain import CHUNK_TOKENS
from numem.job.sharing import GAIN, Prefix, shared_prefixes

# Few symbols and pieces repeated at random: prompts that share beginnings of many lengths.
PIECES = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=6)
PROMPTS = st.lists(PIECES.map(lambda p: [t for piece in p for t in piece]), max_size=10)


def common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def lengths(prompts: Sequence[Sequence[int]], found: Sequence[Prefix]) -> list[int]:
    """Length of each prompt's prefix, 0 for none."""
    out = [0] * len(prompts)
    for prefix in found:
        for index in prefix.prompts:
            out[index] = len(prefix.tokens)
    return out


@settings(deadline=None)
@given(PROMPTS, st.integers(1, 5))
def test_a_prefix_is_one_and_every_prompt_is_in_at_most_one(prompts: list[list[int]], gain: int) -> None:
    found = shared_prefixes(prompts, gain)
    members = [index for prefix in found for index in prefix.prompts]
    assert len(members) == len(set(members))
    for prefix in found:
        assert prefix.tokens and prefix.prompts == tuple(sorted(prefix.prompts)) and prefix.prompts
        for index in prefix.prompts:
            # The last token is pending: a prefix never covers it.
            assert tuple(prompts[index][: len(prefix.tokens)]) == prefix.tokens
            assert len(prefix.tokens) <= len(prompts[index]) - 1
    assert len({prefix.tokens for prefix in found}) == len(found)
    assert [p.tokens for p in found] == sorted(p.tokens for p in found)


@settings(deadline=None)
@given(PROMPTS, st.integers(1, 5))
def test_what_two_prompts_share_is_computed_once_up_to_less_than_the_gain(prompts: list[list[int]], gain: int) -> None:
    assigned = lengths(prompts, shared_prefixes(prompts, gain))
    for a, b in itertools.permutations(range(len(prompts)), 2):
        shared = common(prompts[a][:-1], prompts[b][:-1])
        assert shared - assigned[a] < gain


@settings(deadline=None)
@given(PROMPTS, st.integers(1, 5))
def test_a_prefix_shorter_than_a_chunk_is_shared_and_worth_it(prompts: list[list[int]], gain: int) -> None:
    for prefix in shared_prefixes(prompts, gain):
        if len(prefix.tokens) < CHUNK_TOKENS:
            users = [p for p in prompts if tuple(p[:-1][: len(prefix.tokens)]) == prefix.tokens]
            assert len(prefix.tokens) >= gain and len(users) >= 2


@settings(deadline=None)
@given(PROMPTS, st.integers(1, 5), st.randoms(use_true_random=False))
def test_table_order_does_not_matter(prompts: list[list[int]], gain: int, random: Random) -> None:
    order = list(range(len(prompts)))
    random.shuffle(order)
    shuffled = shared_prefixes([prompts[i] for i in order], gain)
    back = tuple(Prefix(p.tokens, tuple(sorted(order[i] for i in p.prompts))) for p in shuffled)
    assert back == shared_prefixes(prompts, gain)


def test_passages_with_questions_give_one_prefix_each() -> None:
    """The shape of the main job: 3 passages, 8 questions each, behind one template head."""
    head = list(range(20))
    passages = [[1000 * p + i for i in range(400)] for p in (1, 2, 3)]
    prompts = [[*head, *passage, 7, 8, 100 + q, 101 + q] for passage in passages for q in range(8)]
    found = shared_prefixes(prompts)
    assert [len(p.tokens) for p in found] == [422] * 3
    assert [p.prompts for p in found] == [tuple(range(8 * i, 8 * i + 8)) for i in range(3)]


def test_a_prompt_that_shares_nothing_has_its_own_prefix_when_it_fills_a_chunk() -> None:
    short, long = [1] * CHUNK_TOKENS, [2] * (CHUNK_TOKENS + 1)
    assert shared_prefixes([short, long]) == (Prefix(tuple([2] * CHUNK_TOKENS), (1,)),)


def test_equal_prompts_share_all_but_the_pending_token() -> None:
    prompt = list(range(GAIN + 1))
    assert shared_prefixes([prompt, prompt, prompt]) == (Prefix(tuple(range(GAIN)), (0, 1, 2)),)
    assert shared_prefixes([prompt[:-1], prompt[:-1]]) == ()


def test_a_prompt_that_only_differs_in_its_last_token_shares_the_whole_prefix() -> None:
    prompts = [[*range(50), last] for last in (1, 2)]
    assert shared_prefixes(prompts) == (Prefix(tuple(range(50)), (0, 1)),)


def test_few_more_shared_words_do_not_make_a_prefix_of_their_own() -> None:
    base = list(range(100))
    prompts = [[*base, 1, 2, 3, 5, 0], [*base, 1, 2, 3, 6, 0], [*base, 9, 9, 0]]
    assert shared_prefixes(prompts) == (Prefix(tuple(base), (0, 1, 2)),)
    assert [len(p.tokens) for p in shared_prefixes(prompts, gain=3)] == [100, 103]


@pytest.mark.parametrize("prompts", [[], [[]], [[], []], [[1]], [[1], [1]], [[1, 2], [1, 3]]])
def test_empty_and_tiny_tables_have_no_prefixes(prompts: list[list[int]]) -> None:
    assert shared_prefixes(prompts) == ()


def test_a_conversation_of_two_thousand_turns_nests_without_limit() -> None:
    prompts = [[7] * n for n in range(2, 2002)]
    found = shared_prefixes(prompts, gain=1)
    assert sorted(index for prefix in found for index in prefix.prompts) == list(range(2000))
    assert max(len(prefix.tokens) for prefix in found) == 1999


@pytest.mark.parametrize("gain", [0, -1])
def test_a_gain_below_one_token_is_refused(gain: int) -> None:
    with pytest.raises(InputError, match="gain"):
        shared_prefixes([[1, 2], [1, 3]], gain)
