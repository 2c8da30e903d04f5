"""The resident plane on a device: whatever way rows came into pages, and whoever stands beside them, bytes are equal.

Random weights of small models; on the GPU in bfloat16 and with 8-bit weights, compared as bytes, in the interpreter in
float32 as tokens.
"""

import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from benchmarks.shapes import Random, config_of, descriptor_of, weights_of
from numem.models.device_transformer import DeviceTransformer
from numem.runtime.device.form import TokenMajor
from numem.runtime.device.state import Step
from numem.runtime.engine import Engine, Span
from numem.runtime.paging.pages import PageStorage
from numem.runtime.sampling import GREEDY, Sampler

LIMIT = 1024


def _engine(shape: str, form: str, device: torch.device, big: bool, pages: int) -> Engine:
    d = descriptor_of(config_of(shape, dry=True))
    dtype = "bfloat16" if big else "float32"
    torch.manual_seed(11)
    weights = weights_of(d, Random(form, getattr(torch, dtype), device), LIMIT)
    decoder = DeviceTransformer(d, weights, dtype=dtype, max_position=LIMIT, device=device)
    engine = Engine(decoder, pages=pages)
    if device.type == "cpu":  # the form that device kernels read
        engine.storage = PageStorage(decoder.spec, d.kv_heads, d.head_dim, pages, form=TokenMajor(device))
    for pool in (engine.storage.k, engine.storage.v):
        pool.fill_(torch.nan)
    return engine


def _kv(engine: Engine, pages: np.ndarray, n: int) -> np.ndarray:
    rows = engine.storage.save([int(p) for p in pages], 0, n)
    return np.asarray(rows.contiguous().view(torch.uint8).numpy()).copy()


@pytest.mark.parametrize("shape", ["8b", "0.6b", "270m", "30b"])
@pytest.mark.parametrize("form", ["bf16", "q8", "q4"])
def test_every_way_gives_the_same_bytes(shape: str, form: str, device: torch.device, big: bool) -> None:
    """Whole, in pieces, decoded one by one, decoded ahead, among other lanes, on other pages, copied out and in."""
    if not big and (shape, form) != ("270m", "q8"):
        pytest.skip("takes minutes in the interpreter; runs on the GPU")
    n, more = (300, 40) if big else (17, 1)
    lanes = 5 if big else 2
    width = -(-(n + more + 1) // 16)
    engine = _engine(shape, form, device, big, (lanes + 3) * width)
    order = np.random.default_rng(3).permutation((lanes + 3) * width)
    tables = order.reshape(lanes + 3, width)
    tokens = [int(t) for t in np.random.default_rng(4).integers(0, 256, n)]

    def same(a: np.ndarray, b: np.ndarray) -> None:
        if big:
            assert a.tobytes() == b.tobytes()
        else:
            np.testing.assert_allclose(a.view(np.float32), b.view(np.float32), rtol=1e-4, atol=1e-4)

    (whole,) = engine.evaluate([Span(tables[0], 0, tokens, "all")])
    rows = _kv(engine, tables[0], n)
    for cuts in ([0, 7, 16, 17, n], [0, n - 1, n]) if big else ([0, 7, n],):
        for a, b in itertools.pairwise(cuts):
            (logits,) = engine.evaluate([Span(tables[1], a, tokens[a:b], "last")])
        same(logits, whole[-1])
        same(_kv(engine, tables[1], n), rows)
    start = n - more
    engine.evaluate([Span(tables[2], 0, tokens[:start], "none")])
    for at in range(start, n):
        (logits,) = engine.evaluate([Span(tables[2], at, tokens[at : at + 1], "last")])
        same(logits, whole[at])
    same(_kv(engine, tables[2], n), rows)
    # among other lanes at other lengths
    spans = [Span(tables[3 + lane], 0, tokens[: n - 3 * lane], "last") for lane in range(lanes)]
    engine.evaluate(spans)
    last = [Span(s.pages, len(s.tokens), [9 + lane], "last") for lane, s in enumerate(spans)]
    together = engine.evaluate(last)
    for lane, span in enumerate(last):
        (alone,) = engine.evaluate([span])
        same(alone, together[lane])
    # ahead of the host: the same tokens as one by one, for greedy and for random choices
    decoder = engine.decoder
    assert isinstance(decoder, DeviceTransformer)
    ahead = decoder.ahead(engine.storage)
    for sampler in (GREEDY, Sampler(temperature=0.8, top_k=20, top_p=0.9, seed=7)) if big else (GREEDY,):
        one, found = tokens[-1], []
        for at in range(n - 1, n - 1 + more):
            (logits,) = engine.evaluate([Span(tables[1], at, [one], "last")])
            one = int(logits.argmax())
            if sampler is not GREEDY:
                one = decoder.choose([(sampler, at)], decoder.vocab, engine.storage)[0]
            found.append(one)
        got = ahead.decode([Step(tokens[-1], n - 1, tables[0], sampler)], more)
        assert got[:, 0].tolist() == found
        same(_kv(engine, tables[0], n - 1 + more), _kv(engine, tables[1], n - 1 + more))
        steps = [Step(9 + lane, len(s.tokens), s.pages, sampler) for lane, s in enumerate(spans)]
        many = ahead.decode(steps, more)
        for lane, step in enumerate(steps):
            assert ahead.decode([step], more)[:, 0].tolist() == many[:, lane].tolist()
    # out to the host and into other pages
    payload = engine.storage.save([int(p) for p in tables[0]], 0, n)
    engine.storage.load(payload, [int(p) for p in tables[2]], 0)
    same(_kv(engine, tables[2], n), rows)
    (logits,) = engine.evaluate([Span(tables[2], n - 1, tokens[-1:], "last")])
    same(logits, whole[-1])


def test_engines_of_one_model_in_threads(device: torch.device, big: bool) -> None:
    """Two engines of one decoder, each in a thread of its own, as runtimes have them: what each would give alone."""
    first = _engine("270m", "q8", device, big, 24)
    second = Engine(first.decoder, pages=24)
    if device.type == "cpu":
        second.storage = PageStorage(
            first.storage.spec, first.decoder.kv_heads, first.decoder.head_dim, 24, form=TokenMajor(device)
        )
    counts = (40, 9, 300, 1) if big else (3, 1)
    decoder = first.decoder
    assert isinstance(decoder, DeviceTransformer)
    sampler = Sampler(temperature=0.8, seed=7)

    def run(engine: Engine, seed: int) -> tuple[list[np.ndarray], list[int]]:
        logits, chosen = list[np.ndarray](), list[int]()
        for count in counts:
            tokens = [int(t) for t in np.random.default_rng(seed + count).integers(0, 256, count)]
            logits += engine.evaluate([Span(range(20), 0, tokens, "last")])
            chosen += decoder.choose([(sampler, count)], decoder.vocab, engine.storage)
        return logits, chosen

    alone = [run(engine, seed) for seed, engine in enumerate((first, second))]
    with ThreadPoolExecutor(2) as threads:
        for _ in range(20 if big else 1):
            together = list(threads.map(run, (first, second), (0, 1)))
            for (mine, chosen), (theirs, others) in zip(together, alone, strict=True):
                assert chosen == others
                assert all(a.tobytes() == b.tobytes() for a, b in zip(mine, theirs, strict=True))


def test_few_and_many_lanes_of_wide_heads(device: torch.device, big: bool) -> None:
    """Up to four rows are prepared one by one, with the tiles that attention left; their rows are those of more lanes."""
    n = 300 if big else 2
    width = -(-(n + 1) // 16)
    wide = {
        "num_hidden_layers": 1, "vocab_size": 64, "hidden_size": 160, "intermediate_size": 64, "head_dim": 128,
        "num_attention_heads": 2, "num_key_value_heads": 1,
    }  # fmt: skip
    dtype = torch.bfloat16 if big else torch.float32
    for shape in ("0.6b", "8b"):
        d = descriptor_of(config_of(shape, dry=True) | wide)
        torch.manual_seed(12)
        decoder = DeviceTransformer(
            d,
            weights_of(d, Random("bf16", dtype, device), LIMIT),
            dtype=str(dtype)[6:],
            max_position=LIMIT,
            device=device,
        )
        engine = Engine(decoder, pages=16 * width)
        if device.type == "cpu":
            engine.storage = PageStorage(decoder.spec, 1, 128, 16 * width, form=TokenMajor(device))
        tables = [range(lane * width, (lane + 1) * width) for lane in range(16)]
        for lane, table in enumerate(tables):
            engine.evaluate([Span(table, 0, [(lane + at) % 64 for at in range(n)])])
        alone = engine.evaluate([Span(tables[0], n, [7])])[0]
        assert np.isfinite(alone).all() and np.abs(alone).max() > 0
        for lanes in (2, 4, 5, 8, 16) if big else (4, 5, 8):
            some = engine.evaluate([Span(table, n, [7 + lane]) for lane, table in enumerate(tables[:lanes])])[0]
            if big:
                assert some.tobytes() == alone.tobytes(), lanes
            else:
                np.testing.assert_allclose(some, alone, rtol=1e-4, atol=1e-4)
