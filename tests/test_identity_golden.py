"""Ids are the same in every process, on every machine and in every later version: the checked-in vectors say so."""

import hashlib
import json
import os
import struct
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from numem.identity import seed_chain
from numem.identity.canonical import canonical_json
from numem.identity.chain import boundary_id, pack_tokens, page_id, plan
from numem.identity.digest import blake3_of, checksum, content_id, framed, framed_sha256
from numem.identity.fingerprint import Identity, NumericPolicy

GOLDEN = Path(__file__).parent / "data" / "golden_ids.json"
ROOT = Path(__file__).parent.parent


def tokens_of(text: str) -> list[int]:
    """Tokens written as "first:end" (a range) or as a comma-separated list."""
    if ":" in text:
        first, end = text.split(":")
        return list(range(int(first), int(end)))
    return [int(t) for t in text.split(",") if t]


def compute(inputs: dict[str, Any]) -> dict[str, Any]:
    """Every id that the inputs of the golden file lead to."""
    described = inputs["identity"]
    policy = NumericPolicy(described["policy"], bytes.fromhex(described["self_test"]))
    identities = {
        name: Identity(described["semantic"], policy, described["device_class"], bytes.fromhex(salt))
        for name, salt in inputs["salts"].items()
    }
    scope = identities["none"].scope
    payload = bytes(range(256)) * 64
    return {
        "fingerprint": identities["none"].fingerprint.hex(),
        "scopes": {name: identity.scope.hex() for name, identity in identities.items()},
        "pages": [
            page_id(scope, pack_tokens(tokens_of(case["tokens"])), [bytes.fromhex(e) for e in case["extras"]]).hex()
            for case in inputs["pages"]
        ],
        "boundaries": [boundary_id(scope, tokens_of(text), len(tokens_of(text))).hex() for text in inputs["prefixes"]],
        "chunks": [
            [[c.start, c.count, c.id.hex(), c.parent.hex()] for c in plan(scope, tokens_of(text))]
            for text in inputs["prefixes"]
        ],
        "canonical": [canonical_json(value).decode() for value in inputs["values"]],
        "framed": framed_sha256("numem/field/step/v1", scope, b"", b"forcing").hex(),
        "content": content_id(payload).hex(),
        "content_keyed": content_id(payload, bytes(range(32))).hex(),
        "digest_of_parts": blake3_of([b"ab", b"", b"c"]).hex(),
        "checksum": checksum(payload).hex(),
    }


def test_golden_vectors_hold() -> None:
    """llm-d-kv-cache commit 4466a8e (#282): one byte order, written down, with vectors checked on every run."""
    document = json.loads(GOLDEN.read_text())
    assert compute(document["inputs"]) == document["outputs"]


def test_ids_are_equal_in_three_spawned_processes_with_other_hash_seeds() -> None:
    expected = json.loads(GOLDEN.read_text())["outputs"]
    processes = [
        subprocess.Popen(
            [sys.executable, __file__],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            text=True,
        )
        for seed in ("0", "1", "4242")
    ]
    for process in processes:
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        assert json.loads(out) == expected


def test_a_page_id_is_exactly_the_documented_bytes() -> None:
    parent, extra, tokens = bytes(range(32)), b"\x07" * 32, [0, 1, -1, 2**63 - 1, -(2**63)]
    domain = b"numem/kv/page/v1"
    by_hand = hashlib.sha256(
        struct.pack(">Q", len(domain))
        + domain
        + struct.pack(">Q", 32)
        + parent
        + struct.pack(">Q", len(tokens))
        + struct.pack(">5q", *tokens)
        + struct.pack(">I", 1)
        + extra
    ).digest()
    assert page_id(parent, pack_tokens(tokens), [extra]) == by_hand


def test_a_scope_is_exactly_the_documented_bytes() -> None:
    policy = NumericPolicy("p", b"\x01" * 32)
    identity = Identity({"b": 1, "a": [True, None, "x"]}, policy, "cpu", b"\x02" * 32)
    semantic = hashlib.sha256(b'{"a":[true,null,"x"],"b":1}').digest()
    about = b'{"name":"p","self_test":{"$bytes":"' + b"01" * 32 + b'"}}'
    parts = (b"numem/scope/v1", semantic, about, b"cpu", b"\x02" * 32)
    assert identity.scope == hashlib.sha256(b"".join(struct.pack(">Q", len(part)) + part for part in parts)).digest()


def test_framing_keeps_fields_apart() -> None:
    """tinfoil cachesalt: ("org_1", "2345") must differ from ("org_12345", "")."""
    assert framed_sha256("d", b"org_1", b"2345") != framed_sha256("d", b"org_12345", b"")
    assert framed_sha256("d", b"a") != framed_sha256("da")
    assert framed("d", b"") == struct.pack(">Q", 1) + b"d" + struct.pack(">Q", 0)


SEED_BLOCKS = [
    ([range(16)], "561010d7-575b-5458-ace7-68053cdfdecd"),
    ([range(16), range(16, 20)], "668c9c5d-cc25-5775-a8f1-43ac102e36ae"),
    ([range(256)], "88ee029e-6c06-50ce-8116-18c4179d9a72"),
    ([range(256), range(256, 512)], "b8817f9a-41e4-594e-b160-c6b6c36ad64d"),
    ([range(256, 512)], "3cd51d68-0c70-5933-9227-0a8dcccff215"),
    ([[1, 2]], "0ed4016a-6bb2-521c-af51-db6bf9228eaf"),
    ([[1, 2], [3, 4]], "b371c5c8-8069-5d75-96a3-5afd09910590"),
]


@pytest.mark.parametrize(("blocks", "expected"), SEED_BLOCKS)
def test_published_values_of_the_seed_chain(blocks: list[list[int]], expected: str) -> None:
    parent: uuid.UUID | None = None
    for block in blocks:
        parent = seed_chain.chunk_hash(parent, list(block))
    assert str(parent) == expected


def test_published_node_id_and_bare_token_hash_of_the_seed_chain() -> None:
    prefix = uuid.UUID("88ee029e-6c06-50ce-8116-18c4179d9a72")
    node = seed_chain.node_id("numerical-memory-demo/2-layer-gqa-f32-v1", prefix)
    assert str(node) == "a0f33352-947a-5f50-97db-300213fbe68d"
    assert str(seed_chain.token_prefix_hash([1, 2, 3])) == "ca73761d-dabf-5fcb-a511-70be0b07f67b"


if __name__ == "__main__":
    print(json.dumps(compute(json.loads(GOLDEN.read_text())["inputs"])))
