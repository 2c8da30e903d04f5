"""What the commands share: consoles, options, errors as one line, results as JSON or as views, opening a memory.

Results go to stdout, progress and errors to stderr. With --json a command prints exactly one JSON object on stdout: its
result, or {"error": one line, "type": class of the error}.
"""

import functools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, ParamSpec, TypeVar

import typer
from rich.console import Console, RenderableType
from rich.status import Status
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from numem.environment import memory_home, places
from numem.errors import NotFoundError, NumemError, ReadOnlyError

if TYPE_CHECKING:
    from numem.store.memory import Memory

P = ParamSpec("P")
R = TypeVar("R")

console = Console(stderr=True)
out = Console()

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]
MemoryOption = Annotated[
    str | None,
    typer.Option("--memory", metavar="DIR", help="The memory: a directory or s3:// URL. Default: in the user's cache."),
]


MaxPositionOption = Annotated[
    int | None,
    typer.Option("--max-position", min=1, help="Context to load the model with. Default: its own, at most 8,192."),
]


def busy(what: str) -> Status:
    """A spinner on stderr while something takes long; nothing in `what` is taken for markup."""
    return console.status(Text(what))


def note(line: str) -> None:
    """Print a line of progress or a warning on stderr, as it is."""
    typer.echo(line, err=True)


def fail(message: str) -> NoReturn:
    """Print one line on stderr and exit with code 1."""
    typer.echo(f"error: {_line(message)}", err=True)
    raise typer.Exit(1)


def say_error(message: str, kind: str) -> None:
    """Print the one JSON object of a command that failed before it had a result."""
    typer.echo(json.dumps({"error": _line(message), "type": kind}, ensure_ascii=True))


def _line(message: str) -> str:
    return " ".join(message.splitlines())


class Commands(TyperGroup):
    """The commands; with --json a wrong use of them gives one JSON object too. Its exit code stays 2."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        given = list(sys.argv[1:] if args is None else args)
        options = given[: given.index("--")] if "--" in given else given
        as_json = standalone_mode and "--json" in options
        try:
            code = super().main(
                args, prog_name, complete_var, standalone_mode and not as_json, windows_expand_args, **extra
            )
        except Exception as error:
            # Typer brings its own click, and gives no public name to the base of what that raises on wrong use.
            code, message = getattr(error, "exit_code", None), getattr(error, "format_message", None)
            if not as_json or not isinstance(code, int) or message is None:
                raise
            say_error(message(), type(error).__name__)
            typer.echo(f"error: {_line(message())}", err=True)
        if as_json:
            sys.exit(code if isinstance(code, int) else 0)
        return code


def guarded(command: Callable[P, R]) -> Callable[P, R]:
    """A command whose expected errors become one line on stderr, with --json also one object, and exit code 1."""

    @functools.wraps(command)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except NumemError as error:
            message, kind = str(error), type(error).__name__
        except BrokenPipeError:
            raise  # the reader of our output went away: not an error of ours
        except OSError as error:
            message, kind = f"{error.filename or command.__name__}: {error.strerror or error}", type(error).__name__
        if kwargs.get("as_json"):
            say_error(message, kind)
        fail(message)

    return call


def emit(result: Mapping[str, Any], as_json: bool, *views: RenderableType) -> None:
    """Print a result on stdout: as one JSON object, or as its views for people (a plain string is printed as it is)."""
    if as_json:
        typer.echo(json.dumps(result, ensure_ascii=False, allow_nan=False))
        return
    for view in views:
        if isinstance(view, str):
            typer.echo(view)
        else:
            out.print(view)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str | None = None) -> Table:
    """A Rich table of plain values; nothing in them is taken for markup."""
    view = Table(title=None if title is None else Text(title, style="table.title"), title_justify="left")
    for column in columns:
        view.add_column(Text(column), overflow="fold")
    for row in rows:
        view.add_row(*(Text(f"{cell:,}" if type(cell) is int else str(cell)) for cell in row))
    return view


@contextmanager
def open_memory(given: str | None, *, create: bool = False, looks: bool = False) -> "Iterator[Memory]":
    """The memory of a command, through the tiers of the environment; one that does not exist is refused unless it may
    be created. A command that only `looks` also opens one that this process cannot write to."""
    home = memory_home(given)
    if not create and "://" not in home and not (Path(home) / "catalog").is_dir():
        raise NotFoundError(f"{home}: no memory here; run `numem demo` first, or name one with --memory DIR")
    from numem.store.memory import Memory

    try:
        opened = Memory(home, **places())
    except ReadOnlyError:
        if not looks:
            raise
        opened = Memory(home, **places(), read_only=True)
    with opened as memory:
        yield memory
