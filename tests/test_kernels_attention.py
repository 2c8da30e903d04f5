"""Paged attention: the definition bit for bit, invariance to companions and layout, masks, float64 error."""

import ctypes
import ctypes.util
import functools
import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from numem.errors import InputError
from numem.kernels import native
from numem.kernels.activation import exp
from numem.kernels.activation import softcap as capped
from numem.kernels.attention import paged_attention
from numem.kernels.pages import PAGE
from tests.attention_fixtures import Lanes, bits
from tests.kernel_fixtures import ISAS, needs_native, restored

__all__ = ["restored"]

PATHS = [*ISAS[:1], "torch"]
DTYPES = [torch.float32, torch.bfloat16]
LENGTHS = (1, 15, 16, 17, 255, 256, 257, 511, 512, 513, 1100)


# ---- the definition ----


@functools.cache
def fmaf() -> "ctypes._NamedFuncPointer":
    f = ctypes.CDLL(ctypes.util.find_library("m")).fmaf
    f.restype, f.argtypes = ctypes.c_float, [ctypes.c_float] * 3
    return f


def chain(a: np.ndarray, b: np.ndarray) -> np.float32:
    acc = 0.0
    for x, y in zip(a.tolist(), b.tolist(), strict=True):
        acc = fmaf()(x, y, acc)
    return np.float32(acc)


def exp_of(x: np.ndarray | np.float32) -> np.ndarray:
    return exp(torch.from_numpy(np.atleast_1d(x).astype(np.float32))).numpy()


def definition(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, low: int, high: int, scale: np.float32, cap: float = 0.0
) -> np.ndarray:
    """One query head over keys [low, high), as documented: splits of 512, chains, lanes mod 16, merge in order."""
    state: tuple[np.float32, np.float32, np.ndarray] | None = None
    for base in range(low // 512 * 512, high, 512):
        keys = range(max(low, base), min(high, base + 512))
        scores = np.array([chain(q, k[i]) * scale for i in keys], np.float32)
        if cap:
            scores = capped(torch.from_numpy(scores).unsqueeze(0), cap).numpy()[0]
        top = scores.max()
        weights = exp_of(scores - top)
        lanes = np.zeros(16, np.float32)
        for i, weight in zip(keys, weights, strict=True):
            lanes[i % 16] += weight
        for half in (8, 4, 2, 1):
            lanes = lanes[:half] + lanes[half : 2 * half]
        value = np.array([chain(weights, v[keys.start : keys.stop, d]) for d in range(v.shape[1])], np.float32)
        if state is None:
            state = top, lanes[0], value
            continue
        both = max(state[0], top)
        a, b = exp_of(state[0] - both)[0], exp_of(top - both)[0]
        merged = [fmaf()(float(x), float(b), float(y * a)) for x, y in zip(value, state[2], strict=True)]
        state = both, np.float32(fmaf()(float(lanes[0]), float(b), float(state[1] * a))), np.array(merged, np.float32)
    assert state is not None
    return state[2] * (np.float32(1) / state[1])


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("position", "window", "cap"),
    [(0, 0, 0), (15, 0, 0), (16, 0, 0), (40, 7, 1.5), (530, 0, 0), (530, 30, 0), (530, 0, 50.0), (1030, 600, 0)],
)
def test_one_row_is_the_documented_arithmetic(isa: str, position: int, window: int, cap: float) -> None:
    native.use(isa)
    lanes = Lanes((position + 1,), heads=2, kv_heads=1, head_dim=16)
    q = lanes.queries(0, torch.tensor([position]))
    got = lanes.attend(q, [0], [position], window, softcap=cap).view(2, 16)
    keys, values = (lanes.rows[0][i, 0].numpy() for i in (0, 1))
    low = max(0, position - window + 1) if window else 0
    for head in range(2):
        want = definition(q.view(2, 16)[head].numpy(), keys, values, low, position + 1, np.float32(0.25), cap)
        assert bits(got[head]) == want.tobytes()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 1, 100, 512])
def test_error_against_float64(path: str, dtype: torch.dtype, window: int) -> None:
    native.use(path)
    lanes = Lanes(LENGTHS, dtype=dtype)
    for lane, n in enumerate(LENGTHS):
        low = max(0, n - window) if window else 0
        want = lanes.exact(lane, lanes.queries(lane, torch.tensor([n - 1])), low, n)
        got = lanes.last(lane, window)[0].double()
        assert torch.allclose(got, want, rtol=0, atol=4e-6), n


# ---- invariance ----


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(3, 3, 64), (9, 3, 64), (8, 1, 16), (6, 2, 48), (2, 1, 80), (4, 1, 96), (3, 1, 128), (4, 1, 256)],
)
def test_bits_are_equal_on_all_builds_and_threads(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    lanes = Lanes((30, 530), heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    positions = list(range(29)) + list(range(505, 530))
    row_lane = [0] * 29 + [1] * 25
    q = torch.cat((lanes.queries(0, torch.arange(29)), lanes.queries(1, torch.arange(505, 530))))
    for window in (0, 20):
        results = set()
        for isa in ISAS:
            native.use(isa)
            for threads in (1, 2, 3):
                native.set_threads(threads)
                results.add(bits(lanes.attend(q, row_lane, positions, window)))
        assert len(results) == 1
        alone = [lanes.attend(q[i : i + 1], [row_lane[i]], [positions[i]], window) for i in range(len(q))]
        assert {bits(torch.cat(alone))} == results


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("window", [0, 40])
def test_a_row_in_a_batch_is_the_row_alone_anywhere(path: str, window: int) -> None:
    """Lanes of all lengths, an empty one among them, in any order and any physical pages (vLLM#34046 and kin)."""
    native.use(path)
    alone = {n: bits(Lanes((n,)).last(0, window)) for n in LENGTHS}
    for seed in range(3):
        order = torch.randperm(len(LENGTHS) + 1, generator=torch.Generator().manual_seed(seed)).tolist()
        lanes = Lanes(tuple((*LENGTHS, 0)[i] for i in order), layout=seed)
        positions = [n - 1 for n in lanes.lengths]
        q = torch.cat([lanes.queries(i, torch.tensor([p])) for i, p in enumerate(positions)])
        native.set_threads(1 + seed)
        out = lanes.attend(q, list(range(len(order))), positions, window)
        for row, n in zip(out, lanes.lengths, strict=True):
            # an idle lane's row is zeros and disturbs nobody (pytorch#41508, flashinfer#3943)
            assert bits(row) == (alone[n] if n else bytes(row.nbytes))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_poisoned_pages_do_not_leak(path: str, dtype: torch.dtype) -> None:
    """0xFF bytes (NaN) in every unwritten place: finite, and the bits of a zero-filled pool (vLLM#57156, vLLM#936)."""
    native.use(path)
    poisoned, clean = Lanes(LENGTHS, dtype=dtype), Lanes(LENGTHS, dtype=dtype, poison=0)
    for lane in range(len(LENGTHS)):
        for window in (0, 5):
            out = poisoned.last(lane, window)
            assert bool(out.isfinite().all())
            assert bits(out) == bits(clean.last(lane, window))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("window", [0, 33])
def test_chunked_prefill_is_whole_prefill_is_decode(path: str, window: int) -> None:
    n = 700 if path != "torch" else 60
    native.use(path)
    lanes = Lanes((n,), heads=3, kv_heads=1, head_dim=16)
    q = lanes.queries(0, torch.arange(n))

    def rows(lo: int, hi: int) -> Tensor:
        return lanes.attend(q[lo:hi], [0] * (hi - lo), list(range(lo, hi)), window)

    whole = rows(0, n)
    for cuts in ((256, 512), (1,), (13, 14, 27), (n - 1,), tuple(range(16, n, 16))):
        edges = [0, *[c for c in cuts if c < n], n]
        parts = [rows(a, b) for a, b in itertools.pairwise(edges)]
        assert bits(torch.cat(parts)) == bits(whole)
    single = [rows(i, i + 1) for i in range(0, n, 7)]
    assert bits(torch.cat(single)) == bits(whole[::7])


@needs_native
def test_rows_in_any_order_and_mix() -> None:
    """Prefill and decode rows of several lanes in one call, repeated and backwards positions included."""
    lanes = Lanes((600, 40, 0, 257))
    g = torch.Generator().manual_seed(3)
    for _ in range(10):
        rows: list[tuple[int, int]] = []
        while len(rows) < 60:
            lane = int(torch.randint(0, 4, (1,), generator=g))
            n = lanes.lengths[lane]
            if n == 0:
                rows.append((lane, -1))
                continue
            start, count = (int(torch.randint(0, limit, (1,), generator=g)) for limit in (n, 20))
            rows += [(lane, p) for p in range(start, min(n, start + count + 1))]
        q = torch.cat([lanes.queries(lane, torch.tensor([p])) for lane, p in rows])
        window = int(torch.randint(0, 80, (1,), generator=g))
        out = lanes.attend(q, [r[0] for r in rows], [r[1] for r in rows], window)
        for i in range(0, len(rows), 3):
            alone = lanes.attend(q[i : i + 1], [rows[i][0]], [rows[i][1]], window)
            assert bits(out[i : i + 1]) == bits(alone), (i, rows[i], window)


# ---- masks ----


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("position", [5, 18, 514])
def test_a_window_of_four_sees_four_keys(path: str, position: int) -> None:
    """The key at q - 3 changes the row, the key at q - 4 and the one at q + 1 do not (transformers#39408, #40163)."""
    native.use(path)
    lanes = Lanes((position + 2,))
    q = lanes.queries(0, torch.tensor([position]))
    want = bits(lanes.attend(q, [0], [position], 4))
    for distance, changes in ((-1, False), (0, True), (3, True), (4, False)):
        for pages in ("k", "v"):
            other = Lanes((position + 2,))
            at = position - distance
            page, token = int(other.tables[0, at // PAGE]), at % PAGE
            if pages == "k":
                other.k[page, :, :, token] += 1.0
            else:
                other.v[page, :, token] += 1.0
            assert (bits(other.attend(q, [0], [position], 4)) != want) is changes


@pytest.mark.parametrize("path", PATHS)
def test_pages_before_the_window_are_never_read(path: str) -> None:
    """A sliding lane may have given its prefix pages back: their table entries are not even looked at."""
    native.use(path)
    lanes = Lanes((600,))
    want = bits(lanes.last(0, 50))
    lanes.tables[0, : (600 - 50) // PAGE] = -1
    assert bits(lanes.last(0, 50)) == want
    with pytest.raises(InputError, match="row 0"):
        lanes.last(0, 100)


@pytest.mark.parametrize("path", PATHS)
def test_nan_in_a_visible_key_shows(path: str) -> None:
    """Masking hides what is masked, nothing else: a NaN in a seen key or value is not swallowed."""
    native.use(path)
    lanes = Lanes((40,))
    lanes.k[lanes.tables[0, 1], :, 3, 4] = torch.nan
    assert bool(lanes.last(0).isnan().all())
    lanes = Lanes((40,))
    lanes.v[lanes.tables[0, 1], :, 3, 4] = torch.nan
    assert bool(lanes.last(0).view(6, 32)[:, 4].isnan().all())


@pytest.mark.parametrize("path", PATHS)
def test_queries_and_output_may_be_columns_of_wider_rows(path: str) -> None:
    native.use(path)
    lanes = Lanes((33, 20))
    q = torch.cat((lanes.queries(0, torch.tensor([32])), lanes.queries(1, torch.tensor([19]))))
    want = lanes.attend(q, [0, 1], [32, 19])
    wide, out = torch.full((2, 300), torch.nan), torch.full((2, 200), 7.0)
    wide[:, 40:232] = q
    paged_attention(
        wide[:, 40:232], lanes.k, lanes.v, lanes.tables, torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([32, 19]), out[:, 4:196], heads=6, kv_heads=2, head_dim=32, scale=32**-0.5,
    )  # fmt: skip
    assert bits(out[:, 4:196]) == bits(want)
    assert bool((out[:, :4] == 7).all()) and bool((out[:, 196:] == 7).all())


# ---- refusals ----


@pytest.mark.parametrize("path", PATHS)
def test_lanes_positions_and_pages_out_of_range_are_refused(path: str) -> None:
    native.use(path)
    lanes = Lanes((20, 40))
    q = lanes.queries(0, torch.tensor([19]))
    for lane, position in ((2, 3), (-1, 3), (0, lanes.width * PAGE), (0, 33)):
        with pytest.raises(InputError, match="row 0"):
            lanes.attend(q, [lane], [position])


def test_shapes_are_checked() -> None:
    lanes = Lanes((20,))
    q = lanes.queries(0, torch.tensor([19]))
    with pytest.raises(InputError, match="queries"):
        lanes.attend(q[:, :-1], [0], [19])
    with pytest.raises(InputError, match="lanes int32"):
        lanes.attend(q, [0, 0], [19])
    with pytest.raises(InputError, match="window"):
        lanes.attend(q, [0], [19], -1)
    lanes.kv_heads = 3
    with pytest.raises(InputError, match="pages"):
        lanes.attend(q, [0], [19])
