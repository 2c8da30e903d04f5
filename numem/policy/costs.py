"""What things cost here and now, from measurements: exponentially weighted averages, one series per term.

    prefill   ms per token, by position: attention grows with what lies before it
    load      fixed ms per part + ms per byte, by tier; parts add up
    page      ms per byte of writing loaded rows into pages
    decode    ms per step;  capture    ms per chunk

A measured value replaces a configured one only after its first sample.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from numem.errors import InputError

ALPHA = 0.2
VERSION = 1
# First positions of the buckets of context length: 0, 256, 512, 1024, ...
FIRST_BUCKET = 256
# A read of less than this per part tells of the fixed cost, a longer one of the bytes.
SMALL_BYTES = 256 << 10


@dataclass(slots=True)
class Series:
    """A measured value over time; `ewma` moves by ALPHA of the difference with every sample."""

    count: int = 0
    ewma: float = 0.0
    minimum: float = 0.0
    maximum: float = 0.0
    last: float = 0.0

    def add(self, value: float) -> None:
        """Count a sample; what is not a finite number of at least 0 is no measurement and is left out."""
        if not (math.isfinite(value) and value >= 0):
            return
        self.ewma = self.ewma + ALPHA * (value - self.ewma) if self.count else value
        self.minimum = min(self.minimum, value) if self.count else value
        self.maximum = max(self.maximum, value)
        self.last = value
        self.count += 1

    @classmethod
    def of(cls, value: Any) -> "Series":
        """The series that `asdict` gave.

        Raises:
            InputError: it is not one.
        """
        names = {"count", "ewma", "minimum", "maximum", "last"}
        if not isinstance(value, dict) or set(value) != names:
            raise InputError(f"costs: a series has {', '.join(sorted(names))}; measure anew")
        if type(value["count"]) is not int or not all(_amount(value[name]) for name in names):
            raise InputError("costs: a series holds finite numbers of at least 0; measure anew")
        return cls(value["count"], *(float(value[name]) for name in ("ewma", "minimum", "maximum", "last")))


@dataclass(frozen=True, slots=True)
class TierCost:
    """Cost of one part from a tier: fixed_ms + bytes / bytes_per_ms."""

    fixed_ms: float
    bytes_per_ms: float


@dataclass(frozen=True, slots=True)
class Configured:
    """What is assumed before the first sample.

    Attributes:
        tiers: a tier that is not here has no known cost until it is measured.
    """

    prefill_ms_per_token: float = 0.5
    decode_ms: float = 20.0
    capture_ms: float = 5.0
    page_bytes_per_ms: float = 1e6
    tiers: Mapping[str, TierCost] = field(default_factory=dict)


class Costs:
    """Costs of one model on one device. Used by one thread.

    Args:
        configured: what holds until something is measured.
    """

    def __init__(self, configured: Configured | None = None) -> None:
        self.configured = configured or Configured()
        self._prefill: dict[int, Series] = {}
        self._fixed: dict[str, Series] = {}
        self._per_byte: dict[str, Series] = {}
        self._page = Series()
        self._decode = Series()
        self._capture = Series()

    # prediction

    def prefill_ms(self, start: int, count: int) -> float:
        """Time to evaluate positions [start, start + count) of one sequence: the sum over buckets."""
        return sum(tokens * self._rate(bucket) for bucket, tokens in _cut(start, count))

    def load_ms(self, tier: str, nbytes: int, parts: int = 1) -> float | None:
        """Time to read parts of together `nbytes` from a tier; None where nothing is known of the tier."""
        configured = self.configured.tiers.get(tier)
        if configured is None and not self.measured(tier):
            return None
        return parts * self._fixed_ms(tier) + nbytes * self._ms_per_byte(tier)

    def page_ms(self, nbytes: int) -> float:
        """Time to write loaded rows into pages."""
        return nbytes * self._page.ewma if self._page.count else nbytes / self.configured.page_bytes_per_ms

    @property
    def decode_ms(self) -> float:
        """Time of one step of one sequence."""
        return self._decode.ewma if self._decode.count else self.configured.decode_ms

    @property
    def capture_ms(self) -> float:
        """Time to copy and digest one chunk."""
        return self._capture.ewma if self._capture.count else self.configured.capture_ms

    def measured(self, tier: str) -> bool:
        """Whether a tier was read since measuring began."""
        return tier in self._fixed or tier in self._per_byte

    @property
    def prefill_measured(self) -> bool:
        """Whether any prefill was."""
        return bool(self._prefill)

    # observation

    def observe_prefill(self, start: int, count: int, ms: float) -> None:
        """A prefill of [start, start + count) took so long; over several buckets it is spread as it was predicted."""
        if count <= 0 or not (math.isfinite(ms) and ms >= 0):
            return
        predicted = self.prefill_ms(start, count)
        shares = [(bucket, self._rate(bucket)) for bucket, _ in _cut(start, count)]
        for bucket, rate in shares:
            self._prefill.setdefault(bucket, Series()).add(ms / count if predicted <= 0 else ms * rate / predicted)

    def observe_load(self, tier: str, nbytes: int, parts: int, ms: float) -> None:
        """A read of parts of together `nbytes` took so long, verification included."""
        if parts <= 0 or nbytes <= 0 or not (math.isfinite(ms) and ms >= 0):
            return
        if nbytes < SMALL_BYTES * parts:
            rest = max(0.0, ms - nbytes * self._ms_per_byte(tier))
            self._fixed.setdefault(tier, Series()).add(rest / parts)
        else:
            # At least a tenth is the bytes': the fixed cost of parts that are read together is below that of single ones.
            rest = max(ms / 10, ms - parts * self._fixed_ms(tier))
            self._per_byte.setdefault(tier, Series()).add(rest / nbytes)

    def observe_page(self, nbytes: int, ms: float) -> None:
        """Writing so many bytes of loaded rows into pages took so long."""
        if nbytes > 0:
            self._page.add(ms / nbytes)

    def observe_decode(self, ms: float) -> None:
        """A step of one sequence took so long."""
        self._decode.add(ms)

    def observe_capture(self, ms: float) -> None:
        """The capture of one chunk took so long."""
        self._capture.add(ms)

    # persistence

    def to_json(self) -> dict[str, Any]:
        """The measurements as plain JSON."""
        return {
            "version": VERSION,
            "prefill": {str(_first(bucket)): asdict(series) for bucket, series in sorted(self._prefill.items())},
            "fixed": {tier: asdict(series) for tier, series in sorted(self._fixed.items())},
            "per_byte": {tier: asdict(series) for tier, series in sorted(self._per_byte.items())},
            "page": asdict(self._page),
            "decode": asdict(self._decode),
            "capture": asdict(self._capture),
        }

    @classmethod
    def from_json(cls, document: Any, configured: Configured | None = None) -> "Costs":
        """The measurements that `to_json` gave.

        Raises:
            InputError: they are damaged, or of another version.
        """
        if not isinstance(document, dict) or document.get("version") != VERSION:
            raise InputError(f"costs: not measurements of version {VERSION}; measure anew")
        costs = cls(configured)
        try:
            for first, series in document["prefill"].items():
                costs._prefill[_bucket(int(first))] = Series.of(series)
            costs._fixed = {tier: Series.of(series) for tier, series in document["fixed"].items()}
            costs._per_byte = {tier: Series.of(series) for tier, series in document["per_byte"].items()}
            costs._page = Series.of(document["page"])
            costs._decode = Series.of(document["decode"])
            costs._capture = Series.of(document["capture"])
        except (KeyError, ValueError, AttributeError) as error:
            raise InputError(f"costs: damaged measurements ({error}); measure anew") from error
        return costs

    def _rate(self, bucket: int) -> float:
        """ms per token of a bucket: its own, else on the line through the two measured buckets nearest to it."""
        known = self._prefill
        if bucket in known:
            return known[bucket].ewma
        if not known:
            return self.configured.prefill_ms_per_token
        near, *others = sorted(known, key=lambda b: (abs(_first(b) - _first(bucket)), b))
        if not others:
            return known[near].ewma
        far = others[0]
        slope = (known[near].ewma - known[far].ewma) / (_first(near) - _first(far))
        # The cost of a token never falls with its position; noise must not say so far away.
        return known[near].ewma + max(0.0, slope) * max(0, _first(bucket) - _first(near))

    def _fixed_ms(self, tier: str) -> float:
        configured = self.configured.tiers.get(tier)
        return self._fixed[tier].ewma if tier in self._fixed else configured.fixed_ms if configured else 0.0

    def _ms_per_byte(self, tier: str) -> float:
        configured = self.configured.tiers.get(tier)
        return (
            self._per_byte[tier].ewma if tier in self._per_byte else 1 / configured.bytes_per_ms if configured else 0.0
        )


def _bucket(position: int) -> int:
    return (position // FIRST_BUCKET).bit_length()


def _first(bucket: int) -> int:
    """First position of a bucket."""
    return FIRST_BUCKET << (bucket - 1) if bucket else 0


def _cut(start: int, count: int) -> Iterator[tuple[int, int]]:
    """(bucket, tokens) of the positions [start, start + count)."""
    at, end = start, start + count
    while at < end:
        bucket = _bucket(at)
        upto = min(end, _first(bucket + 1))
        yield bucket, upto - at
        at = upto


def _amount(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value >= 0
