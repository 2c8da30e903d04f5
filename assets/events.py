"""What a person reads on the events of the inference assets: from a stage's report to metadata.

Belongs here: names with units, tables, figures. No prompt, token or output text unless the run asked for previews.

Dagster concept: https://docs.dagster.io/guides/build/assets/metadata-and-tags
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg

from dagster_project.assets.figures import stacked_bars
from dagster_project.assets.metadata import MAX_ROWS, clip, lines, ms, table
from numem.job.batch import Batch
from numem.job.completions import read_completions
from numem.job.reports import DecodedReport, PrefillReport, PromotedReport, PublishedReport, RestoredReport, Summary

if TYPE_CHECKING:
    from numem.models.lm import LM
    from numem.store.memory import Memory

Metadata = dict[str, Any]
# Characters of a text that a run asked to see.
PREVIEW = 100


def of_prompts(batch: Batch, source: str, texts: Sequence[str] | None) -> Metadata:
    """Sizes of the prompts, and how much of each is shared."""
    sizes, common = [len(item.tokens) for item in batch.items], batch.shared()
    own = [size - shared for size, shared in zip(sizes, common, strict=True)]
    columns = {"id": "string", "tokens": "int", "in_prefix": "int"}
    rows = list(zip((item.id for item in batch.items), sizes, common, strict=True))
    return {
        "dagster/row_count": len(sizes),
        "tokens": batch.tokens,
        "tokens_to_compute_once": sum(own) + sum(len(prefix.tokens) for prefix in batch.prefixes),
        "prefixes": len(batch.prefixes),
        "model": batch.model,
        "scope": batch.scope,
        **({"source": dg.MetadataValue.path(source)} if source else {}),
        **_table("prompts", columns, rows, texts),
        "figure": stacked_bars("Prompt tokens", {"prefix": common, "own": own}, unit="tokens", each="prompts"),
    }


def of_prefill(report: PrefillReport) -> Metadata:
    """Where the rows of every prefix came from."""
    counts = ("prompts", "tokens", "computed", "shared", "restored")
    columns = {**dict.fromkeys(counts, "int"), "time_ms": "float", "boundary": "string"}
    rows = [(*(getattr(w, name) for name in counts), w.ms, w.id) for w in report.prefixes]
    series = {name: [getattr(w, name) for w in report.prefixes] for name in ("computed", "shared", "restored")}
    return {
        "tokens_computed": report.computed,
        "chunks_staged": report.staged_chunks,
        "chunks_reused": report.reused_chunks,
        "staged_bytes": report.staged_bytes,
        "time_ms": ms(report.ms),
        **table("prefixes", columns, rows, report.count),
        "figure": stacked_bars(
            "Where the prefixes' rows came from", series, unit="tokens", each="prefixes", total=report.count
        ),
    }


def of_publication(memory: "Memory", batch: Batch, report: PublishedReport) -> Metadata:
    """What was written, what stood there already, and the ids to look further."""
    chunks = {chunk.id: chunk for plan in batch.chunks() for chunk in plan}
    durable = {id_: memory.available(id_) for id_ in chunks}
    rows = [(chunk.start, chunk.end, int(durable[id_]), id_.hex()) for id_, chunk in chunks.items()]
    there = sum(durable.values())
    return {
        "chunks": len(chunks),
        "chunks_stored": report.stored,
        "chunks_missing": report.missing,
        "stored_bytes": report.stored_bytes,
        "dedup_ratio": round(1 - report.stored / there, 4) if there else 1.0,
        "time_ms": ms(report.ms),
        **table("chunk_ids", {"start": "int", "end": "int", "durable": "int", "id": "string"}, rows),
    }


def of_promotion(report: PromotedReport) -> Metadata:
    """What was copied into the node's tier, and what could not be."""
    return {
        "tier": report.tier,
        "pieces_promoted": report.promoted,
        "pieces_there_already": report.satisfied,
        "pieces_failed": report.failures,
        "promoted_bytes": report.bytes,
        "time_ms": ms(report.ms),
        "failures": dg.MetadataValue.md(
            lines([f"{piece}: {why}" for piece, why in report.failed.items()], report.failures)
        ),
    }


def of_restore(report: RestoredReport) -> Metadata:
    """Bytes, times and digests of the restored prefixes."""
    times = ("lookup_ms", "read_ms", "load_ms")
    columns = {"boundary": "string", "tokens": "int", "restored": "int", "bytes": "int"}
    columns |= {**dict.fromkeys(times, "float"), "rows_digest": "string"}
    rows = [(p.id, p.tokens, p.restored, p.bytes, p.lookup_ms, p.read_ms, p.load_ms, p.digest) for p in report.prefixes]
    series = {name: [getattr(p, name) for p in report.prefixes] for name in times}
    return {
        "tokens_restored": report.restored,
        "tokens_not_restored": report.tokens - report.restored,
        "restored_bytes": report.bytes,
        "time_ms": ms(report.ms),
        "failures": dg.MetadataValue.md(lines(report.failures, report.failed)),
        **table("prefixes", columns, rows, report.count),
        "figure": stacked_bars("Time to restore a prefix", series, unit="ms", each="prefixes", total=report.count),
    }


def of_outputs(summary: Summary, report: DecodedReport, texts: Sequence[str] | None) -> Metadata:
    """The job's figures, and where every prompt's tokens came from."""
    columns = {"id": "string", "source": "string"}
    columns |= dict.fromkeys(("tokens", "computed", "shared", "restored", "generated"), "int") | {"ttft_ms": "float"}
    rows = [tuple(getattr(prompt, name) for name in columns) for prompt in report.shown]
    sources = ("computed", "shared", "restored")
    series = {name: [getattr(prompt, name) for prompt in report.shown] for name in sources}
    rate = {"decode_tokens_per_s": summary.decode_tokens_per_s} if summary.decode_tokens_per_s else {}
    return {
        "dagster/row_count": summary.prompts,
        "tokens_computed": summary.computed_tokens,
        "tokens_shared": summary.shared_tokens,
        "tokens_restored": summary.restored_tokens,
        "tokens_decoded": summary.decode_tokens,
        "prompts_resumed": summary.resumed,
        **rate,
        "exact": "not proven" if summary.exact is None else str(summary.exact).lower(),
        "figure": stacked_bars(
            "Where the prompts' tokens came from", series, unit="tokens", each="prompts", total=summary.prompts
        ),
        **_table("prompts", columns, rows, texts, summary.prompts),
        "outputs": dg.MetadataValue.path(summary.outputs),
        "journal": dg.MetadataValue.path(report.journal),
        "warnings": dg.MetadataValue.md(lines(summary.warnings)),
        "summary": {**summary.to_json(), "warnings": len(summary.warnings)},
    }


def ends_of_prompts(lm: "LM", batch: Batch) -> list[str]:
    """The ends of the first prompts, where those that share a prefix differ."""
    texts = (lm.tokenizer.decode(list(item.tokens[-PREVIEW:])) for item in batch.items[:MAX_ROWS])
    return [" ".join(text.split())[-PREVIEW:] for text in texts]


def beginnings_of_outputs(path: str) -> list[str]:
    """The beginnings of the first completions of a file of outputs."""
    return [clip(row["completion"], PREVIEW) for row in itertools.islice(read_completions(Path(path)), MAX_ROWS)]


def _table(
    name: str,
    columns: dict[str, str],
    rows: Sequence[Sequence[Any]],
    texts: Sequence[str] | None,
    total: int | None = None,
) -> Metadata:
    """A table of the first of `total` rows, with a column of previews where there are texts."""
    total = len(rows) if total is None else total
    if texts is None:
        return table(name, columns, rows, total)
    shown = [(*row, text) for row, text in zip(rows, texts, strict=False)]
    return table(name, {**columns, "preview": "string"}, shown, total)
