"""The prefix chain: what changes an id, what does not, and where a plan cuts."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from numem.errors import InputError, OutOfPlanError
from numem.identity.chain import (
    CHUNK_TOKENS,
    PAGE_TOKENS,
    boundary_id,
    common_tokens,
    pack_tokens,
    page_id,
    page_ids,
    plan,
    unpack_tokens,
)

SCOPE = bytes(range(32))
TOKEN = st.integers(-(2**63), 2**63 - 1)
TOKENS = st.lists(TOKEN, min_size=1, max_size=80)


def end_of(tokens: Sequence[int], scope: bytes = SCOPE) -> bytes:
    return boundary_id(scope, tokens, len(tokens))


@settings(deadline=None)
@given(TOKENS, st.data())
def test_changing_two_adjacent_tokens_changes_the_id(tokens: list[int], data: st.DataObject) -> None:
    """Megatron-LM#4158: token[j] += 31 with token[j+1] -= 1 collides in a polynomial hash."""
    at = data.draw(st.integers(0, len(tokens) - 1))
    changed = list(tokens)
    changed[at] = tokens[at] + 31 if tokens[at] <= 2**63 - 32 else tokens[at] - 31
    if at + 1 < len(tokens):
        changed[at + 1] = tokens[at + 1] - 1 if tokens[at + 1] > -(2**63) else tokens[at + 1] + 1
    assert end_of(changed) != end_of(tokens)


@settings(deadline=None)
@given(TOKENS, st.data())
def test_swapping_two_unequal_neighbours_changes_the_id(tokens: list[int], data: st.DataObject) -> None:
    """Megatron-LM#4158: swaps of adjacent tokens."""
    tokens = [*tokens, tokens[-1] ^ 1]
    at = data.draw(st.sampled_from([i for i in range(len(tokens) - 1) if tokens[i] != tokens[i + 1]]))
    swapped = [*tokens[:at], tokens[at + 1], tokens[at], *tokens[at + 2 :]]
    assert end_of(swapped) != end_of(tokens)


@settings(deadline=None)
@given(TOKENS, TOKENS, TOKENS)
def test_an_equal_suffix_under_another_parent_has_another_id(a: list[int], b: list[int], suffix: list[int]) -> None:
    pages = page_ids(end_of(a), pack_tokens(suffix))
    others = page_ids(end_of(b), pack_tokens(suffix))
    assert (set(pages) & set(others) == set()) if a != b else pages == others


def test_blocks_in_the_other_order_differ_at_every_level() -> None:
    """AIBrix rolling_hash_key_builder: the parent digest goes inside the hash, so A,B and B,A never meet."""
    a, b = list(range(16)), list(range(100, 116))
    forward, backward = page_ids(SCOPE, pack_tokens([*a, *b])), page_ids(SCOPE, pack_tokens([*b, *a]))
    assert len({*forward, *backward}) == 4


@settings(deadline=None)
@given(TOKENS, st.integers(1, 40))
def test_a_prefix_has_the_ids_of_the_whole_up_to_its_last_full_page(tokens: list[int], cut: int) -> None:
    cut = min(cut, len(tokens))
    full = cut // PAGE_TOKENS
    assert page_ids(SCOPE, pack_tokens(tokens[:cut]))[:full] == page_ids(SCOPE, pack_tokens(tokens))[:full]


@settings(deadline=None)
@given(TOKENS)
def test_the_fast_path_gives_the_ids_of_single_pages(tokens: list[int]) -> None:
    parent, expected = SCOPE, []
    for at in range(0, len(tokens), PAGE_TOKENS):
        parent = page_id(parent, pack_tokens(tokens[at : at + PAGE_TOKENS]))
        expected.append(parent)
    assert page_ids(SCOPE, pack_tokens(tokens)) == tuple(expected)
    assert page_ids(SCOPE, pack_tokens(tokens), extras={999: [b"\x00" * 32]}) == tuple(expected)


@settings(deadline=None)
@given(TOKENS)
def test_tokens_survive_packing(tokens: list[int]) -> None:
    packed = pack_tokens(tokens)
    assert unpack_tokens(packed) == tokens
    assert packed == b"".join(t.to_bytes(8, "big", signed=True) for t in tokens)


@pytest.mark.parametrize(
    "tokens", [[1.7], [1.0], [True], ["1"], [2**63], [[1, 2]], np.array([1.0]), np.array([2**63], dtype=np.uint64)]
)
def test_tokens_that_are_not_integers_are_refused(tokens: Sequence[int]) -> None:
    """Nothing is truncated or wrapped on the way into an id."""
    with pytest.raises(InputError, match="integers of 64 bits"):
        pack_tokens(tokens)


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint16])
def test_token_arrays_of_any_integer_type_have_the_ids_of_lists(kind: type) -> None:
    assert end_of(np.arange(40, dtype=kind)) == end_of(list(range(40)))  # type: ignore[arg-type]  # an array is accepted


def test_extras_enter_the_id_in_full() -> None:
    """lmcache#3301, lmcache#4086: image digests that agree in 16 bits must still give other ids."""
    a, b = b"\x00" * 32, b"\x00" * 31 + b"\x01"
    packed = pack_tokens(range(16))
    ids = {page_id(SCOPE, packed, extras) for extras in ([], [a], [b], [a, b], [b, a], [a, a])}
    assert len(ids) == 6


@pytest.mark.parametrize("extra", [b"", b"\x00" * 31, b"\x00" * 33, "0" * 32, None, 7, bytearray(32)])
def test_a_malformed_extra_never_takes_the_id_of_plain_text(extra: bytes) -> None:
    """TensorRT-LLM#13815: broken extra keys make the input uncacheable."""
    with pytest.raises(InputError, match="extra"):
        page_id(SCOPE, pack_tokens(range(16)), [extra])
    with pytest.raises(InputError, match="extra"):
        plan(SCOPE, list(range(20)), extras={0: [extra]})


@pytest.mark.parametrize("extras", [{"0": [b"\x00" * 32]}, {-1: [b"\x00" * 32]}, {0: b""}, {0: "ab"}, {True: []}])
def test_malformed_maps_of_extras_are_refused(extras: dict[int, list[bytes]]) -> None:
    """TensorRT-LLM#13815: keys or values of another type are not overlooked either."""
    with pytest.raises(InputError, match="extras must map"):
        plan(SCOPE, list(range(20)), extras=extras)


def test_extras_reach_the_page_they_belong_to_in_any_chunk() -> None:
    tokens, extra = list(range(600)), b"\x09" * 32
    plain, marked = plan(SCOPE, tokens), plan(SCOPE, tokens, extras={17: [extra]})
    assert plain[0] == marked[0]
    assert plain[1].pages[0] == marked[1].pages[0]
    assert not set(plain[1].pages[1:]) & set(marked[1].pages[1:])
    assert plain[2].id != marked[2].id


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_parent_of_another_size_is_refused(size: int) -> None:
    for make in (lambda: page_id(bytes(size), pack_tokens([1])), lambda: plan(bytes(size), range(40), 33)):
        with pytest.raises(InputError, match=f"{size} bytes"):
            make()


@pytest.mark.parametrize("applied", [b"", b"\x00" * 7, b"\x00" * 12])
def test_an_empty_or_ragged_page_is_refused(applied: bytes) -> None:
    with pytest.raises(InputError, match="positive multiple"):
        page_id(SCOPE, applied)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (0, []),
        (1, []),
        (2, [(0, 1)]),
        (256, [(0, 255)]),
        (257, [(0, 256)]),
        (258, [(0, 256), (256, 1)]),
        (601, [(0, 256), (256, 256), (512, 88)]),
    ],
)
def test_a_plan_covers_all_but_the_pending_token(tokens: int, expected: list[tuple[int, int]]) -> None:
    """vllm#11186, UCM#1130: a token is always left to compute; chunks lie at absolute multiples."""
    chunks = plan(SCOPE, list(range(tokens)))
    assert [(c.start, c.count) for c in chunks] == expected


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), max_size=90), st.data())
def test_a_plan_is_a_chain_at_absolute_multiples(tokens: list[int], data: st.DataObject) -> None:
    processed = data.draw(st.integers(0, len(tokens)))
    chunks = plan(SCOPE, tokens, processed, chunk_tokens=32)
    assert sum(c.count for c in chunks) == processed
    parent = SCOPE
    for index, chunk in enumerate(chunks):
        assert (chunk.index, chunk.start, chunk.parent) == (index, 32 * index, parent)
        assert chunk.end == min(chunk.start + 32, processed)
        assert unpack_tokens(chunk.applied) == tokens[chunk.start : chunk.end]
        assert chunk.pages == page_ids(parent, chunk.applied) and chunk.id == chunk.pages[-1]
        parent = chunk.id
    assert boundary_id(SCOPE, tokens, processed) == parent


def test_chunk_size_changes_where_nodes_are_cut_but_no_id() -> None:
    tokens = list(range(300))
    coarse, fine = plan(SCOPE, tokens, 300), plan(SCOPE, tokens, 300, chunk_tokens=64)
    assert [i for c in coarse for i in c.pages] == [i for c in fine for i in c.pages]


@pytest.mark.parametrize("processed", [-1, 11])
def test_a_boundary_outside_the_tokens_is_refused(processed: int) -> None:
    with pytest.raises(OutOfPlanError, match=r"outside \[0, 10\]"):
        plan(SCOPE, list(range(10)), processed)


@pytest.mark.parametrize(("chunk", "page"), [(0, 16), (-16, 16), (24, 16), (16, 0), (8, 16)])
def test_chunk_sizes_that_do_not_hold_whole_pages_are_refused(chunk: int, page: int) -> None:
    with pytest.raises(InputError, match="positive multiple"):
        plan(SCOPE, [1, 2, 3], chunk_tokens=chunk, page_tokens=page)


@settings(deadline=None)
@given(st.lists(st.integers(0, 2), max_size=20), st.lists(st.integers(0, 2), max_size=20))
def test_common_tokens_counts_the_shared_prefix(a: list[int], b: list[int]) -> None:
    expected = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert common_tokens(pack_tokens(a), pack_tokens(b)) == expected


def test_the_defaults_are_the_documented_ones() -> None:
    assert (PAGE_TOKENS, CHUNK_TOKENS) == (16, 256)
