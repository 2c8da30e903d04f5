"""Checks of the inference assets: what must be true of the batch just materialised.

Belongs here: which question is asked of which asset. Each check asks it of one partition and says which; run alone from
the UI it asks again, of what the memory holds now. A check deletes nothing; a bad replica that it finds is quarantined
and never read again.

Dagster concept: https://docs.dagster.io/guides/test/asset-checks
"""

import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import dagster as dg

from dagster_project.assets.batches import PROMPT_BATCHES
from dagster_project.assets.inference import decoded_continuations, promoted_replicas, published_chunks
from dagster_project.assets.metadata import lines, ms
from dagster_project.resources.memory import MemoryResource
from dagster_project.resources.runtime import RuntimeResource
from numem.errors import ManifestError, StoreError
from numem.job.batch import Batch, load_batch
from numem.job.record import recall

if TYPE_CHECKING:
    from numem.store.memory import Memory

Context = dg.AssetCheckExecutionContext
Result = dg.AssetCheckResult


def batch_check(asset: dg.AssetsDefinition) -> Callable[[Callable[..., Result]], dg.AssetChecksDefinition]:
    """`dg.asset_check` of one prompt batch."""

    def decorate(function: Callable[..., Result]) -> dg.AssetChecksDefinition:
        with warnings.catch_warnings():
            # Partitions of checks are a preview; without them a check of one batch could run on another.
            warnings.simplefilter("ignore", dg.PreviewWarning)
            return dg.asset_check(asset=asset, partitions_def=PROMPT_BATCHES)(function)

    return decorate


def result(batch: Batch, faults: list[str], good: str, metadata: Mapping[str, Any]) -> Result:
    """A result that names the partition it verified and, where it failed, what is at fault."""
    verdict = good if not faults else f"{len(faults)} at fault, first: {faults[0]}"
    return dg.AssetCheckResult(
        passed=not faults,
        description=f"batch {batch.id}: {verdict}",
        metadata={"partition": batch.id, **metadata, "faults": lines(faults)},
    )


@batch_check(published_chunks)
def chunks_intact(context: Context, memory: MemoryResource) -> Result:
    """Every replica of the batch's chunks has the bytes that its content id names (BLAKE3), and none is missing."""
    return _intact(memory.get(), load_batch(memory.get(), context.partition_key))


@batch_check(promoted_replicas)
def replicas_intact(context: Context, memory: MemoryResource, runtime: RuntimeResource) -> Result:
    """The replicas in the decoding node's tier are complete and have the bytes that their content ids name."""
    batch = load_batch(memory.get(), context.partition_key)
    absent = [id_ for id_ in batch.chunk_ids() if not memory.get().available(id_, runtime.tier)]
    return _intact(memory.get(), batch, [f"chunk {id_.hex()[:16]}: not in tier {runtime.tier}" for id_ in absent])


@batch_check(published_chunks)
def lineage_closed(context: Context, memory: MemoryResource) -> Result:
    """The chain of every prefix leads, parent by parent without a gap, to the identity it was computed under."""
    batch = load_batch(memory.get(), context.partition_key)
    faults, length = [], 0
    for chunks in batch.chunks():
        try:
            chain = memory.get().chain(chunks[-1].id)
        except (StoreError, ManifestError) as error:
            faults.append(f"boundary {chunks[-1].id.hex()[:16]}: {error}")
            continue
        length += len(chain)
        if chain[0].parent.hex() != batch.scope:
            faults.append(f"boundary {chunks[-1].id.hex()[:16]}: its chain starts at {chain[0].parent.hex()[:16]}")
        faults += [
            f"chunk {after.id.hex()[:16]}: starts at {after.start}, its parent ends at {before.end}"
            for before, after in itertools.pairwise(chain)
            if after.parent != before.id or after.start != before.end
        ]
    if memory.get().identity(bytes.fromhex(batch.scope)) is None:
        faults.append(f"scope {batch.scope[:16]}: no identity is registered under it")
    return result(batch, faults, "every chain reaches its scope", {"boundaries": len(batch.prefixes), "links": length})


@batch_check(published_chunks)
def stored_once(context: Context, memory: MemoryResource) -> Result:
    """No payload of the batch stands twice in one tier."""
    batch = load_batch(memory.get(), context.partition_key)
    nodes = [node for id_ in batch.chunk_ids() if (node := memory.get().get(id_))]
    pieces = {piece for node in nodes for piece in node.pieces}
    counts = Counter((piece.hex()[:16], p.tier) for piece in pieces for p in memory.get().placements(piece))
    faults = [f"piece {piece}: {n} copies in tier {tier}" for (piece, tier), n in sorted(counts.items()) if n > 1]
    return result(batch, faults, "one copy of each piece in a tier", {"pieces": len(pieces), "copies": counts.total()})


@batch_check(decoded_continuations)
def restored_bit_exact(context: Context, memory: MemoryResource) -> Result:
    """Prompts run alone and never evicted have the cache bytes, logits and tokens of this run's restored ones."""
    batch, run = load_batch(memory.get(), context.partition_key), context.run.run_id
    decoded = recall(memory.get(), batch, run, "decode") or recall(memory.get(), batch, None, "decode")
    if decoded is None:
        return result(batch, ["nothing was decoded yet"], "", {})
    proof = recall(memory.get(), batch, str(decoded["run"]), "proof") or {}
    faults = list(proof.get("differences", ()))
    if not decoded["digests_equal"]:
        faults.append("rows restored for decoding differ from those of the restore stage")
    figures = {
        "run": str(decoded["run"]),
        "prefixes_compared": decoded["digests_compared"],
        "prompts_rerun": proof.get("prompts", 0),
        "bytes_compared": proof.get("bytes_compared", 0),
        "time_ms": ms(proof.get("ms", 0.0)),
    }
    compared = f"{figures['prompts_rerun']} prompts, {figures['bytes_compared']} bytes equal"
    return result(batch, faults, compared if proof else "prefixes equal; the run asked for no proof", figures)


def _intact(memory: "Memory", batch: Batch, faults: list[str] | None = None) -> Result:
    ids = batch.chunk_ids()
    unknown = [id_ for id_ in ids if memory.get(id_) is None]
    report = memory.verify([id_ for id_ in ids if id_ not in unknown])
    faults = [*(faults or [])]
    faults += [f"chunk {id_.hex()[:16]}: not in this memory" for id_ in unknown]
    faults += [f"piece {bad.content.hex()[:16]} in {bad.tier}/{bad.volume}: {bad.reason}" for bad in report.bad]
    faults += [f"chunk {id_.hex()[:16]}: no good replica" for id_ in report.missing]
    faults += [f"catalog file {name}: {why}" for name, why in report.damaged.items()]
    figures = {
        "chunks": len(ids),
        "replicas": report.placements,
        "verified_bytes": report.bytes,
        "time_ms": ms(report.ms),
    }
    return result(batch, faults, f"{report.placements} replicas verified", figures)


CHECKS = [chunks_intact, lineage_closed, stored_once, replicas_intact, restored_bit_exact]
