"""`numem doctor`, and the operator's guide: its commands exist and work."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from numem import Memory
from numem.cli import app
from tests.cli_fixtures import error, output
from tests.store_fixtures import Chain, make_chain, put

NBYTES = 70_000


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "memory"


@pytest.fixture
def chain(home: Path) -> Chain:
    """Three nodes in the home tier and in ssd, with a branch on the last."""
    made = make_chain(3, NBYTES)
    with Memory(home) as memory:
        put(memory, made)
        memory.promote([node.id for node, _ in made], "ssd")
        memory.create_branch("main", made[-1][0].id, actor="test", reason="test")
    return made


REPORT = {"ok", "findings", "tables", "volumes", "nodes", "copies", "staged", "ms"}


def doctor(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["doctor", *map(str, arguments)])


def test_doctor_finds_nothing_in_a_sound_memory(home: Path, chain: Chain) -> None:
    document = output(doctor(home, "--json"))
    assert set(document) == {"memory", *REPORT} and document["memory"] == str(home)
    assert (document["ok"], document["volumes"], document["nodes"], document["copies"]) == (True, 2, 3, 6)
    people = doctor(home)
    assert people.exit_code == 0 and people.stdout.startswith("ok: 2 volumes, 3 states, 6 copies")


def test_doctor_repairs_what_has_another_copy_and_names_what_was_lost(home: Path, chain: Chain) -> None:
    for path in (home / "nodes").rglob("*.blob"):
        path.unlink()
    found = output(doctor(home, "--json"), 1)
    assert found["findings"] and set(found["findings"][0]) == {"severity", "place", "what", "remedy"}
    assert {finding["severity"] for finding in found["findings"]} - {"note"} == {"repairable"}
    assert doctor(home).exit_code == 1
    mended = output(doctor(home, "--repair", "--json"))
    assert set(mended) == {"memory", "ok", "before", "done", "lost", "after"}
    assert (mended["ok"], mended["lost"], mended["before"]["ok"], mended["after"]["ok"]) == (True, [], False, True)
    assert set(mended["after"]) == REPORT and set(mended["done"][0]) == {"kind", "place", "detail"}
    with Memory(home) as memory:
        assert memory.verify().ok
    for path in home.rglob("*.blob"):
        path.unlink()
    lost = output(doctor(home, "--repair", "--json"), 1)
    assert len(lost["lost"]) >= 3
    people = doctor(home, "--repair")
    assert people.exit_code == 1


def test_doctor_needs_a_memory(tmp_path: Path) -> None:
    error(doctor(tmp_path / "absent", "--json"), "NotFoundError")
    assert not (tmp_path / "absent").exists()


# the operator's guide

GUIDE = Path(__file__).parents[1] / "docs" / "operations.md"


def blocks() -> list[str]:
    """Shell blocks of the guide that need no network and no server."""
    found = re.findall(r"```sh\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    return [block for block in found if "pip install" not in block and "s3://" not in block]


def test_the_guide_names_commands_that_exist() -> None:
    known = {command.name or (command.callback and command.callback.__name__) for command in app.registered_commands}
    named = {line.split()[1] for block in blocks() for line in block.splitlines() if line.startswith("numem ")}
    assert named - known <= {"demo"}  # of the orchestrating half, which other tests mount
    assert {"tiers", "maintain", "scrub", "forget", "doctor", "archive", "reconcile"} <= named


@pytest.mark.slow
def test_the_commands_of_the_guide_work(tmp_path: Path) -> None:
    """All of them in one shell; the deletion alone exits with 1, because an archive holds what was deleted."""
    lines = ["\n".join(blocks()).replace("--yes\n", "--yes || test $? = 1\n")]
    numem = f'numem() {{ {sys.executable} -m dagster_project.cli "$@"; }}'
    script = "\n".join(["set -e", numem, *lines])
    environment = {**os.environ, "PYTHONPATH": str(GUIDE.parents[1])}
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "NOT REACHED: cold/" in done.stdout and done.stdout.count("ok: ") >= 3
