"""Forms of paged attention: soft caps and bidirectional rows; invariance, masks, float64 error."""

import pytest
import torch

from numem.errors import InputError
from numem.kernels import native
from tests.attention_fixtures import Lanes, bits
from tests.kernel_fixtures import ISAS, needs_native, restored

__all__ = ["restored"]

PATHS = [*ISAS[:1], "torch"]
DTYPES = [torch.float32, torch.bfloat16]
HEADS = [(4, 4, 32), (3, 1, 64), (4, 2, 96), (2, 1, 128), (4, 1, 256)]


def span(position: int, length: int, window: int, right: int) -> tuple[int, int]:
    low = max(0, position - window + 1) if window else 0
    return low, length if right < 0 else min(length, position + right + 1)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
def test_soft_caps_against_float64(path: str, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> None:
    native.use(path)
    lanes = Lanes((20, 530), heads, kv_heads, head_dim, dtype)
    for lane, n in enumerate(lanes.lengths):
        q = lanes.queries(lane, torch.tensor([n - 1]))
        for cap in (0.5, 50.0):
            got = lanes.attend(q, [lane], [n - 1], softcap=cap)[0].double()
            assert torch.allclose(got, lanes.exact(lane, q, 0, n, cap), rtol=0, atol=4e-6)
        assert bits(lanes.attend(q, [lane], [n - 1], softcap=0.5)) != bits(lanes.attend(q, [lane], [n - 1]))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "right"), [(0, -1), (0, 0), (0, 3), (5, -1), (17, 16), (257, 256), (1, 0)])
def test_bidirectional_rows_against_float64(path: str, dtype: torch.dtype, window: int, right: int) -> None:
    native.use(path)
    lanes = Lanes((1, 16, 40, 600), dtype=dtype)
    for lane, n in enumerate(lanes.lengths):
        positions = sorted({0, n // 3, n // 2, n - 1})
        q = lanes.queries(lane, torch.tensor(positions))
        got = lanes.attend(q, [lane] * len(q), positions, window, lengths=list(lanes.lengths), right=right)
        for row, position in enumerate(positions):
            want = lanes.exact(lane, q[row], *span(position, n, window, right))
            assert torch.allclose(got[row].double(), want, rtol=0, atol=4e-6), (n, position)


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
def test_bits_are_equal_on_all_builds_rows_and_threads(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    """Whole texts at once, or row by row, on any build and any number of threads."""
    lanes = Lanes((30, 0, 530), heads, kv_heads, head_dim, dtype)
    rows = [(0, p) for p in range(30)] + [(2, p) for p in range(500, 530)]
    q = torch.cat([lanes.queries(lane, torch.tensor([p])) for lane, p in rows])
    for window, right, cap in ((0, -1, 0.0), (9, 8, 0.0), (0, 4, 3.0)):

        def attend(at: slice, window: int = window, right: int = right, cap: float = cap) -> bytes:
            some = rows[at]
            return bits(
                lanes.attend(
                    q[at],
                    [r[0] for r in some],
                    [r[1] for r in some],
                    window,
                    softcap=cap,
                    lengths=[30, 0, 530],
                    right=right,
                )
            )

        want = attend(slice(None))
        for isa in ISAS:
            native.use(isa)
            for threads in (1, 2, 3):
                native.set_threads(threads)
                assert attend(slice(None)) == want, (isa, threads)
        native.use(ISAS[0])
        assert b"".join(attend(slice(i, i + 1)) for i in range(len(rows))) == want


@needs_native
def test_a_causal_row_is_the_bidirectional_one_that_sees_nothing_behind() -> None:
    lanes = Lanes((600,))
    q = lanes.queries(0, torch.arange(580, 600))
    for window in (0, 50):
        want = bits(lanes.attend(q, [0] * 20, list(range(580, 600)), window))
        assert bits(lanes.attend(q, [0] * 20, list(range(580, 600)), window, lengths=[600], right=0)) == want


@pytest.mark.parametrize("path", PATHS)
def test_rows_that_see_nothing_are_zeros_and_disturb_nobody(path: str) -> None:
    """An empty lane and a row past its lane's window: zeros; the rows beside them keep their bits (pytorch#41508)."""
    native.use(path)
    lanes = Lanes((40, 20, 33))
    q = torch.cat([lanes.queries(0, torch.tensor([7])), lanes.queries(2, torch.tensor([3, 32, 31]))])
    alone = [bits(lanes.attend(q[i : i + 1], [lane], [p], 4, lengths=[40, 0, 33], right=3))
             for i, (lane, p) in enumerate([(0, 7), (2, 3), (2, 32), (2, 31)])]  # fmt: skip
    every = torch.cat((q[:1], q[:1], q[1:2], q[:1], q[2:], q[:1]))
    out = lanes.attend(every, [0, 1, 2, 0, 2, 2, 2], [7, 5, 3, -1, 32, 31, 40], 4, lengths=[40, 0, 33], right=3)
    assert [bits(out[i]) for i in (0, 2, 4, 5)] == alone
    assert not bool(out[[1, 3, 6]].any())


@pytest.mark.parametrize("path", PATHS)
def test_keys_past_a_length_are_never_read(path: str) -> None:
    """Padding and stale pages behind a text: their bytes and table entries do not count."""
    native.use(path)
    lanes = Lanes((60,))
    q = lanes.queries(0, torch.arange(45))
    want = bits(lanes.attend(q, [0] * 45, list(range(45)), lengths=[45]))
    lanes.k[lanes.tables[0, 2], :, :, 13:] = torch.nan
    lanes.v[lanes.tables[0, 2], :, 13:] = torch.nan
    lanes.tables[0, 3] = -1
    assert bits(lanes.attend(q, [0] * 45, list(range(45)), lengths=[45])) == want
    with pytest.raises(InputError, match="row 0"):
        lanes.attend(q, [0] * 45, list(range(45)), lengths=[49])


@pytest.mark.parametrize("path", PATHS)
def test_wrong_lengths_and_caps_are_refused(path: str) -> None:
    native.use(path)
    lanes = Lanes((20,))
    q = lanes.queries(0, torch.tensor([5]))
    for length in (-1, lanes.width * 16 + 1):
        with pytest.raises(InputError, match="row 0"):
            lanes.attend(q, [0], [5], lengths=[length])
    with pytest.raises(InputError, match="right"):
        lanes.attend(q, [0], [5], right=2)
    with pytest.raises(InputError, match="right"):
        lanes.attend(q, [0], [5], lengths=[20], right=-2)
    with pytest.raises(InputError, match="lengths"):
        lanes.attend(q, [0], [5], lengths=[20, 20])
    for cap in (-1.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match="soft cap"):
            lanes.attend(q, [0], [5], softcap=cap)
