"""Processes that publish, place, read and maintain on one memory at once, for the tests that kill or stress them."""

import os
import random
import time
from pathlib import Path

from numem.errors import CapacityError, LeaseHeldError
from numem.state.node import Node
from numem.store.memory import Memory
from numem.store.upkeep.doctor import diagnose
from tests.store_fixtures import COUNT, SCOPE, Chain, make_chain, payload, read_back

NBYTES = 70_000


def chain_of(worker: int, number: int, count: int = 2) -> Chain:
    """What a worker publishes as its `number`th; every node says in `applied` how to make its payload."""
    seed = worker * 10_000 + number
    return make_chain(count, NBYTES, seed, str(seed))


def payload_of(node: Node) -> bytes:
    """What a node of `chain_of` must hold."""
    return payload(NBYTES, int(node.applied) * 1000 + node.start // COUNT)


def acknowledged(directory: Path) -> list[tuple[int, int]]:
    """(worker, number) of every chain that a worker was told is durable, from complete lines."""
    lines = [line for path in sorted(directory.glob("*.ack")) for line in path.read_bytes().split(b"\n")[:-1]]
    return [(int(worker), int(number)) for worker, number in (line.split() for line in lines)]


def work(home: str, directory: str, role: str, worker: int, seconds: float) -> None:
    """One process: do what the role says until the time is over; tell of what was acknowledged in `<worker>.ack`."""
    rng = random.Random(worker)
    file = os.open(Path(directory) / f"{worker}.ack", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with Memory(home) as memory:
        (Path(directory) / f"{worker}.ready").touch()
        end = time.monotonic() + seconds
        number = 0
        while time.monotonic() < end:
            if role == "publish":
                _publish(memory, worker, number, rng)
                os.write(file, b"%d %d\n" % (worker, number))
                os.fsync(file)
            elif role == "place":
                _place(memory, rng)
            elif role == "doctor":
                report = diagnose(home)
                assert report.ok, report.findings
            else:
                _maintain(memory)
            number += 1


def check(memory: Memory, node: Node) -> None:
    """The node reads as what it must hold."""
    assert read_back(memory, node, [NBYTES]) == [payload_of(node)], node.id.hex()


def _publish(memory: Memory, worker: int, number: int, rng: random.Random) -> None:
    chain = chain_of(worker, number)
    if rng.random() < 0.5:
        for node, data in chain:
            memory.stage(node, data)
        report = memory.publish_staged([node.id for node, _ in chain])
        assert (report.nodes, report.missing, report.conflicts) == (len(chain), (), ())
    else:
        for ticket in [memory.publish(node, data) for node, data in chain]:
            receipt = ticket.published.result(timeout=60)
            assert not receipt.missing and not receipt.conflict
    for node, _ in chain:
        assert memory.get(node.id) == node
    check(memory, chain[-1][0])


def _place(memory: Memory, rng: random.Random) -> None:
    nodes = memory.children(SCOPE)
    if not nodes:
        time.sleep(0.01)
        return
    node = rng.choice(nodes)
    report = memory.promote([node.id])
    assert not report.failed, report.failed
    check(memory, node)
    check(memory, rng.choice(nodes))
    if rng.random() < 0.4:
        try:
            memory.residency.evict("ssd", NBYTES)
        except CapacityError:
            return  # another process evicted it
        check(memory, node)


def _maintain(memory: Memory) -> None:
    try:
        memory.care.maintain(grace_s=60.0, keep_versions_s=10.0, least=4)
    except LeaseHeldError:
        pass  # another process has the lane
    time.sleep(0.05)
