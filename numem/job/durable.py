"""The stages of the main job that need no model, and so load no torch: publication and promotion."""

import itertools
import time

from numem.job.batch import Batch
from numem.job.record import record
from numem.job.reports import SHOWN, PromotedReport, PublishedReport
from numem.store.memory import Memory


def publish(memory: Memory, batch: Batch, run: str) -> PublishedReport:
    """Make the batch's staged chunks durable in the home tier and empty the spool of them."""
    began = time.perf_counter()
    staged = [node.id for node in memory.staged(batch.chunk_ids())]
    done = memory.publish_staged(staged)
    report = PublishedReport(
        nodes=done.nodes,
        stored=done.stored,
        reused=done.reused,
        stored_bytes=done.stored_bytes,
        missing=sum(1 for i in batch.chunk_ids() if not memory.durable(i)),
        ms=(time.perf_counter() - began) * 1e3,
    )
    record(memory, batch, run, "publish", report)
    return report


def promote(memory: Memory, batch: Batch, run: str, tier: str = "ssd") -> PromotedReport:
    """Bring the batch's chunks into a tier of this node, verified by BLAKE3."""
    began = time.perf_counter()
    wanted = [i for i in batch.chunk_ids() if memory.available(i)]
    done = memory.promote(wanted, tier)
    report = PromotedReport(
        tier, done.promoted, done.satisfied, done.bytes, dict(itertools.islice(done.failed.items(), SHOWN)),
        (time.perf_counter() - began) * 1e3, failures=len(done.failed),
    )  # fmt: skip
    record(memory, batch, run, "promote", report)
    return report
