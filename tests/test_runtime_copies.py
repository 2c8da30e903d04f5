"""Copies of pages and rows on every layout: forks in the middle of a page, groups, and parts that must not be missing."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from numem import Memory, load_lm
from numem.errors import IntegrityError, NotFoundError, UnsupportedModelError
from numem.identity.chain import plan
from numem.identity.digest import content_id
from numem.kernels import native
from numem.runtime.paging.pages import PageStorage, kv_spec
from numem.runtime.restore.chunks import chunk_node
from numem.runtime.restore.kv import Restored, fetch
from numem.runtime.restore.prefix import lookup
from numem.state.groups import Group
from numem.state.spec import Slab, StateSpec
from tests.model_fixtures import edit_json, tiny_model

WINDOWED: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"],
    "use_sliding_window": True,
    "sliding_window": 20,
    "max_window_layers": 0,
}
SMALL: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa": ("llama", {"num_key_value_heads": 2, "head_dim": 32}),
    "llama-mqa-bfloat16": ("llama", {"num_key_value_heads": 1, "head_dim": 16}),
    "mistral-mha-windowed": ("mistral", {"num_key_value_heads": 4, "head_dim": 16, "sliding_window": 20}),
    "qwen2": ("qwen2", {"num_key_value_heads": 2, "head_dim": 16}),
    "qwen3-head64": ("qwen3", {"num_key_value_heads": 2, "head_dim": 64}),
    "qwen3-windowed": ("qwen3", {"num_key_value_heads": 1, "head_dim": 16, **WINDOWED}),
    "qwen3-windowed-bfloat16": ("qwen3", {"num_key_value_heads": 2, "head_dim": 32, **WINDOWED}),
}


def prompt(length: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, 256, length)]


def numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("path", [*native.isas()[:1], "torch"])
@pytest.mark.parametrize("windows", [(), (0, 8, 0), (8, 8, 8), (8, 16, 0)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(1, 16), (1, 256), (2, 32), (3, 64), (8, 16)])
def test_a_page_and_its_rows_are_copied_whole_on_every_layout(
    kv_heads: int, head_dim: int, dtype: str, windows: tuple[int, ...], path: str
) -> None:
    """vllm#17362, vllm#55112: every byte of the page, of all groups; rows come back by groups as they went in."""
    before = native.isa()
    native.use(path)
    try:
        spec = kv_spec(3, kv_heads, head_dim, dtype, windows)
        storage = PageStorage(spec, kv_heads, head_dim, 5, poison=True)
        payload = numbers((2, 3, 40, kv_heads * head_dim), storage.dtype)
        storage.load(payload, [4, 1, 3], 5)
        storage.copy(1, 2)
        for pool in (storage.k, storage.v):
            bits = pool.view(torch.uint8)
            assert torch.equal(bits[:, 1], bits[:, 2])
            assert bool((bits[:, 0] == 0xFF).all())
        for table in ([4, 1, 3], [4, 2, 3]):
            assert torch.equal(storage.save(table, 5, 40), payload)
            for group in spec.retained:
                layers = [layer for slab, layer in group.members if slab == "key"]
                part = storage.save(table, 5, 40, group)
                assert torch.equal(part, payload[:, layers])
                assert part.numel() * part.element_size() == spec.group_bytes(group, 40)
        other = PageStorage(spec, kv_heads, head_dim, 5)
        for group in spec.retained:
            other.load(storage.save([4, 2, 3], 5, 40, group), [0, 1, 2], 5, group)
        assert torch.equal(other.save([0, 1, 2], 5, 40), payload)
    finally:
        native.use(before)


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_forks_at_every_offset_of_a_page_go_their_own_ways(tmp_path: Path, name: str) -> None:
    """xllm#1984, llama.cpp#3802, mlx-lm#1547, vllm#55112: both write, each equals its run alone, two groups too."""
    family, config = LAYOUTS[name]
    directory = tiny_model(tmp_path / "m", family, **{**SMALL, **config})
    lm = load_lm(directory, dtype="bfloat16" if name.endswith("bfloat16") else "float32")
    session = lm.session(pages=64, debug=True, canary=True)
    ids, pool = prompt(49), session.engine.pool
    alone: dict[tuple[int, ...], bytes] = {}

    def expected(tokens: list[int]) -> bytes:
        key = tuple(tokens)
        if key not in alone:
            with session.start(tokens) as c:
                alone[key] = c.kv().tobytes()
        return alone[key]

    with session.start(ids) as root:
        for offset in range(17):
            at = 32 + offset
            with root.fork(at) as left, root.fork(at) as right:
                left.tokens[-1], right.tokens[-1] = 7, 9
                left.advance(3)
                right.advance(2)
                left.step()
                for c in (left, right):
                    assert c.kv().tobytes() == expected(c.tokens)
                pool.check()
            assert root.kv().tobytes() == expected(ids)
    stats = pool.stats()
    assert stats.free == stats.physical


def test_rows_without_their_scales_are_refused(memory: Memory) -> None:
    """imp#1189, ATOM#2146: the scale slab is a part like any other; without it nothing is restored."""
    slabs = (Slab("key", 2, 8), Slab("value", 2, 8), Slab("key_scale", 2, 1), Slab("value_scale", 2, 1))
    pairs = [(slab.name, member) for slab in slabs for member in range(2)]
    spec = StateSpec(slabs, "float32", groups=(Group("rows", tuple(pairs[:4])), Group("scale", tuple(pairs[4:]))))
    bare = StateSpec(slabs[:2], "float32")
    scopes = {name: bytes([number]) * 32 for number, name in enumerate(("whole", "dropped", "never"))}
    ids = prompt(300)
    for name, scope in scopes.items():
        for chunk in plan(scope, ids):
            used = bare if name == "never" else spec
            payloads = [
                numbers(used.group_shape(group, chunk.count), torch.float32, chunk.index).numpy()
                for group in used.retained
            ]
            # Scopes are told apart by a byte: equal pieces would be stored once and dropped together.
            for payload in payloads:
                payload.flat[0] = scope[0]
            node = chunk_node(chunk, scope, used, [content_id(payload) for payload in payloads], {})
            memory.publish(node, payloads).published.result(30)
    with lookup(memory, scopes["whole"], ids, spec=spec) as match:
        assert (match.tokens, match.reason) == (299, "complete") and {hit.parts for hit in match.hits} == {(0, 1)}
        payloads_read, failure = fetch(memory, spec, match.hits, None, Restored())
        assert failure is None and [[tuple(part.shape) for part in payload.parts] for payload in payloads_read] == [
            [(4, 256, 8), (4, 256, 1)],
            [(4, 43, 8), (4, 43, 1)],
        ]
    (first,) = memory.children(scopes["dropped"])
    with lookup(memory, scopes["dropped"], ids, spec=spec) as match:
        place = memory.placements(first.pieces[1])[0]
        path = memory._parts.tiers[place.tier].volume(place.volume).sidecar(place.file, place.blob)
        assert path is not None
        with open(path, "r+b") as file:
            file.seek(place.offset)
            file.write(b"\xff")
        payloads_read, failure = fetch(memory, spec, match.hits, None, Restored())
        assert payloads_read == [] and failure is not None and "chunk [0, 256)" in failure
    with pytest.raises((IntegrityError, NotFoundError)):
        memory.read([(first.pieces[1], bytearray(spec.group_bytes(spec.groups[1], 256)))])
    with lookup(memory, scopes["dropped"], ids, spec=spec) as match:
        assert (match.tokens, match.reason) == (0, "hole")
    with lookup(memory, scopes["never"], ids, spec=spec) as match:
        assert (match.tokens, match.reason) == (0, "layout")


@pytest.mark.parametrize(
    ("values", "code", "named"),
    [
        ({"model_type": "qwen3_next"}, "model-type", "qwen3_next"),
        ({"model_type": "mamba2"}, "model-type", "mamba2"),
        ({"model_type": "gpt2"}, "model-type", "transposed fused projections"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architecture", "LlamaForSequenceClassification"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "layer-type", "linear_attention"),
        ({"num_local_experts": 8}, "setting", "num_local_experts"),
    ],
)
def test_an_architecture_that_does_not_run_says_which_part_by_code(
    tmp_path: Path, values: dict[str, object], code: str, named: str
) -> None:
    """vllm#51198: state that cannot be reused is never a silent miss; such a model is refused with a reason code."""
    directory = tiny_model(tmp_path / "m", "qwen3" if code == "layer-type" else "llama", **SMALL)
    edit_json(directory / "config.json", **({"use_sliding_window": True} if code == "layer-type" else {}), **values)
    if "model_type" in values:
        edit_json(directory / "config.json", architectures=...)
    with pytest.raises(UnsupportedModelError, match=named) as refused:
        load_lm(directory)
    assert refused.value.code == code
