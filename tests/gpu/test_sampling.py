"""Choosing tokens on a device: the kept set exactly, the distribution roughly, rows by themselves."""

import numpy as np
import pytest
import torch
import triton.language as tl
from torch import Tensor

from numem.kernels.cuda import gumbel, head, sampling
from numem.kernels.cuda import language as nl
from numem.kernels.cuda.sampling import Settings
from numem.runtime.device.state import settings_of
from numem.runtime.sampling import Sampler


def _sample(
    logits: Tensor, samplers: list[Sampler], positions: list[int], limit: int | None = None, block: int = sampling.BLOCK
) -> list[int]:
    device = logits.device
    out = torch.full((len(logits),), -7, dtype=torch.int64, device=device)
    limit = logits.shape[1] if limit is None else limit
    sampling.sample(
        logits,
        limit,
        Settings(*settings_of(samplers, device)),
        torch.tensor(positions, device=device),
        out,
        block=block,
    )
    return [int(token) for token in out.tolist()]


def _kept(row: np.ndarray, sampler: Sampler) -> set[int]:
    order = np.argsort(-row, kind="stable")
    if sampler.top_k:
        order = order[: sampler.top_k]
    w = np.exp((row[order].astype(np.float64) - row[order[0]]) / sampler.temperature)
    mass = np.cumsum(w)
    count = int(np.searchsorted(mass, sampler.top_p * mass[-1] * (1 - 1e-6))) + 1 if sampler.top_p < 1 else len(order)
    return set(order[:count].tolist())


@pytest.mark.parametrize("top_k, top_p", [(0, 1.0), (5, 1.0), (0, 0.6), (7, 0.8), (1, 1.0), (3, 0.05)])
def test_only_kept_tokens_and_all_of_them(top_k: int, top_p: float, device: torch.device, big: bool) -> None:
    """Over many positions exactly the kept ids come; equals at the edge by lowest id."""
    rows, vocab = (64, 5000) if big else (3, 40)
    row = np.round(np.random.default_rng(1).normal(size=vocab) * 2, 1).astype(np.float32)
    row[30:] -= 6.0  # a tail that hardly comes
    sampler = Sampler(temperature=1.5, top_k=top_k, top_p=top_p, seed=5)
    kept = _kept(row, sampler)
    logits = torch.from_numpy(row).repeat(rows, 1).to(device)
    seen: set[int] = set()
    for call in range(6 if big else 2):
        seen.update(_sample(logits, [sampler] * rows, [call * rows + i for i in range(rows)]))
    assert seen <= kept
    if len(kept) <= 3 and big:
        assert seen == kept


def test_a_row_depends_on_itself_alone(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn((5, 300), generator=generator).to(device) * 3
    samplers = [Sampler(), Sampler(temperature=0.7, seed=2**63 + 9), Sampler(temperature=1.0, top_k=4, seed=3),
                Sampler(temperature=2.0, top_p=0.5, seed=-1 % 2**64), Sampler(temperature=1.0, seed=3)]  # fmt: skip
    positions = [3, 4, 5, 6, 7]
    together = _sample(logits, samplers, positions)
    for i in range(5):
        assert _sample(logits[i : i + 1], [samplers[i]], [positions[i]]) == [together[i]]
    assert _sample(logits.flip(0).contiguous(), samplers[::-1], positions[::-1]) == together[::-1]
    assert together[0] == int(logits[0].argmax())
    many = [_sample(logits[4:], [Sampler(temperature=4.0, seed=3)], [p])[0] for p in range(12)]
    assert len(set(many)) > 6  # at that temperature no id has more than a tenth


def test_frequencies(device: torch.device, big: bool) -> None:
    rows = 4096 if big else 40
    logits = torch.tensor([[0.0, 1.0, 2.0, -30.0]]).repeat(rows, 1).to(device)
    tokens = _sample(logits, [Sampler(temperature=1.0, seed=1)] * rows, list(range(rows)))
    share = np.bincount(tokens, minlength=4) / rows
    expected = np.exp([0.0, 1.0, 2.0]) / np.exp([0.0, 1.0, 2.0]).sum()
    assert np.abs(share[:3] - expected).max() < 4 * 0.5 / rows**0.5 and share[3] == 0


def test_ties_limits_and_rows_that_are_not_finite(device: torch.device) -> None:
    logits = torch.zeros((4, 50), device=device)
    logits[0, 7] = logits[0, 3] = 1.0
    logits[1, 49] = 9.0
    logits[2, 20] = torch.nan
    logits[3, 5] = torch.inf
    greedy = [Sampler()] * 4
    assert _sample(logits, greedy, [0] * 4, limit=49) == [3, 0, -1, -1]
    assert _sample(logits, greedy, [0] * 4) == [3, 49, -1, -1]
    warm = [Sampler(temperature=1.0)] * 4
    assert _sample(logits, warm, [0] * 4)[2:] == [-1, -1]
    index = torch.empty(4, dtype=torch.int64, device=device)
    value = torch.empty(4, device=device)
    head.peaks(logits, 49, index, value)
    assert index.tolist()[:2] == [3, 0] and value[:2].tolist() == [1.0, 0.0]
    assert not value[2:].isfinite().any()


@nl.jit
def words_kernel(seed, position, out, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, BLOCK)
    word = gumbel.word_of(tl.load(seed), tl.load(position), i * 4099)
    tl.store(out + i, word.to(tl.int32, bitcast=True))
    tl.store(out + BLOCK + i, gumbel.gumbel_of(word).to(tl.int32, bitcast=True))


def test_random_numbers_are_those_of_python(device: torch.device) -> None:
    columns = np.arange(512) * 4099
    for seed, position in ((0, 0), (2**64 - 3, 131071), (0x0123456789ABCDEF, 2**31 - 1)):
        out = torch.zeros(1024, dtype=torch.int32, device=device)
        at = (torch.tensor([x if x < 2**63 else x - 2**64], device=device) for x in (seed, position))
        words_kernel[(1,)](*at, out, BLOCK=512)
        words = gumbel.words(seed, position, columns)
        assert np.array_equal(out[:512].cpu().numpy().view(np.uint32), words)
        found = out[512:].cpu().view(torch.float32).numpy()
        # two logarithms of some rounding each; the outer one takes relative errors of the inner as absolute ones
        assert np.abs(found - gumbel.gumbel(words)).max() < 1e-5


def test_random_numbers_at_the_ends() -> None:
    """No number is infinite, and those that are likely to win are told apart."""
    ends = gumbel.gumbel(np.array([0, 1, 2, 2**26 - 1, 2**26 + 1, 2**32 - 1], dtype=np.uint32))
    assert np.isfinite(ends).all() and (np.diff(ends) <= 0).all()
    assert abs(ends[0] - 33 * np.log(2)) < 1e-5 and abs(ends[-1] + np.log(24 * np.log(2))) < 1e-5
    assert abs(ends[3] - ends[4]) < 1e-5


def test_choices_are_those_of_numpy(device: torch.device, big: bool) -> None:
    """Thresholds with many equals, at both ends, with zeros of both signs, and over several blocks."""
    generator = np.random.default_rng(7)
    rows, vocab = (240, 50000) if big else (5, 300)
    plain = generator.normal(size=(rows, vocab)).astype(np.float32) * 2
    coarse = np.round(plain)
    coarse[coarse == 0] *= generator.choice([1, -1], size=(coarse == 0).sum())
    coarse[:, 5::7] = -np.inf
    limit = vocab - 3
    each = [(1.3, 40, 1.0, 4), (1.0, 0, 0.9, 5), (2.0, vocab // 2, 0.5, 6), (30.0, vocab - 50, 0.97, 2**64 - 1),
            (0.7, 0, 1.0, 3), (0.3, vocab, 0.999, 7), (1.0, 1, 0.2, 8), (1.0, vocab - 9, 1e-6, 9), (1e-9, 0, 1.0, 10),
            (0.0, 5, 0.5, 1)]  # fmt: skip
    samplers = [each[row % len(each)] for row in range(rows)]
    off = 0
    for logits in (plain, coarse):
        found = _sample(
            torch.from_numpy(logits).to(device),
            [Sampler(*s) for s in samplers],
            list(range(rows)),
            limit,
            sampling.BLOCK if big else 128,
        )
        expected = [
            sampling.reference(row[:limit], s, i) for i, (row, s) in enumerate(zip(logits, samplers, strict=True))
        ]
        off += sum(a != b for a, b in zip(found, expected, strict=True))
    # another rounding of an exponential or a logarithm decides a choice in a few of ten thousand
    assert off <= (2 if big else 0)
