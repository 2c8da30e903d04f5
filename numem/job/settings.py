"""How a batch is decoded: what decides its completions, and what only decides when and where they are computed."""

import hashlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

from numem.errors import InputError
from numem.identity.canonical import canonical_json
from numem.job.batch import Batch
from numem.runtime.sampling import GREEDY, Sampler

# As in `numem.runtime.restore.arrivals`, which loads torch.
ARRIVALS = ("measured", "recompute", "restore", "two-ended")


@dataclass(frozen=True, slots=True)
class Decoding:
    """Settings of the decode stage.

    Attributes:
        max_new_tokens: tokens decoded per prompt at most.
        sampler: how tokens are chosen; prompt i of the table uses its seed + i.
        ignore_eos: decode past the end-of-sequence token.
        lanes: prompts decoded at once.
        tier: tier of this node that prefixes are promoted to and restored from.
        arrivals: how a prompt's rows come: "measured" (whatever the latest measurements say is soonest), "restore",
            "recompute" or "two-ended".
        cache_mib: memory for the state of ended prompts that is kept in pages for later ones, beyond what the lanes
            need; MiB.
        proof: rerun one prompt per prefix alone and compare.
        again: decode every prompt, also those that an earlier run under the same settings finished.
    """

    max_new_tokens: int = 64
    sampler: Sampler = GREEDY
    ignore_eos: bool = False
    lanes: int = 4
    tier: str = "ssd"
    arrivals: str = "measured"
    cache_mib: int = 256
    proof: bool = True
    again: bool = False

    def __post_init__(self) -> None:
        if self.max_new_tokens < 0 or self.lanes < 1 or self.cache_mib < 0:
            raise InputError(
                f"decoding: max_new_tokens {self.max_new_tokens} and cache_mib {self.cache_mib} must not be negative, "
                f"lanes {self.lanes} must be at least 1"
            )
        if self.arrivals not in ARRIVALS:
            raise InputError(f"decoding: arrivals {self.arrivals!r}; use one of {', '.join(ARRIVALS)}")

    def sampler_of(self, index: int) -> Sampler:
        """The sampler of a prompt: the same seed for all would tie their choices together."""
        return replace(self.sampler, seed=(self.sampler.seed + index) % 2**64)

    def digest(self, batch: Batch, eos: Iterable[int]) -> str:
        """SHA-256 over everything that decides the completions of a batch, 64 hex digits.

        Equal digests mean equal completions: lanes, tiers and the way a row came change no bit.
        """
        decisive = {
            "batch": batch.id,
            "scope": batch.scope,
            "max_new_tokens": self.max_new_tokens,
            "sampler": asdict(self.sampler if self.sampler.temperature else GREEDY),
            "eos": [] if self.ignore_eos else sorted(eos),
        }
        return hashlib.sha256(b"numem/job/settings/v1" + canonical_json(decisive)).hexdigest()
