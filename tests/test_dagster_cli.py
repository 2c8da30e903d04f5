"""The commands that orchestrate, over a tiny random model."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from dagster_project import cli, runs
from dagster_project.cli import app
from tests.dagster_fixtures import MARKER, model_directory, table

ROOT = Path(__file__).parents[1]

FIELDS = {
    "batch", "model", "memory", "prompts", "requested_tokens", "computed_tokens", "shared_tokens", "restored_tokens",
    "prefixes", "chunks_stored", "chunks_reused", "stored_bytes", "restored_bytes", "ttft_ms", "decode_tokens",
    "decode_tokens_per_s", "outputs", "resumed", "preemptions", "exact", "proof", "stages_ms", "warnings", "run_id", "instance",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_directory(tmp_path_factory.mktemp("cli"))


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def contents(directory: Path) -> dict[str, str]:
    """Every file below a directory, by digest."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """A memory that holds one run of `numem run`, started as a process of its own."""
    root = tmp_path_factory.mktemp("memory")
    prompts = table(root / "prompts.jsonl", length=300)
    options = ["--memory", root / "memory", "--model", model, "--max-new-tokens", 4, "--lanes", 2, "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "dagster_project.cli", "run", prompts, "--out", root / "out", *map(str, options)],
        cwd=ROOT, capture_output=True, text=True, timeout=120, env={**os.environ, "HOME": str(root / "home")},
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1
    summary = json.loads(done.stdout)
    assert set(summary) == FIELDS
    assert summary["exact"] is True
    assert summary["outputs"] == str(root / "out/completions.jsonl")
    rows = [json.loads(line) for line in (root / "out/completions.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == [f"p{p}-q{q}" for p in range(2) for q in range(3)]
    assert not (root / "home").exists()
    return root / "memory"


def test_run_in_its_own_process(memory: Path) -> None:
    assert (memory / "dagster/dagster.yaml").is_file()
    assert json.loads((memory / "dagster/deployment.json").read_text())["device"] == "cpu"


def test_demo_prints_a_summary_and_previews(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, memory: Path
) -> None:
    monkeypatch.setattr(cli, "example_prompts", lambda: table(tmp_path / "t.jsonl", length=300))
    monkeypatch.setattr(cli, "DEMO_TOKENS", 3)
    result = run("demo", "--memory", memory, "--model", model)
    assert result.exit_code == 0, result.output
    assert "exact" in result.stdout and "completions.jsonl" in result.stdout
    assert f"numem ui --memory {memory}" in " ".join(result.stdout.split())
    assert any(MARKER.encode() in path.read_bytes() for path in (memory / "dagster/history").rglob("*.db"))
    plain = run("demo", "--memory", memory, "--model", model, "--json")
    summary = json.loads(plain.stdout)
    assert summary["computed_tokens"] + summary["shared_tokens"] + summary["restored_tokens"] == 2 * (3 * 310 + 66)
    assert (summary["chunks_stored"], summary["stored_bytes"], summary["exact"]) == (0, 0, True)
    assert summary["decode_tokens"] == 6 * 2
    assert summary["ttft_ms"]["recomputed"] == {"median": None, "p95": None, "n": 0}


def test_demo_without_a_model_prints_its_values() -> None:
    result = run("demo", "--model-free", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["processed-tokens"] == 512


def test_example_prompts_are_found() -> None:
    assert cli.example_prompts() == ROOT / "examples/prompts.jsonl"


def long_prompt(path: Path) -> Path:
    path.write_text(json.dumps({"prompt": "A"}) + "\n" + json.dumps({"prompt": "A" * 3000}) + "\n")
    return path


def lines(path: Path, *rows: str) -> Path:
    path.write_text("".join(f"{row}\n" for row in rows))
    return path


BAD: dict[str, tuple[Callable[[Path], Path], str]] = {
    "missing file": (lambda d: d / "none.jsonl", "none.jsonl: no such file"),
    "unknown suffix": (lambda d: lines(d / "a.txt", "x"), "'.txt' is not .jsonl or .parquet"),
    "malformed line": (lambda d: lines(d / "a.jsonl", '{"prompt": "a"}', "{"), "a.jsonl:2: not JSON"),
    "empty prompt": (lambda d: lines(d / "a.jsonl", '{"prompt": " "}'), "a.jsonl:1: field 'prompt'"),
    "empty table": (lambda d: lines(d / "a.jsonl"), "the table has no prompts"),
    "too long": (lambda d: long_prompt(d / "a.jsonl"), "a.jsonl:2: 3000 tokens exceed the context of 2048"),
}


@pytest.mark.parametrize("case", sorted(BAD))
def test_bad_tables_give_one_line_and_change_nothing(tmp_path: Path, memory: Path, model: Path, case: str) -> None:
    make, message = BAD[case]
    before = contents(memory)
    result = run("run", make(tmp_path), "--out", tmp_path / "out", "--memory", memory, "--model", model)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert message in result.stderr
    assert contents(memory) == before
    assert not (tmp_path / "out").exists()


def test_unknown_model_is_named_and_makes_no_memory(tmp_path: Path) -> None:
    prompts = table(tmp_path / "t.jsonl")
    result = run("run", prompts, "--out", tmp_path / "o", "--memory", tmp_path / "m", "--model", "no-such-model")
    assert result.exit_code == 1
    assert "no-such-model" in result.stderr and result.stderr.count("\n") == 1
    assert not (tmp_path / "m").exists()


def test_an_out_that_cannot_be_is_refused_before_the_run(tmp_path: Path, memory: Path, model: Path) -> None:
    (tmp_path / "file").write_text("x")
    before = contents(memory)
    prompts = table(tmp_path / "t.jsonl", seed=9, length=40)
    result = run("run", prompts, "--out", tmp_path / "file/out", "--memory", memory, "--model", model, "--json")
    document = json.loads(result.stdout)
    assert document["type"] == "InputError" and "file is no directory that this process can write" in document["error"]
    assert contents(memory) == before


def test_usage_errors_exit_with_two(tmp_path: Path) -> None:
    assert run("run").exit_code == 2
    assert run("run", "x.jsonl", "--out", tmp_path, "--lanes", 0).exit_code == 2
    assert run("ui", "--port", 70000).exit_code == 2


def test_an_error_inside_the_run_is_one_line(
    tmp_path: Path, memory: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from numem.errors import StorageFullError
    from numem.job import durable

    def full(*_: object, **__: object) -> None:
        raise StorageFullError("tier object: no space left; free some and run again")

    monkeypatch.setattr(durable, "publish", full)
    prompts = table(tmp_path / "t.jsonl", seed=7)
    result = run("run", prompts, "--out", tmp_path / "o", "--memory", memory, "--model", model)
    assert result.exit_code == 1
    assert result.stderr == "error: tier object: no space left; free some and run again\n"
    assert not (tmp_path / "o").exists()


def test_a_memory_whose_name_looks_like_markup(tmp_path: Path, model: Path) -> None:
    prompts = table(tmp_path / "t.jsonl", passages=1, questions=1, length=40)
    home = tmp_path / "m[/x]"
    options = ("--memory", home, "--model", model, "--max-new-tokens", 1)
    result = run("run", prompts, "--out", tmp_path / "[/o]", *options)
    assert result.exit_code == 0, result.output
    printed = "".join(result.stdout.split())
    assert "m[/x]" in printed and "[/o]/completions.jsonl" in printed


def test_max_position_is_an_option_of_the_run(tmp_path: Path, model: Path) -> None:
    prompts = table(tmp_path / "t.jsonl", passages=1, questions=1, length=40)
    options = ("--memory", tmp_path / "m", "--model", model, "--max-position", 16, "--json")
    for command in (("run", prompts, "--out", tmp_path / "o"), ("demo",)):
        result = run(*command, *options)
        assert result.exit_code == 1
        document = json.loads(result.stdout)
        assert document["type"] == "ContextLengthError" and "the context of 16" in document["error"]
        assert "--max-position" in document["error"] and result.stderr == f"error: {document['error']}\n"
    assert run("run", prompts, "--out", tmp_path / "o", "--max-position", 0).exit_code == 2


@pytest.mark.parametrize("said", ["database or disk is full", "disk I/O error"])
def test_a_full_disk_under_dagsters_history_is_one_line(
    tmp_path: Path, memory: Path, model: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    import sqlite3

    import sqlalchemy
    from dagster._core.storage.event_log.sqlite.sqlite_event_log import SqliteEventLogStorage

    store, stored = SqliteEventLogStorage.store_event, 0

    def full(self: SqliteEventLogStorage, event: Any) -> Any:
        nonlocal stored
        stored += 1
        if stored <= 8:
            return store(self, event)
        cause = sqlite3.OperationalError(said)
        raise sqlalchemy.exc.OperationalError("INSERT INTO event_logs", {}, cause) from cause

    monkeypatch.setattr(SqliteEventLogStorage, "store_event", full)
    monkeypatch.setattr(runs, "_NO_SPACE", 1 << 62)  # as if there were nothing left
    prompts = table(tmp_path / "t.jsonl", seed=7, length=40)
    result = run("run", prompts, "--out", tmp_path / "o", "--memory", memory, "--model", model, "--json")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert document["type"] == "StorageFullError" and f"{memory}/dagster: no space left" in document["error"]
    assert result.stderr == f"error: {document['error']}\n" and stored > 8
    assert not (tmp_path / "o").exists()


def test_interrupt_ends_with_one_line(
    tmp_path: Path, memory: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from numem.job import durable

    monkeypatch.setattr(durable, "publish", lambda *_: signal.raise_signal(signal.SIGINT))
    prompts = table(tmp_path / "t.jsonl", seed=9, length=100)
    arguments = ("run", prompts, "--out", tmp_path / "o", "--memory", memory, "--model", model)
    result = run(*arguments)
    assert result.exit_code == 130
    assert result.stderr.startswith("cancelled") and result.stderr.count("\n") <= 2
    assert result.stdout == ""
    assert json.loads(run(*arguments, "--json").stdout)["type"] == "KeyboardInterrupt"
    assert "Traceback" not in result.output


def test_an_interrupted_run_says_what_it_keeps_and_goes_on(
    tmp_path: Path, memory: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from numem.job.journal import Entry, Journal

    append, appended = Journal.append, 0

    def interrupted(self: Journal, entry: Entry) -> None:
        nonlocal appended
        append(self, entry)
        appended += 1
        if appended == 3:
            signal.raise_signal(signal.SIGINT)

    prompts = table(tmp_path / "t.jsonl", seed=11, length=100)
    options = ("--memory", memory, "--model", model, "--max-new-tokens", 4, "--temperature", 0.8, "--seed", 3, "--json")
    arguments = ("run", prompts, "--out", tmp_path / "o", *options)
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", interrupted)
        result = run(*arguments)
    assert result.exit_code == 130
    assert "of 6 prompts are finished and kept: run it again and it goes on with the rest" in result.stderr
    resumed = json.loads(run(*arguments).stdout)
    assert resumed["resumed"] >= 3 and resumed["exact"] is True
    finished = run("run", prompts, "--out", tmp_path / "p", *options[:-1])
    assert "finished before" in finished.stdout
    again = json.loads(run(*arguments, "--again").stdout)
    assert (again["resumed"], again["decode_tokens"] > 0) == (0, True)
    assert (tmp_path / "o/completions.jsonl").read_bytes() == (tmp_path / "p/completions.jsonl").read_bytes()
    other = json.loads(run(*arguments[:-1], "--max-new-tokens", 3, "--json").stdout)
    assert other["resumed"] == 0
    for wrong in (("--top-p", 0), ("--temperature", "nan"), ("--top-k", -1)):
        assert run(*arguments, *wrong).exit_code in (1, 2)


def test_ui_refuses_a_taken_port(memory: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = run("ui", "--memory", memory, "--port", port)
    assert result.exit_code == 1
    assert f"port {port} on 127.0.0.1" in result.stderr and "--port" in result.stderr


def test_ui_gets_the_deployment_of_the_last_run(memory: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dagster_project import ui
    from dagster_project.deployment import Deployment

    monkeypatch.delenv("NUMEM_MODEL", raising=False)
    environment = ui.environment(Deployment.here(memory=str(memory)), chosen=False)
    assert environment["NUMEM_MEMORY"] == str(memory)
    assert environment["NUMEM_MODEL"] == str(model)
    assert environment["DAGSTER_HOME"] == str(memory / "dagster")
    command = ui.command(3001)
    assert command[3:6] == ["-m", "dagster", "dev"]
    assert command[command.index("-h") + 1] == "127.0.0.1"
    assert "dagster_project.definitions" in command
