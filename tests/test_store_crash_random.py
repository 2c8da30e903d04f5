"""SIGKILL at random moments of publication, promotion, eviction and maintenance."""

import multiprocessing
import random
import time
from pathlib import Path

import pytest

from numem.store.memory import Memory
from numem.store.upkeep.doctor import diagnose
from tests.store_fixtures import assert_readable
from tests.store_workers import acknowledged, chain_of, check, work

pytestmark = pytest.mark.crash

BATCH = ("publish", "publish", "place", "maintain")


def test_processes_killed_at_random_moments(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Storage candidate check 2, mooncake#2818, zarr-python#3411, lance#8942: `--crash-count` children, four at a time on
    one memory, each killed at a moment of its own. Whatever was acknowledged is there with its bytes, nothing reads as
    anything else, the memory always reopens, and the doctor then has nothing but notes."""
    count = int(request.config.getoption("--crash-count"))
    home, told = tmp_path / "home", tmp_path / "told"
    told.mkdir()
    rng = random.Random(count)
    Memory(home).close()
    context = multiprocessing.get_context("spawn")
    kills = recovered = 0
    slowest = 0.0
    while kills < count:
        batch = range(kills, min(kills + len(BATCH), count))
        children = {
            worker: context.Process(target=work, args=(str(home), str(told), BATCH[worker % len(BATCH)], worker, 600.0))
            for worker in batch
        }
        for child in children.values():
            child.start()
        deadline = time.monotonic() + 60
        # The first batch also publishes something before it is killed.
        while not (all((told / f"{worker}.ready").exists() for worker in batch) and acknowledged(told)):
            assert time.monotonic() < deadline, "the children did not start"
            assert all(child.is_alive() for child in children.values()), "a child failed"
            time.sleep(0.01)
        begun = time.monotonic()
        moments = sorted((rng.uniform(0.02, 0.9), worker) for worker in batch)
        for moment, worker in moments:
            time.sleep(max(0.0, begun + moment - time.monotonic()))
            assert children[worker].is_alive(), f"child {worker} failed before it was killed"
            children[worker].kill()
            children[worker].join()
            kills += 1
        opened = time.monotonic()
        with Memory(home) as memory:
            slowest = max(slowest, time.monotonic() - opened)
            recovered += len(memory.recovered)
            assert not [entry for entry in memory.recovered if entry.kind == "lost"], memory.recovered
            for worker, number in acknowledged(told):
                if worker in batch:
                    assert_readable(memory, chain_of(worker, number))
        report = diagnose(home)
        assert report.ok, report.findings
    with Memory(home) as memory:
        for worker, number in acknowledged(told):
            assert_readable(memory, chain_of(worker, number))
        for node in memory.nodes():
            check(memory, node)
        assert memory.verify().ok
    print(
        f"\n{kills} kills, {len(acknowledged(told))} acknowledged publications, 0 lost, 0 wrong bytes, "
        f"{recovered} things recovered, slowest open {slowest:.2f} s, {len(diagnose(home).findings)} notes"
    )
    assert acknowledged(told)
