"""The commands that look at a memory: log, show, fork, verify."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from numem import Memory
from numem.cli import app
from numem.job.model_free import run_model_free
from numem.state.node import Node
from tests.lineage_fixtures import grown

Run = Callable[..., Result]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Node]]:
    """A memory of field states with two branches; not to be changed."""
    home = tmp_path_factory.mktemp("cli") / "memory"
    with Memory(home) as memory:
        return home, grown(memory)


@pytest.fixture
def numem(made: tuple[Path, dict[str, Node]]) -> Run:
    """Run a command on that memory."""
    return lambda *arguments: CliRunner().invoke(app, [*arguments, "--memory", str(made[0])])


def output(result: Result) -> Any:
    """The one JSON object of a successful command."""
    assert result.exit_code == 0, result.stderr
    assert len(result.stdout.splitlines()) == 1
    return json.loads(result.stdout)


def error(result: Result) -> str:
    """The one line of a command that failed; with --json it stands in the one object on stdout as well."""
    assert result.exit_code == 1
    assert len(result.stderr.splitlines()) == 1 and result.stderr.startswith("error: ")
    if result.stdout:
        assert len(result.stdout.splitlines()) == 1
        document = json.loads(result.stdout)
        assert set(document) == {"error", "type"} and result.stderr == f"error: {document['error']}\n"
    return result.stderr


def test_log_of_everything(numem: Run, made: tuple[Path, dict[str, Node]]) -> None:
    home, nodes = made
    result = numem("log")
    lines = result.stdout.splitlines()
    assert len(lines) == 4 and lines[2].startswith("├─ ") and lines[2].endswith("[left]")
    document = output(numem("log", "--json"))
    assert document["memory"] == str(home) and document["moves"] == []
    assert {n["id"] for n in document["nodes"]} == {n.id.hex() for n in nodes.values()}
    assert [(b["name"], b["head"]) for b in document["branches"]] == [
        ("left", nodes["left"].id.hex()),
        ("right", nodes["right"].id.hex()),
    ]


def test_log_of_a_branch_shows_its_moves_and_its_ancestry(numem: Run, made: tuple[Path, dict[str, Node]]) -> None:
    _, nodes = made
    document = output(numem("log", "left", "--json"))
    assert [n["id"] for n in document["nodes"]] == [nodes[k].id.hex() for k in ("root", "middle", "left")]
    assert document["nodes"][0]["parent"] is None and document["nodes"][1]["parent"] == nodes["root"].id.hex()
    assert document["nodes"][2]["range"] == [2, 3] and document["nodes"][2]["bytes"] == 128
    (move,) = document["moves"]
    assert move == {
        "generation": 1,
        "action": "create",
        "previous": None,
        "head": nodes["left"].id.hex(),
        "actor": "test",
        "reason": "made for left",
    }
    assert "made for left" in numem("log", "left").stdout
    by_id = output(numem("log", nodes["left"].id.hex()[:20], "--json"))
    assert by_id["nodes"] == document["nodes"] and by_id["moves"] == []


def test_show_has_manifest_identity_copies_and_provenance(numem: Run, made: tuple[Path, dict[str, Node]]) -> None:
    home, nodes = made
    node = nodes["right"]
    document = output(numem("show", node.id.hex()[:12], "--json"))
    with Memory(home) as memory:
        assert document["manifest"] == memory.manifest(node.id).model_dump(mode="json")
    assert document["identity"]["semantic"] == {"program": "lineage-test"}
    assert document["branches"] == ["right"] and set(document["provenance"]) == {"numpy"}
    assert set(document["placements"]) == {piece.hex() for piece in node.pieces}
    (copy,) = document["placements"][node.pieces[0].hex()]
    assert copy["tier"] == "object" and copy["bytes"] == 32 and "/" not in copy["volume"]
    people = numem("show", "right")
    assert people.exit_code == 0
    for word in (node.id.hex(), "float64", "semantic.program", "object", "numpy", "[right]"):
        assert word in people.stdout


def test_what_does_not_exist_is_one_line(numem: Run, tmp_path: Path) -> None:
    for command in ("log", "show", "verify"):
        people, machines = numem(command, "nothing"), numem(command, "nothing", "--json")
        assert "'nothing'" in error(people) and people.stdout == ""
        assert "'nothing'" in error(machines) and json.loads(machines.stdout)["type"] == "NotFoundError"
        absent = CliRunner().invoke(app, [command, "left", "--memory", str(tmp_path / "absent")])
        assert "no memory here" in error(absent) and not (tmp_path / "absent").exists()


def test_an_ambiguous_prefix_lists_the_candidates(numem: Run, made: tuple[Path, dict[str, Node]]) -> None:
    _, nodes = made
    left, right = nodes["left"].id.hex(), nodes["right"].id.hex()
    line = error(numem("show", left[0]))
    assert "2 causal ids begin so" in line and left[:12] in line and right[:12] in line


def test_fork_makes_a_branch_once(made: tuple[Path, dict[str, Node]], tmp_path: Path) -> None:
    home, nodes = made
    copy = shutil.copytree(home, tmp_path / "memory")

    def numem(*arguments: str) -> Result:
        return CliRunner().invoke(app, [*arguments, "--memory", str(copy)])

    head = nodes["middle"].id.hex()
    forked = numem("fork", head[:16], "--branch", "try/1", "--actor", "eve", "--reason", "why not", "--json")
    assert output(forked) == {"branch": "try/1", "head": head, "generation": 1, "source": None}
    assert "branch 'try/1' exists" in error(numem("fork", "left", "--branch", "try/1"))
    assert output(numem("fork", "left", "--branch", "warm", "--json"))["source"] == "left"
    (move,) = output(numem("log", "try/1", "--json"))["moves"]
    assert (move["actor"], move["reason"]) == ("eve", "why not")
    (move,) = output(numem("log", "warm", "--json"))["moves"]
    assert move["actor"] and move["action"] == "fork"
    assert "[try/1]" in numem("log").stdout
    assert "name" in error(numem("fork", "left", "--branch", ""))
    assert "'gone'" in error(numem("fork", "gone", "--branch", "x"))
    for name, why in (("beef", "causal id"), ("00FF12", "causal id"), ("-x", "option"), ("--json", "option")):
        assert why in error(numem("fork", "left", f"--branch={name}"))
        assert json.loads(numem("fork", "left", f"--branch={name}", "--json").stdout)["type"] == "InputError"
    assert {b["name"] for b in output(numem("log", "--json"))["branches"]} == {"left", "right", "try/1", "warm"}
    for name in ("bee", "beef-1"):
        assert output(numem("fork", "left", "--branch", name, "--json"))["branch"] == name
    odd = "[red]hi[/nope]"
    output(numem("fork", "left", "--branch", odd, "--reason", odd, "--json"))
    for command in ("log", "show", "verify"):
        people = numem(command, odd)
        assert people.exit_code == 0, people.output
    assert f"branch {odd}" in numem("log", odd).stdout


def test_verify_of_a_whole_memory_and_of_one_state(numem: Run) -> None:
    whole = output(numem("verify", "--json"))
    assert whole["ok"] is True and whole["deep"] is True
    assert (whole["nodes"], whole["pieces"], whole["placements"]) == (4, 11, 11)
    assert whole["bytes"] == 11 * 32 and whole["bad"] == [] and whole["missing"] == {}
    assert output(numem("verify", "left", "--json"))["nodes"] == 3
    quick = output(numem("verify", "--quick", "--json"))
    assert quick["ok"] is True and quick["bytes"] == 0
    assert numem("verify").stdout.startswith("ok: 4 states, 11 pieces, 11 copies, 352 bytes digested")


@pytest.mark.crash
@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_verify_finds_damage_and_exits_with_1(tmp_path: Path, damage: str) -> None:
    """lance sidecars flipped or cut short: named, quarantined, exit code 1."""
    home = tmp_path / "memory"
    run_model_free(home)
    sidecar = max((home / "object").rglob("*.blob"), key=lambda path: path.stat().st_size)
    data = bytearray(sidecar.read_bytes())
    if damage == "flip":
        data[100] ^= 1
        sidecar.write_bytes(data)
    else:
        sidecar.write_bytes(data[: len(data) // 2])
    arguments = ["verify", "--memory", str(home)]
    found = CliRunner().invoke(app, [*arguments, "--json"])
    assert found.exit_code == 1
    document = json.loads(found.stdout)
    assert document["ok"] is False and document["missing"]
    people = CliRunner().invoke(app, arguments)
    assert people.exit_code == 1 and people.stdout.startswith("DAMAGED") and "recompute it" in people.stdout
    assert "Traceback" not in people.stdout + people.stderr
