"""A memory to damage, places of its files, and what must hold after a repair."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from numem.errors import StoreError
from numem.store.catalog import catalog
from numem.store.catalog.facts import ORDER, Event, Record
from numem.store.memory import Memory
from numem.store.payload.manifests import manifest_path, manifest_versions
from numem.store.upkeep.collect import retire
from numem.store.upkeep.doctor import diagnose
from tests.store_fixtures import (
    Chain,
    assert_readable,
    flip,
    make_chain,
    put,
    read_back,
)

CHAINS = [make_chain(2, seed=n, name=str(n)) for n in range(3)]
EXTRA = make_chain(1, seed=8, name="extra")
HEAD = CHAINS[0][0][0].id


def fill(home: Path) -> None:
    """A memory with rows in every table, in several commits of most."""
    with Memory(home) as memory:
        parts = memory._parts
        for number, chain in enumerate(CHAINS):
            put(memory, chain)
            parts.catalog.append(
                catalog.Facts(
                    records=[Record(parts.clock.next(), "note", HEAD, {"n": number})],
                    events=[Event(parts.clock.next(), "thing", HEAD, {"n": number})],
                    identities=[(bytes([number]) * 32, {"kind": "test"})],
                )
            )
            memory.residency.pin([HEAD], owner=f"o{number}")
            memory.create_branch(f"b{number}", HEAD, actor="t", reason="t")
        put(memory, EXTRA)
        retire(parts, [EXTRA[0][0].id], "collected")
        memory.promote([HEAD])


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("doctor") / "home"
    fill(home)
    return home


def copy_of(template: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(template, tmp_path / "home"))


def zero_out(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


SHAPES: dict[str, Callable[[Path], None]] = {
    "empty": lambda path: os.truncate(path, 0),
    "zero-filled": zero_out,
    "half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "missing": lambda path: path.unlink(),
    "flipped early": lambda path: flip(path, 40, 2),
    "flipped late": lambda path: flip(path, path.stat().st_size - 30, 5),
}
PLACES = [*(f"catalog/{table}.lance" for table in ORDER), "object/*.lance"]


def newest_manifest(root: Path) -> Path:
    return manifest_path(root, manifest_versions(root)[0])


def newest_data_file(root: Path) -> Path:
    return min((root / "data").glob("*.lance"), key=lambda path: path.stat().st_mtime_ns)


def serves_nothing_wrong(home: Path, chains: list[Chain]) -> None:
    with Memory(home) as memory:
        for chain in chains:
            for node, data in chain:
                try:
                    held = memory.get(node.id)
                    found = None if held is None else read_back(memory, node, [len(d) for d in data])
                except StoreError:
                    continue
                assert held in (None, node) and found in (None, data)


def assert_mended(home: Path, retired_lost: bool = False) -> None:
    report = diagnose(home)
    assert report.ok, report.findings
    with Memory(home) as memory:
        assert not [entry for entry in memory.recovered if entry.kind in ("lost", "rebuilt")]
        for chain in CHAINS:
            assert_readable(memory, chain)
        assert memory.get(EXTRA[0][0].id) is None or retired_lost
        assert memory.verify().ok
        assert put(memory, make_chain(1, seed=9, name="after")).nodes == 1
    assert diagnose(home).ok


def place_and_shape(shapes: list[str]) -> list[object]:
    """Every shape at every place; those that are quick to run are a diagonal that has every shape and every place."""
    return [
        pytest.param(
            place,
            shape,
            marks=() if (p + s) % 6 == 0 and (s < len(shapes)) else (pytest.mark.slow,),
            id=f"{place}-{shape}",
        )
        for p, place in enumerate(PLACES)
        for s, shape in enumerate(shapes)
    ]
