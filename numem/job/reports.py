"""What each stage of the job did: frozen values, kept as facts of the batch and shown by whoever ran it.

None grows with the table: of what there is one for each prefix or prompt, a report has totals and the first `SHOWN`.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

SHOWN = 32


@dataclass(frozen=True, slots=True)
class PrefixWork:
    """One prefix in the prefill stage. `computed` counts the rows the model evaluated for it."""

    id: str
    prompts: int
    tokens: int
    computed: int
    shared: int
    restored: int
    ms: float


@dataclass(frozen=True, slots=True)
class PrefillReport:
    """Prefill stage: chunks are counted once each.

    Attributes:
        prefixes: the first `SHOWN` of `count`.
        charged: (index of a prefix, rows, ms) of every prefix of which rows were computed.
        computed, shared, restored: rows of all prefixes.
    """

    prefixes: tuple[PrefixWork, ...]
    staged_chunks: int
    staged_bytes: int
    reused_chunks: int
    ms: float
    count: int = 0
    computed: int = 0
    shared: int = 0
    restored: int = 0
    charged: tuple[tuple[int, int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PublishedReport:
    """Publication stage: new payloads made durable, and what could not be."""

    nodes: int
    stored: int
    reused: int
    stored_bytes: int
    missing: int
    ms: float


@dataclass(frozen=True, slots=True)
class PromotedReport:
    """Promotion stage: pieces copied and verified into the decoding node's tier; the first `SHOWN` of `failures` failed."""

    tier: str
    promoted: int
    satisfied: int
    bytes: int
    failed: dict[str, str]
    ms: float
    failures: int = 0


@dataclass(frozen=True, slots=True)
class PrefixRestore:
    """One prefix in the restore stage. `digest` is BLAKE3-256 over its rows as restored, hex; empty if none."""

    id: str
    tokens: int
    restored: int
    bytes: int
    tier: str
    lookup_ms: float
    read_ms: float
    load_ms: float
    digest: str
    failures: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RestoredReport:
    """Restore stage.

    Attributes:
        prefixes: the first `SHOWN` of `count`.
        tokens, restored, bytes: of all prefixes.
        failures: of all prefixes, the first `SHOWN` of `failed`.
        version: see `numem.job.versions.rows_version`.
    """

    prefixes: tuple[PrefixRestore, ...]
    ms: float
    count: int
    tokens: int
    restored: int
    bytes: int
    failures: tuple[str, ...]
    failed: int
    version: str


@dataclass(frozen=True, slots=True)
class PromptResult:
    """One prompt in the decode stage, without its tokens and text; see `numem.job.journal.Entry`."""

    id: str
    tokens: int
    generated: int
    computed: int
    shared: int
    restored: int
    restored_bytes: int
    source: str
    ttft_ms: float
    restored_ttft_ms: float | None
    finish: str


@dataclass(frozen=True, slots=True)
class Series:
    """Summary of samples in ms: nearest-rank median and p95, nulls where there are none."""

    median: float | None
    p95: float | None
    n: int


@dataclass(frozen=True, slots=True)
class DecodedReport:
    """Decode stage: figures of the whole table, those of prompts that an earlier run finished as that run left them.

    Attributes:
        prompts: of the table. resumed: of them finished by an earlier run under the same settings.
        requested: prompt tokens = computed + shared + restored.
        ttft_ms: "recomputed", "restored" and "shared".
        preemptions: lanes lost; rows_again: rows brought back after that.
        decode_tokens, decode_ms: of this run's steps.
        outputs: file of the completions. journal: of all that is known about each prompt.
        outputs_digest: SHA-256 over prompt ids and output tokens in table order, hex.
        digests_equal: whether the restored rows of `digests_compared` prefixes matched those of the restore stage.
        failures: chunks that could not be used, the first `SHOWN` of `failed`.
        shown: the first `SHOWN` prompts.
        damaged: lines of the journal that did not count, where this run had prompts to decode.
    """

    prompts: int
    resumed: int
    requested: int
    computed: int
    shared: int
    restored: int
    restored_bytes: int
    ttft_ms: dict[str, Series]
    preemptions: int
    rows_again: int
    decode_tokens: int
    decode_ms: float
    outputs: str
    outputs_digest: str
    journal: str
    digests_compared: int
    digests_equal: bool
    failures: tuple[str, ...]
    failed: int
    shown: tuple[PromptResult, ...]
    ms: float
    damaged: int = 0


@dataclass(frozen=True, slots=True)
class Proof:
    """Prompts run alone and never evicted, compared byte for byte with the job's own."""

    prompts: int
    tokens: int
    bytes_compared: int
    ms: float
    exact: bool
    differences: tuple[str, ...] = ()


def nearest_rank(samples: Sequence[float], p: float) -> float | None:
    """sorted[ceil(p n) - 1], or None of no samples."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(p * len(ordered)) - 1)] if ordered else None


def series(samples: Sequence[float]) -> Series:
    median, p95 = nearest_rank(samples, 0.5), nearest_rank(samples, 0.95)
    rounded = [None if x is None else round(x, 3) for x in (median, p95)]
    return Series(rounded[0], rounded[1], len(samples))


@dataclass(frozen=True, slots=True)
class Summary:
    """The job in one object; see README for the meaning of each field."""

    batch: str
    model: str
    memory: str
    prompts: int
    requested_tokens: int
    computed_tokens: int
    shared_tokens: int
    restored_tokens: int
    prefixes: int
    chunks_stored: int
    chunks_reused: int
    stored_bytes: int
    restored_bytes: int
    resumed: int
    preemptions: int
    ttft_ms: dict[str, Series]
    decode_tokens: int
    decode_tokens_per_s: float | None
    outputs: str
    exact: bool | None
    proof: dict[str, Any]
    stages_ms: dict[str, float]
    warnings: tuple[str, ...] = field(default_factory=tuple)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)
