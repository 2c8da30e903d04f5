"""Retention groups: which rows a boundary needs, in tables; layouts, manifests and byte counts that follow from it."""

import hashlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from numem.errors import InputError, ManifestError
from numem.identity.canonical import canonical_json
from numem.identity.chain import plan
from numem.runtime.paging.pages import kv_spec, layers_of
from numem.runtime.restore.chunks import chunk_node, has_layout
from numem.state.groups import Floor, Group, first_attended, floor_of
from numem.state.load import load_plan, needed_groups, window_floors
from numem.state.manifest import Manifest
from numem.state.node import project
from numem.state.spec import Part, Slab, StateSpec

# Two layers of which the first has a window of 8 rows; rows of one head of two elements.
TINY = kv_spec(2, 1, 2, "float32", (8, 0))
SCOPE = bytes(range(32))


def windows(layers: int, window: int, everything: tuple[int, ...]) -> list[int]:
    return [0 if layer in everything else window for layer in range(layers)]


GEMMA_270M = windows(18, 512, (5, 11, 17))
GEMMA_1B = windows(26, 512, (5, 11, 17, 23))


def chain(spec: StateSpec, boundary: int, chunk: int) -> list[Any]:
    page = min(chunk, 16)
    chunks = plan(SCOPE, list(range(boundary)), boundary, chunk_tokens=chunk, page_tokens=page)
    contents = [[hashlib.sha256(bytes([i, g])).digest() for g in range(len(spec.retained))] for i in range(len(chunks))]
    return [chunk_node(c, SCOPE, spec, found, {}, chunk) for c, found in zip(chunks, contents, strict=True)]


@pytest.mark.parametrize(
    ("boundary", "first", "floor", "loaded"),
    [(8, 1, 0, [0, 4]), (18, 11, 8, [8, 12, 16]), (19, 12, 12, [12, 16]), (20, 13, 12, [12, 16])],
)
def test_what_a_boundary_needs_of_a_window(boundary: int, first: int, floor: int, loaded: list[int]) -> None:
    assert first_attended(boundary, 8) == first and floor_of(boundary, 8, 4) == floor
    found = load_plan(TINY, boundary, 4)
    assert [part.start for part in found.parts if part.group.window] == loaded
    assert [part.start for part in found.parts if not part.group.window] == list(range(0, boundary, 4))
    assert found.floors == ((Floor("window-8", 8, floor),) if floor else ())
    # The reading of the seed: a windowed part is needed where its end lies beyond the first attended row.
    ends = {start: min(start + 4, boundary) for start in range(0, boundary, 4)}
    assert [start for start, end in ends.items() if end > first] == loaded


@pytest.mark.parametrize(("boundary", "origin"), [(300, 0), (600, 256), (856, 512), (1100, 768)])
def test_origins_of_a_window_of_300_in_chunks_of_256(boundary: int, origin: int) -> None:
    spec = kv_spec(2, 1, 2, "float32", (300, 0))
    assert floor_of(boundary, 300, 256) == origin
    fields = {field.id: field for field in project(chain(spec, boundary, 256)).fields}
    assert fields["window-300"].coordinate_space["origin"] == origin
    assert fields["window-300"].value.shape == [2, boundary - origin, 2]
    assert fields["global"].value.shape == [2, boundary, 2] and fields["global"].coordinate_space["origin"] == 0


@settings(deadline=None)
@given(st.integers(0, 200), st.integers(2, 80), st.integers(1, 40))
def test_a_plan_has_every_row_that_is_attended_and_no_chunk_that_is_not(boundary: int, window: int, chunk: int) -> None:
    spec = kv_spec(2, 1, 2, "float32", (window, 0))
    found = load_plan(spec, boundary, chunk)
    parts = [part for part in found.parts if part.group.window]
    held = {row for part in parts for row in range(part.start, part.start + part.count)}
    attended = set(range(first_attended(boundary, window), boundary))
    assert attended <= held and all(attended & set(range(p.start, p.start + p.count)) for p in parts)
    floor = found.floors[0].start if found.floors else 0
    assert held == set(range(floor, boundary))
    # A sequence may go on at exactly those boundaries whose attended rows are held.
    for at in range(boundary + 1):
        needs = set(range(first_attended(at, window), at))
        assert all(one.allows(at) for one in found.floors) == (needs <= held)


def test_the_groups_of_two_layers() -> None:
    assert TINY.groups == (
        Group("global", (("key", 1), ("value", 1))),
        Group("window-8", (("key", 0), ("value", 0)), 8),
    )
    assert [layers_of(group) for group in TINY.groups] == [[1], [0]]
    assert TINY.describe()["groups"] == [
        {"extent": "token", "id": "global", "members": [["key", 1], ["value", 1]]},
        {"extent": "window 8", "id": "window-8", "members": [["key", 0], ["value", 0]]},
    ]


def test_payload_plan_of_a_windowed_group() -> None:
    assert TINY.parts(3, TINY.groups[1]) == (Part("key", 0, 0, 6), Part("value", 0, 6, 6))
    with pytest.raises(InputError, match="name the group"):
        TINY.parts(3)


def test_a_chunk_on_two_pages_moves_in_runs_of_rows() -> None:
    """Rows [2, 6) on pages of 4, two slabs of two layers of two elements: eight transfers of four elements."""
    spec = kv_spec(2, 1, 2, "float32")
    moves = []
    for part in spec.parts(4):
        at = 2
        while at < 6:
            end = min(6, at // 4 * 4 + 4)
            moves.append((part.offset + (at - 2) * 2, [5, 1][at // 4], at % 4 * 2, (end - at) * 2))
            at = end
    assert [m[0] for m in moves] == [0, 4, 8, 12, 16, 20, 24, 28]
    assert [m[1] for m in moves] == [5, 1] * 4 and [m[2] for m in moves] == [4, 0] * 4
    assert {m[3] for m in moves} == {4}


def test_manifest_at_twenty_has_seven_parts() -> None:
    nodes = chain(TINY, 20, 4)
    manifest = project(nodes)
    everything, windowed = manifest.fields
    assert (everything.id, everything.value.shape, everything.chunk_shape) == ("global", [2, 20, 2], [2, 4, 2])
    assert (windowed.id, windowed.value.shape, windowed.chunk_shape) == ("window-8", [2, 8, 2], [2, 4, 2])
    assert windowed.coordinate_space == {
        "axis": "token", "layout": "slab-member-row/v1", "origin": 12, "window": 8,
    }  # fmt: skip
    assert [(c.id, c.offsets) for c in windowed.chunks] == [("0/12/0", [0, 0, 0]), ("0/16/0", [0, 4, 0])]
    wanted = load_plan(TINY, 20, 4)
    assert len(manifest.content_ids) == len(wanted.parts) == 7
    assert manifest.logical_bytes == wanted.nbytes == (20 + 8) * 2 * 2 * 4
    by_place = [(part.index, part.start) for part in wanted.parts]
    assert sorted(by_place) == [(0, 0), (0, 4), (0, 8), (0, 12), (0, 16), (1, 12), (1, 16)]
    assert manifest.content_ids == tuple(nodes[start // 4].pieces[index] for index, start in sorted(by_place))
    assert Manifest.from_json(manifest.to_json()) == manifest


def test_every_part_of_a_chunk_is_published() -> None:
    for node in chain(TINY, 20, 4):
        assert len(node.pieces) == len(node.fields) == 2 and has_layout(node, TINY)
    (chunk,) = plan(SCOPE, range(4), 4, chunk_tokens=4, page_tokens=4)
    with pytest.raises(InputError, match="1 payloads for the 2 groups"):
        chunk_node(chunk, SCOPE, TINY, [bytes(32)], {}, 4)


@pytest.mark.parametrize(
    ("layers", "pattern", "restored", "whole", "token", "lasting"),
    [(18, GEMMA_270M, 20_447_232, 75_497_472, 18_432, 3_072), (26, GEMMA_1B, 28_311_552, 109_051_904, 26_624, 4_096)],
)
def test_bytes_of_4096_tokens_in_half_precision(
    layers: int, pattern: list[int], restored: int, whole: int, token: int, lasting: int
) -> None:
    spec = kv_spec(layers, 1, 256, "float16", pattern)
    found = load_plan(spec, 4096, 256)
    assert (found.nbytes, spec.row_bytes * 4096, spec.row_bytes) == (restored, whole, token)
    assert [floor.start for floor in found.floors] == [3584]
    assert spec.group_bytes(spec.retained[0], 1) == lasting
    assert spec.group_bytes(spec.retained[0], 4096) + spec.group_bytes(spec.retained[1], 512) == restored
    assert load_plan(kv_spec(layers, 1, 256, "float16"), 4096, 256).nbytes == whole


def test_bytes_per_token_in_full_precision() -> None:
    spec = kv_spec(18, 1, 256, "float32", GEMMA_270M)
    assert spec.row_bytes == 36_864 and spec.row_bytes * 256 == 9_437_184


def test_a_layout_without_windows_is_described_as_before_there_were_groups() -> None:
    """Golden: its fingerprint, its nodes and its manifests are the same bytes."""
    spec = kv_spec(2, 2, 4, "float32")
    assert spec.groups == () and spec == StateSpec((Slab("key", 2, 8), Slab("value", 2, 8)), "float32")
    assert spec == kv_spec(2, 2, 4, "float32", (0, 0))
    assert canonical_json(spec.describe()) == (
        b'{"axis":"token","byte_order":"little","dtype":"float32","layout":"slab-member-row/v1",'
        b'"slabs":[{"members":2,"name":"key","width":8},{"members":2,"name":"value","width":8}]}'
    )
    nodes = chain(spec, 20, 16)
    before = (
        '{"append_axis":1,"coordinate":{"processed_count":END},"fields":[{"attributes":{},"chunk_shape":[4,16,8],'
        '"chunks":[{"attributes":{},"content":{"algorithm":"blake3-256","digest":"DIGEST"},"id":"0/START/0",'
        '"logical_byte_length":BYTES,"offsets":[0,START,0],"shape":[4,COUNT,8],"storage":{"byte_order":"little",'
        '"format":"raw"},"stored_byte_length":BYTES}],"coordinate_space":{"axis":"token","layout":"slab-member-row/v1",'
        '"origin":0},"id":"kv","value":{"dtype":"float32","shape":[4,END,8]}}],"provenance":{}}'
    )
    for node in nodes:
        numbers = {"END": node.end, "START": node.start, "COUNT": node.count, "BYTES": node.count * 128}
        expected = before.replace("DIGEST", node.pieces[0].hex())
        for name, number in numbers.items():
            expected = expected.replace(name, str(number))
        assert node.extras() == expected


def test_floors_of_a_restore_on_top_of_held_rows() -> None:
    floor = Floor("window-8", 8, 12)
    assert window_floors(TINY, 20, 4) == (floor,)
    assert window_floors(TINY, 20, 4, held=11) == (floor,)
    assert window_floors(TINY, 20, 4, held=12) == ()
    older = (Floor("window-8", 8, 4),)
    assert window_floors(TINY, 20, 4, held=16, floors=older) == older
    assert window_floors(TINY, 20, 4, held=10, floors=older) == (floor,)
    assert needed_groups(TINY, 8, 20, 4) == (0,) and needed_groups(TINY, 12, 20, 4) == (0, 1)


@pytest.mark.parametrize(
    ("boundary", "allowed"), [(20, True), (19, True), (18, False), (16, False), (1, False), (0, True)]
)
def test_boundaries_that_a_floor_of_twelve_allows(boundary: int, allowed: bool) -> None:
    assert Floor("window-8", 8, 12).allows(boundary) == allowed


K0, V0, K1, V1 = ("key", 0), ("value", 0), ("key", 1), ("value", 1)


@pytest.mark.parametrize(
    "groups",
    [
        [("a", (K0, V0))],
        [("a", (K0, V0, K1, V1)), ("b", (K1,))],
        [("a", (K0, V0)), ("a", (K1, V1))],
        [("a", (K0, V0)), ("b", (K1, V1, ("value", 2)))],
        [("a", (K0, K0, V0)), ("b", (K1, V1))],
    ],
)
def test_groups_hold_every_member_exactly_once(groups: list[tuple[str, tuple[tuple[str, int], ...]]]) -> None:
    with pytest.raises(InputError, match="exactly once"):
        StateSpec(TINY.slabs, "float32", groups=tuple(Group(*group) for group in groups))


def test_groups_that_say_nothing_are_refused() -> None:
    for bad in (("", (K0,), None), ("a", (), None), ("a", (K0,), 1), ("a", (K0,), 0)):
        with pytest.raises(InputError):
            Group(*bad)
    with pytest.raises(InputError, match="2 windows for 3 layers"):
        kv_spec(3, 1, 2, "float32", (8, 0))
    with pytest.raises(InputError, match="not the keys and then the values"):
        layers_of(Group("x", (K0, V0, K1, V1)))
    with pytest.raises(InputError):
        load_plan(TINY, -1, 4)


def test_slabs_of_other_widths_need_a_group_of_their_own() -> None:
    slabs = (Slab("key", 2, 8), Slab("value", 2, 8), Slab("key_scale", 2, 1), Slab("value_scale", 2, 1))
    with pytest.raises(InputError, match="width"):
        StateSpec(slabs, "int8")
    scales = (("key_scale", 0), ("key_scale", 1), ("value_scale", 0), ("value_scale", 1))
    spec = StateSpec(slabs, "int8", groups=(Group("rows", (K0, K1, V0, V1)), Group("scale", scales)))
    assert spec.row_bytes == 36 and spec.group_bytes(spec.groups[1], 10) == 40
    assert spec.parts(3, spec.groups[1])[3] == Part("value_scale", 1, 9, 3)


def test_a_window_that_changes_midway_is_refused() -> None:
    nodes = chain(TINY, 8, 4)
    other = chain(kv_spec(2, 1, 2, "float32", (6, 0)), 8, 4)
    with pytest.raises(ManifestError):
        project([nodes[0], other[1]])
