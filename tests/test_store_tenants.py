"""Identities and tenants: described once, salts kept out of the store, content ids keyed."""

from dataclasses import replace
from pathlib import Path

import pytest

from numem.errors import IntegrityError
from numem.identity.digest import content_id
from numem.identity.fingerprint import Identity, NumericPolicy
from numem.store.memory import Memory
from numem.store.session import content_key
from tests.store_fixtures import SCOPE, make_chain, make_node, payload, put, read_back


def test_identities_are_described_once_and_hold_no_salt(tmp_path: Path) -> None:
    identity = Identity({"a": 1.5}, NumericPolicy("p", bytes(32)), "cpu", salt=b"tenant-secret-0123456789")
    with Memory(tmp_path) as memory:
        memory.register(identity)
        memory.register(identity)
        assert memory.identity(identity.scope) == identity.describe()
    with Memory(tmp_path) as memory:
        memory.register(identity)
        memory.flush()
        assert memory.identities() == {identity.scope: identity.describe()}
        assert memory.identity(SCOPE) is None
        assert len(memory._parts.catalog.rows("identities")) == 1
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or b"tenant-secret" not in path.read_bytes()


def test_a_tenants_content_ids_are_keyed(tmp_path: Path) -> None:
    """The same bytes of two tenants are two pieces, and without the salt they cannot be verified or promoted."""
    data = payload(70_000, 1)
    identity = Identity({"a": 1}, NumericPolicy("p", bytes(32)), "cpu", salt=b"tenant-secret")
    plain = make_node([data])
    secret = replace(plain, scope=identity.scope, pieces=(content_id(data, content_key(b"tenant-secret")),))
    secret = replace(secret, id=bytes(32), parent=identity.scope)
    with Memory(tmp_path) as memory:
        with pytest.raises(IntegrityError, match="content id"):
            memory.stage(secret, [data])
        memory.register(identity)
        put(memory, [(plain, [data])])
        assert put(memory, [(secret, [data])]).stored == 1
        assert memory.verify().ok
        assert memory.promote([secret.id]).failed == {}
    with Memory(tmp_path, node="other") as memory:
        assert read_back(memory, secret, [70_000]) == [data]
        assert "register its identity" in memory.promote([secret.id]).failed[secret.pieces[0].hex()]
        assert memory.available(secret.id)
        memory.register(identity)
        assert memory.promote([secret.id]).promoted == 1


def test_a_staged_node_of_an_unknown_tenant_holds_up_nobody(tmp_path: Path) -> None:
    """Without the salt it cannot be checked: it stays staged, is named as missing, and the others are published."""
    data = payload(70_000, 1)
    identity = Identity({"a": 1}, NumericPolicy("p", bytes(32)), "cpu", salt=b"tenant-secret")
    secret = replace(
        make_node([data]),
        id=bytes(32),
        scope=identity.scope,
        parent=identity.scope,
        pieces=(content_id(data, content_key(b"tenant-secret")),),
    )
    chain = make_chain(2)
    with Memory(tmp_path) as memory:
        memory.register(identity)
        memory.stage(secret, [data])
    with Memory(tmp_path) as memory:
        for node, own in chain:
            memory.stage(node, own)
        report = memory.publish_staged()
        assert (report.nodes, report.stored, report.missing) == (2, 2, (secret.id,))
        assert memory.staged() == (secret,)
        assert memory.publish_staged([secret.id]).missing == (secret.id,)
        memory.register(identity)
        assert memory.publish_staged().stored == 1
        assert memory.staged() == ()
        assert read_back(memory, secret, [70_000]) == [data]
