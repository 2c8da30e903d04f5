"""Several processes publish, look up, restore, evict and maintain on one memory at once."""

import multiprocessing
import time
from pathlib import Path

import pytest

from numem.store.catalog.facts import State
from numem.store.memory import Memory
from numem.store.upkeep.doctor import diagnose
from tests.store_fixtures import assert_readable
from tests.store_workers import NBYTES, acknowledged, chain_of, check, work


def _stress(tmp_path: Path, roles: tuple[str, ...], seconds: float) -> str:
    """Run one process per role; then a fresh handle must see what all of them were told, once and right."""
    home, told = tmp_path / "home", tmp_path / "told"
    told.mkdir()
    Memory(home).close()
    context = multiprocessing.get_context("spawn")
    children = [
        context.Process(target=work, args=(str(home), str(told), role, worker, seconds))
        for worker, role in enumerate(roles)
    ]
    for child in children:
        child.start()
    end = time.monotonic() + seconds + 120
    for child in children:
        child.join(max(0.0, end - time.monotonic()))
    stuck = [role for role, child in zip(roles, children, strict=True) if child.is_alive()]
    for child in children:
        child.kill()
    assert not stuck, f"did not end in time: {stuck}"
    assert [child.exitcode for child in children] == [0] * len(roles)
    done = acknowledged(told)
    chains = [chain_of(worker, number) for worker, number in done]
    with Memory(home) as memory:
        assert memory.recovered == ()
        nodes = memory.nodes()
        assert len(nodes) == len({node.id for node in nodes}) == sum(len(chain) for chain in chains)
        for chain in chains:
            assert_readable(memory, chain)
        for node in nodes:
            check(memory, node)
        assert memory.verify().ok
        # What the catalog counts is what the files hold: every ready copy, and one of each piece in each tier.
        usage = memory.usage()
        assert usage["object"] == len(nodes) * NBYTES
        near = [p for node in nodes for p in memory.placements(node.pieces[0]) if p.tier == "ssd"]
        ready = [place for place in near if place.state is State.READY]
        assert usage["ssd"] == len(ready) * NBYTES == memory.residency.used("ssd")
        assert len({place.content for place in ready}) == len(ready)
        on_disk = sum(path.stat().st_size for path in (home / "object").rglob("*.blob"))
        assert on_disk >= usage["object"]
    report = diagnose(home)
    assert report.ok and not [finding for finding in report.findings if "twice" in finding.what], report.findings
    return f"{len(done)} publications by {roles.count('publish')} of {len(roles)} processes in {seconds:.0f} s"


def test_four_processes_for_a_few_seconds(tmp_path: Path) -> None:
    """lance#8949, lmcache#2517, mooncake#180: no causal id twice, no wrong byte, no deadlock, counts agree, and the
    doctor has nothing but notes."""
    print("\n" + _stress(tmp_path, ("publish", "publish", "place", "maintain"), 6.0))


@pytest.mark.slow
@pytest.mark.stress
def test_eight_processes_for_a_minute(tmp_path: Path) -> None:
    """The same for longer, with two of each kind that only one may be at a time."""
    roles = ("publish", "publish", "publish", "place", "place", "doctor", "maintain", "maintain")
    print("\n" + _stress(tmp_path, roles, 60.0))
