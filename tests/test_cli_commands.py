"""The command line itself: quick, without Dagster, one JSON object, one line per error; models and bench."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.text import Text
from typer.testing import CliRunner, Result

import numem.bench
import numem.bench.report
from numem.cli import app
from numem.environment import memory_home
from numem.errors import InputError, NotFoundError
from numem.terminal import emit, fail, guarded, open_memory, table
from tests.model_fixtures import tiny_gguf, tiny_model

ROOT = Path(__file__).parent.parent
WITH_MEMORY = (
    *("generate", "log", "show", "fork", "verify", "scrub", "maintain", "archive", "forget"),
    *("why", "replay"),
    *("tiers", "pin", "unpin", "pins", "demand", "cancel", "demands", "reconcile", "evict"),
)
COMMANDS = (*WITH_MEMORY, "doctor", "models", "bench")


def numem_(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_help_lists_the_commands_and_every_one_has_json() -> None:
    listing = numem_("--help").stdout
    assert all(command in listing for command in COMMANDS)
    for command in (*WITH_MEMORY, "doctor", "bench"):
        assert "--json" in numem_(command, "--help").stdout
    for command in ("list", "fetch", "import", "verify", "card"):
        assert "--json" in numem_("models", command, "--help").stdout
    for command in WITH_MEMORY:
        assert "--memory" in numem_(command, "--help").stdout


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    heavy = ["torch", "lance", "lancedb", "dagster", "transformers", "pyarrow", "numpy", "matplotlib"]
    code = f"import sys, numem.cli; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
    best = 10.0
    for _ in range(3):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "numem.cli", "--help"], cwd=ROOT, capture_output=True, check=True)
        best = min(best, time.perf_counter() - began)
    assert best < 1.5


def test_no_command_loads_dagster(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom numem.cli import app\n"
        "from numem.job.model_free import run_model_free\nfrom pathlib import Path\n"
        f"home = {str(tmp_path / 'm')!r}\nrun_model_free(Path(home))\n"
        "for c in (['log'], ['verify'], ['show', '0'], ['models', 'list'], ['generate', 'x', 'y'], ['bench', 'x']):\n"
        "    extra = [] if c[0] in ('models', 'bench') else ['--memory', home]\n"
        "    CliRunner().invoke(app, [*c, *extra])\n"
        "print([m for m in sys.modules if m.split('.')[0] == 'dagster'])\n"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=90)
    assert out.stdout.strip() == "[]"


def test_version_and_usage_errors() -> None:
    assert numem_("--version").stdout == f"numem {numem.__version__}\n"
    assert numem_("nonsense").exit_code == 2
    assert numem_("show").exit_code == 2
    assert numem_("generate", "model", "prompt", "--max-new-tokens", "0").exit_code == 2


def test_emit_prints_one_object_or_the_views(capsys: pytest.CaptureFixture[str]) -> None:
    emit({"a": 1, "b": ["é", None]}, True, "not shown")
    captured = capsys.readouterr()
    assert captured.out == '{"a": 1, "b": ["é", null]}\n' and captured.err == ""
    emit({"a": 1}, False, "[main] as it is", table(("x",), [("[red]plain[/red]",), (12345,)]), Text("rich"))
    out = capsys.readouterr().out
    assert out.startswith("[main] as it is\n") and "[red]plain[/red]" in out and "12,345" in out and "rich" in out
    with pytest.raises(ValueError, match="JSON"):
        emit({"a": float("nan")}, True)


def test_fail_is_one_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as caught:
        fail("two\nlines")
    assert caught.value.exit_code == 1
    captured = capsys.readouterr()
    assert captured.err == "error: two lines\n" and captured.out == ""


@pytest.mark.parametrize(
    ("raised", "line"),
    [
        (InputError("p.jsonl:3: empty"), "error: p.jsonl:3: empty"),
        (NotFoundError("no such id"), "error: no such id"),
        (PermissionError(13, "Permission denied", "/data/x"), "error: /data/x: Permission denied"),
        (OSError("odd"), "error: command: odd"),
    ],
)
def test_expected_errors_become_one_line(raised: Exception, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    @guarded
    def command() -> None:
        raise raised

    with pytest.raises(typer.Exit):
        command()
    assert capsys.readouterr().err == line + "\n"


@pytest.mark.parametrize("raised", [BrokenPipeError(), ValueError("a bug"), KeyError("a bug")])
def test_bugs_and_closed_pipes_are_not_disguised(raised: Exception) -> None:
    @guarded
    def command() -> None:
        raise raised

    with pytest.raises(type(raised)):
        command()


def test_the_default_memory_lies_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NUMEM_CACHE", str(tmp_path / "cache"))
    assert memory_home(None) == str(tmp_path / "cache" / "memory")
    assert memory_home("s3://bucket/x") == "s3://bucket/x"
    with pytest.raises(NotFoundError, match="no memory here"), open_memory(None):
        pass
    assert not (tmp_path / "cache").exists()


def test_models_list(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NUMEM_CACHE", str(tmp_path))
    document = json.loads(numem_("models", "list", "--json").stdout)
    known = {m["key"]: m for m in document["models"]}
    assert known["smollm2-135m-instruct"]["family"] == "llama"
    assert not any(m["present"] for m in document["models"])
    assert "smollm2-135m-instruct" in numem_("models", "list").stdout


def test_models_fetch_of_an_unknown_key_is_one_line() -> None:
    result = numem_("models", "fetch", "smollm2-135m-instuct")
    assert result.exit_code == 1 and result.stdout == ""
    assert "did you mean smollm2-135m-instruct" in result.stderr and len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("models", "fetch", "[/x]"),
        ("models", "import", "[/x].gguf", "[/y]"),
        ("bench", "[/x]"),
        ("generate", "[/x]", "y"),
    ],
)
def test_what_looks_like_markup_is_printed_as_it_is(arguments: tuple[str, ...]) -> None:
    result = numem_(*arguments)
    assert result.exit_code == 1 and result.stdout == ""
    assert result.stderr.startswith("error: ") and "[/x]" in result.stderr and len(result.stderr.splitlines()) == 1


def test_markup_in_a_title_or_a_column_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    emit({}, False, table(("column [/a]",), [("[/b]",)], "[red]hi[/nope]"))
    printed = "".join(capsys.readouterr().out.split())
    assert all(word in printed for word in ("column[/a]", "[/b]", "[red]hi[/nope]"))


@pytest.mark.parametrize(
    ("arguments", "code", "kind"),
    [
        (("models", "fetch", "no-such-model", "--json"), 1, "UnknownModelError"),
        (("models", "import", "no.gguf", "out", "--json"), 1, None),
        (("bench", "nonsense", "--json"), 1, "InputError"),
        (("generate", "no-such-model", "x", "--json"), 1, "UnknownModelError"),
        (("log", "--memory", "absent", "--json"), 1, "NotFoundError"),
        (("show", "--json"), 2, None),
        (("nonsense", "--json"), 2, None),
        (("generate", "m", "p", "--max-new-tokens", "0", "--json"), 2, None),
        (("models", "list", "--nonsense", "--json"), 2, None),
    ],
)
def test_an_error_with_json_is_one_object_and_one_line(
    arguments: tuple[str, ...], code: int, kind: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    result = numem_(*arguments)
    assert result.exit_code == code
    assert len(result.stdout.splitlines()) == 1
    document = json.loads(result.stdout)
    assert set(document) == {"error", "type"} and kind in (None, document["type"])
    assert result.stderr == f"error: {document['error']}\n"


def test_json_changes_no_other_exit() -> None:
    assert numem_("models", "list", "--json").exit_code == 0
    helped = numem_("show", "--json", "--help")
    assert helped.exit_code == 0 and "Usage" in helped.stdout
    # Behind -- it is a value, and no option.
    assert "error" not in numem_("show", "--memory", "absent", "--", "--json").stdout


def test_models_import_writes_a_directory_that_generates(tmp_path: Path) -> None:
    gguf = tiny_gguf(tmp_path / "tiny.gguf", tiny_model(tmp_path / "hf"))
    result = numem_("models", "import", str(gguf), str(tmp_path / "out"), "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout) == {"gguf": str(gguf), "directory": str(tmp_path / "out")}
    arguments = ("--max-new-tokens", "2", "--json", "--memory", str(tmp_path / "m"))
    assert numem_("generate", str(tmp_path / "out"), "the in", *arguments).exit_code == 0
    missing = numem_("models", "import", str(tmp_path / "no.gguf"), str(tmp_path / "out2"))
    assert missing.exit_code == 1 and "no.gguf" in missing.stderr and len(missing.stderr.splitlines()) == 1
    assert not (tmp_path / "out2").exists()


@pytest.fixture
def stub_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(name: str) -> dict[str, Any]:
        if name not in numem.bench.NAMES:
            raise InputError(f"bench {name!r}: unknown; known: core, paged, store, trace")
        return {"machine": {"cpu": "x"}, "figure": len(name)}

    monkeypatch.setattr(numem.bench, "run", run)
    monkeypatch.setattr(numem.bench.report, "render", lambda results: f"# Benchmarks of {', '.join(results)}\n")


@pytest.mark.usefixtures("stub_bench")
def test_bench_prints_figures_or_a_report(tmp_path: Path) -> None:
    assert json.loads(numem_("bench", "core", "--json").stdout) == {"machine": {"cpu": "x"}, "figure": 4}
    assert set(json.loads(numem_("bench", "all", "--json").stdout)) == set(numem.bench.NAMES)
    assert numem_("bench", "paged").stdout.startswith("# Benchmarks of paged")
    report = tmp_path / "docs" / "b.md"
    written = numem_("bench", "all", "--write", str(report))
    assert written.exit_code == 0 and report.read_text() == f"# Benchmarks of {', '.join(numem.bench.NAMES)}\n"
    assert list(report.parent.iterdir()) == [report]
    unknown = numem_("bench", "nonsense")
    assert unknown.exit_code == 1 and "nonsense" in unknown.stderr and unknown.stdout == ""
