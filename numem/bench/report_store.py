"""Sections of docs/benchmarks.md about the durable plane and the eviction policies."""

from collections.abc import Mapping
from typing import Any

from numem.policy import DEFAULT

_ROWS = {
    "restore_vs_pread_warm": "restore of 16 x 4 MiB, verified, page cache warm / preadv of one file",
    "restore_vs_pread_cold": "the same, page cache dropped",
    "publish_vs_hash_write_fsync": "publication of 16 x 4 MiB / content id, write and fsync of one file",
    "s3_restore_vs_obstore": "restore of 16 x 4 MiB from SeaweedFS, verified / obstore get_ranges",
    "restore_vs_lmcache": "restore of 16 x 4 MiB, verified, warm / LMCache local disk, not verified",
    "append_p95_2000_vs_50": "p95 of a publication after 2,000 commits / after 50",
    "lookup_200_hot_ms": "lookup of 200 of 100,000 nodes, hot, ms",
    "lookup_200_fresh_ms": "opening a memory and its first lookup of 200 of 100,000 nodes, ms",
}


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def store_section(r: Mapping[str, Any]) -> str:
    """Figures of `numem.bench.store.store`."""
    rows = []
    for key, what in _ROWS.items():
        found = r[key]
        if "skipped" in found:
            rows.append([what, "not measured", "", "", found["skipped"]])
            continue
        rows.append(
            [
                what,
                f"{found['median']:g} [{found['q1']:g}, {found['q3']:g}]",
                found.get("bar", ""),
                found.get("verdict", ""),
                _absolute(key, found),
            ]
        )
    for key, what in (("chunks", "chunks of 256 tokens"), ("small_pieces", "1,000 pieces of 256 B")):
        disk = r["disk_overhead"][key]
        rows.append(
            [
                f"bytes of the home tier's files / bytes of {what}",
                f"{disk['ratio']:g}",
                disk["bar"],
                disk["verdict"],
                f"with catalog and ledger {disk['with_catalog']:g}; {disk['logical_bytes']:,} bytes",
            ]
        )
    fresh, late = r["lookup_200_fresh_ms"], r["append_p95_2000_vs_50"]
    notes = (
        f"\nMedian [quartiles] over interleaved pairs ({r['restore_vs_pread_warm']['pairs']} for restores); speeds as "
        "ratios of the peer's time to numem's. `straddled`: the bar lies between the quartiles. Cold means that the page "
        "cache of this guest was dropped; the host's is not ours to drop. A publication counts from `publish` until "
        "everything is synced: capture, content ids, volume, catalog, ledger. The first lookup of a handle scans the "
        f"key column and verifies the rows it answers by their own digests ({fresh['open_ms']:g} ms to open, "
        f"{fresh['lookup_ms']:g} ms to look up); loading the whole catalog takes {fresh['load_all_ms']:g} ms. Lance alone, "
        f"by its BTREE, takes {r['lookup_200_hot_ms']['peer_ms']:g} ms hot and {fresh['peer_ms']:g} ms fresh. Appends: "
        f"{late['commits']:,} commits, maintenance in the background as by default. LMCache verifies nothing, and its index "
        "is lost with the process.\n"
    )
    return "## Durable plane\n\n" + table(["what", "figure", "bar", "verdict", "absolute"], rows) + notes


def _absolute(key: str, found: Mapping[str, Any]) -> str:
    if key.startswith("append"):
        return f"{found['p95_ms']:g} ms / {found['p95_early_ms']:g} ms"
    if "ms" not in found:
        return f"Lance: {found['peer_ms']:g} ms"
    return f"{found['ms']:g} ms" + (f" / {found['peer_ms']:g} ms" if "peer_ms" in found else "")


def trace_section(r: Mapping[str, Any]) -> str:
    """Figures of `numem.bench.traces.traces`."""
    there = {name: found for name, found in r.items() if "skipped" not in found}
    intro = (
        "Mooncake's FAST'25 traces, replayed by `numem bench trace FILE --json`. A block is a hit where it and every "
        "earlier block of its request were resident; the figure is hits over references. Deterministic; LRU, LFU, "
        "S3-FIFO, ARC and leaf-first SLRU agree with the published replay to the last of four digits. The default "
        f"policy is `{DEFAULT}`; the last column is its distance from the best of the row.\n"
    )
    lines = ["## Eviction on request traces\n", intro]
    lines += [f"{name}: not replayed; {found['skipped']}.\n" for name, found in r.items() if "skipped" in found]
    if not there:
        return "\n".join(lines)
    policies = list(next(iter(there.values()))["hit_ratio"])
    rows, short = [], dict.fromkeys(policies, 0.0)
    for name, found in there.items():
        for capacity in found["hit_ratio"][policies[0]]:
            ratios = {policy: found["hit_ratio"][policy][capacity] for policy in policies}
            best = max(ratios.values())
            short = {policy: max(short[policy], best - ratio) for policy, ratio in ratios.items()}
            cells = [f"**{ratio:.4f}**" if ratio == best else f"{ratio:.4f}" for ratio in ratios.values()]
            rows.append([f"{name} {int(capacity):,}", *cells, f"{best - ratios[DEFAULT]:.4f}"])
    lines.append(table(["trace, blocks", *policies, "below the best"], rows))
    far = ", ".join(f"{policy} {distance:.4f}" for policy, distance in short.items())
    lines.append(f"Largest distance from the best of a row: {far}.\n")
    lines.append(
        "`interval` is leaf-first and keeps what was used again as if it had been used later by the mean interval between "
        "first and second uses, which it learns: at capacities far below that it behaves as SLRU, far above as LRU. Its one "
        "constant (8 uses, from which the count of uses weighs in) was chosen on these traces; on their halves, each "
        "started cold, at 1,000 to 20,000 blocks, it is at most .0163 below the best.\n"
    )
    for name, found in there.items():
        touched = found["second_touch"]
        room, small = touched["unbounded"], touched["small"]
        lines.append(
            f"{name}: {found['requests']:,} requests, {found['references']:,} references to {found['blocks']:,} blocks. "
            f"Admission on second touch, with room for every block: {_change(room)}; with {small['capacity']:,} blocks "
            f"and `lru`: {_change(small)}.\n"
        )
    return "\n".join(lines)


def _change(found: Mapping[str, Any]) -> str:
    (before, after), (all_written, written) = found["hit_ratio"], found["written"]
    return f"{before:.4f} → {after:.4f}, {all_written:,} → {written:,} blocks written"
