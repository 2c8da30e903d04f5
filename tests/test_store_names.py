"""Names and places: nothing that a user names becomes a path unchecked, and open volumes live where Lance commits."""

import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from numem.errors import InputError, NumemError, RecoveryError, SchemeError
from numem.store.config import TierSpec
from numem.store.memory import Memory
from numem.store.payload.objects import Objects
from numem.store.upkeep.doctor import diagnose
from numem.store.urls import Location, locate, require_name
from numem.store.workspace import plan
from tests.store_fixtures import assert_readable, make_chain, put

REFUSED = [
    "memory://x",
    "hf://datasets/x/y",
    "http://127.0.0.1:9/x",
    "https://127.0.0.1:9/x",
    "s3fs://bucket/x",
    "ftp://host/x",
    "abfss://c@a/x",
    "s3+ddb://bucket/x",
    "file+uring:///tmp/x",
    "simplecache::s3://bucket/x",
    "zip://x.zip::s3://bucket",
    "file://host/share",
    "s3://",
    "s3://key:secret@bucket/x",
    "s3://bucket/x?token=1",
    "",
    "a\0b",
]


@pytest.mark.parametrize("url", REFUSED)
def test_places_that_lance_does_not_commit_to_are_refused_before_anything_is_written(tmp_path: Path, url: str) -> None:
    """lance#5296: refused at configuration time, before any write and any outside connection, with the reason."""
    with pytest.raises(SchemeError):
        Memory(url, local=tmp_path / "local")
    with pytest.raises(SchemeError):
        Memory(tmp_path / "home", tiers={"object": url})
    assert list(tmp_path.iterdir()) == []


def test_an_fsspec_object_is_refused(tmp_path: Path) -> None:
    """lance#5296: an fsspec file system object is not a place."""
    import fsspec

    with pytest.raises(SchemeError, match="is not a path or URL"):
        Memory(fsspec.filesystem("memory"), local=tmp_path / "local")
    assert list(tmp_path.iterdir()) == []


def test_secrets_in_a_refused_url_are_not_repeated() -> None:
    with pytest.raises(SchemeError) as caught:
        locate("home", "ftp://user:hunter2@host/x")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"aws_endpoint": "http://user:hunter2@127.0.0.1:9"}, 'plain HTTP; add allow_http="true"'),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "allow_http": "false"}, "plain HTTP"),
        ({"aws_endpoint": "127.0.0.1:9"}, "is not a URL"),
        ({"allow_http": True}, "allow_http: bool; values are strings"),
    ],
)
def test_storage_options_that_cannot_work_are_refused_at_once(
    tmp_path: Path, options: dict[str, str], said: str
) -> None:
    """lmcache#79: an error that says what to change, before any connection, for a home and for a further tier."""
    with pytest.raises(InputError, match=said) as caught:
        Memory("s3://bucket/x", local=tmp_path / "local", storage_options=options)
    assert "hunter2" not in str(caught.value)
    tiers: dict[str, str | TierSpec] = {
        "object": str(tmp_path / "object"),
        "far": TierSpec("s3://bucket/x", options=options),
    }
    with pytest.raises(InputError, match=said):
        Memory(tmp_path / "home", tiers=tiers)


def test_an_endpoint_of_the_environment_is_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(InputError, match="allow_http"):
        Objects(Location("s3://bucket/x", None), None)
    Objects(Location("s3://bucket/x", None), {"allow_http": "true"})
    Objects(Location("gs://bucket/x", None), None)


def test_tiers_that_cannot_be_are_refused_where_they_are_described() -> None:
    with pytest.raises(InputError, match="policy='newest'; use one of lru, lfu"):
        TierSpec("/x", policy="newest")
    with pytest.raises(InputError, match="write='often'; use one of demand"):
        TierSpec("/x", write="often")
    for capacity in (0, -1, 1.5, "8GB", True):
        with pytest.raises(InputError, match="give a positive whole number or None"):
            TierSpec("/x", capacity=capacity)  # type: ignore[arg-type]  # what a caller without a type checker does


def test_accepted_places() -> None:
    assert locate("home", "s3://bucket/pre/fix/").url == "s3://bucket/pre/fix"
    assert locate("home", "gs://bucket").path is None
    assert locate("home", "file:///tmp/a%20b").path == Path("/tmp/a b")
    assert locate("home", Path("/tmp/x")).path == Path("/tmp/x")
    assert locate("home", "relative/x").path == Path.cwd() / "relative" / "x"


def test_a_remote_home_keeps_its_local_state_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """lmcache#4827: a long URL makes no long file name; nothing is connected or written by planning."""
    monkeypatch.setenv("NUMEM_CACHE", str(tmp_path))
    work = plan("s3://bucket/" + "x" * 400, None, "n", None)
    assert work.local.parent == tmp_path / "memories" and len(work.local.name) == 64
    assert work.tiers["object"].url.endswith("/object") and work.tiers["ssd"].path == work.local / "nodes" / "n" / "ssd"
    assert (work.node_of("object"), work.node_of("ssd")) == ("", "n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["", "A", "a/b", "..", "-a", "a" * 64, "a\0", "ü", "a b", "🙂", "a.b", None, 3])
def test_hostile_node_and_tier_names(tmp_path: Path, name: str) -> None:
    """lmcache#5069, lmcache#5070, lmcache#3042: separators never reach a path."""
    with pytest.raises(SchemeError):
        Memory(tmp_path / "home", node=name)
    with pytest.raises(SchemeError):
        Memory(tmp_path / "home", tiers={name: str(tmp_path / "tier")})
    assert list(tmp_path.iterdir()) == []


@given(st.text(max_size=70))
def test_only_plain_names_are_names(name: str) -> None:
    alphabet = set(string.ascii_lowercase + string.digits + "-")
    plain = 0 < len(name) <= 63 and set(name) <= alphabet and name[0] != "-"
    try:
        assert require_name("node", name) == name
        assert plain
    except SchemeError:
        assert not plain


@pytest.mark.parametrize("inside", ["catalog/x", "object/x", "object"])
def test_places_inside_each_other_are_refused(tmp_path: Path, inside: str) -> None:
    """lance#5294: nothing foreign lives under a dataset's root; a sweep there could remove it."""
    tiers = {"object": str(tmp_path / "object"), "ssd": str(tmp_path / inside)}
    with pytest.raises(SchemeError, match="keep them apart"):
        Memory(tmp_path, tiers=tiers)


@pytest.mark.parametrize(
    "name", ["with space", "per%20cent", "sharp#", "frage?", "ünïcode-🙂", "x" * 200, "a::b", "c:d"]
)
def test_any_directory_name_works(tmp_path: Path, name: str) -> None:
    """lmcache#5069: two homes whose names differ are two homes, whatever the characters."""
    home, other = tmp_path / name, tmp_path / (name + "_")
    chain = make_chain(2)
    with Memory(home) as memory, Memory(other) as empty:
        put(memory, chain)
        memory.promote([chain[0][0].id])
        assert empty.nodes() == ()
    with Memory(home) as memory:
        assert_readable(memory, chain)
        assert memory.available(chain[0][0].id, "ssd")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([home.name, other.name])


def test_everything_lies_below_home_and_local(tmp_path: Path) -> None:
    """seed: no torn or foreign bytes elsewhere; a separate local directory keeps spool and ssd out of the home."""
    chain = make_chain(2)
    with Memory(tmp_path / "home", local=tmp_path / "local", node="n1") as memory:
        put(memory, chain)
        memory.promote([node.id for node, _ in chain])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "local"]
    assert sorted(path.name for path in (tmp_path / "home").iterdir()) == [
        "catalog",
        "ledger",
        "locks",
        "numem.json",
        "object",
    ]
    assert {path.name for path in (tmp_path / "local").iterdir()} == {"locks", "nodes", "owner", "spool"}
    with Memory(tmp_path / "home", local=tmp_path / "local2", node="n2") as memory:
        assert_readable(memory, chain)
        assert put(memory, make_chain(1, seed=4, name="n2")).stored == 1


def test_a_memory_of_a_newer_format_is_refused(tmp_path: Path) -> None:
    Memory(tmp_path).close()
    marker = tmp_path / "numem.json"
    marker.write_text('{"format": 2}')
    with pytest.raises(RecoveryError, match="upgrade numem"):
        Memory(tmp_path)
    marker.write_text("nonsense")
    with pytest.raises(RecoveryError, match="not JSON"):
        Memory(tmp_path)


HOSTILE = ["..", "../../etc/passwd", "a\0b", "🙂", "a/b", "x" * 300, "", " ", "-rf", "CON", "a\nb", "%2e%2e", "~", "*"]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_of_branches_owners_claims_and_leases(tmp_path: Path, name: str) -> None:
    """lmcache#5069: a name is refused in one line, or kept as it is; it never becomes a path, and never a broken one."""
    chain = make_chain(1)
    head = chain[0][0].id
    with Memory(tmp_path / "home") as memory:
        put(memory, chain)
        memory.flush()
        places = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if "catalog" not in path.parts}
        kept = 0
        for use in (
            lambda: memory.create_branch(name, head, actor="test", reason="test"),
            lambda: memory.create_branch("plain", head, actor=name, reason=name),
            lambda: memory.residency.pin([head], owner=name),
            lambda: memory.residency.demand([head], "ssd", owner=name),
            lambda: memory.record(name, head, {"name": name}),
        ):
            try:
                use()
                kept += 1
            except NumemError as error:
                assert "\n" not in str(error)
        for refuse in (
            lambda: memory.residency.pin([head], tier=name or "?", owner="test"),
            lambda: memory.residency.demand([head], name, owner="test"),
            lambda: memory.residency.demand([head], "ssd", node=name, owner="test"),
            lambda: memory.promote([head], name),
            lambda: memory._parts.epochs.acquire(name, "test"),
            lambda: Memory(tmp_path / "home", node=name),
        ):
            with pytest.raises(NumemError) as caught:
                refuse()
            assert "\n" not in str(caught.value) and "\0" not in str(caught.value)
        memory.flush()
        now = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if "catalog" not in path.parts}
        assert {path for path in now - places if not path.endswith(".ledger")} == set()
    with Memory(tmp_path / "home") as memory:
        assert memory.recovered == ()
        assert_readable(memory, chain)
        assert all(branch.name in (name, "plain") for branch in memory.branches())
    assert diagnose(tmp_path / "home").ok


@given(st.text(max_size=300))
def test_branch_names(name: str) -> None:
    from numem.lineage.branches import _require_name

    try:
        _require_name(name)
    except InputError as error:
        assert "\n" not in str(error)
        assert not name or len(name) > 255 or not name.isprintable()


def test_errors_are_one_line() -> None:
    for url in REFUSED:
        with pytest.raises(NumemError) as caught:
            locate("home", url)
        assert "\n" not in str(caught.value)
