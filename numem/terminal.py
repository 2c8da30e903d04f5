"""What the commands share: consoles, options, errors as one line, results as JSON or as views, opening a memory.

Results go to stdout, progress and errors to stderr. With --json a command prints exactly one JSON object on stdout.
"""

import functools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, ParamSpec, TypeVar

import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from numem.errors import NotFoundError, NumemError

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


def note(line: str) -> None:
    """Print a line of progress or a warning on stderr, as it is."""
    typer.echo(line, err=True)


def fail(message: str) -> NoReturn:
    """Print one line on stderr and exit with code 1."""
    typer.echo(f"error: {' '.join(message.splitlines())}", err=True)
    raise typer.Exit(1)


def guarded(command: Callable[P, R]) -> Callable[P, R]:
    """A command whose expected errors become one line on stderr and exit code 1."""

    @functools.wraps(command)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except NumemError as error:
            fail(str(error))
        except BrokenPipeError:
            raise  # the reader of our output went away: not an error of ours
        except OSError as error:
            fail(f"{error.filename or command.__name__}: {error.strerror or error}")

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
    view = Table(title=title, title_justify="left")
    for column in columns:
        view.add_column(column, overflow="fold")
    for row in rows:
        view.add_row(*(Text(f"{cell:,}" if type(cell) is int else str(cell)) for cell in row))
    return view


def memory_home(given: str | None) -> str:
    """The memory a command works on: as given, else $NUMEM_MEMORY, else the default below the user's cache."""
    given = given or os.environ.get("NUMEM_MEMORY")
    if given:
        return given
    from numem.models.registry import cache_dir

    return str(cache_dir() / "memory")


@contextmanager
def open_memory(given: str | None, *, create: bool = False) -> "Iterator[Memory]":
    """The memory of a command; one that does not exist is refused unless it may be created."""
    home = memory_home(given)
    if not create and "://" not in home and not (Path(home) / "catalog").is_dir():
        raise NotFoundError(f"{home}: no memory here; run `numem demo` first, or name one with --memory DIR")
    from numem.store.memory import Memory

    with Memory(home) as memory:
        yield memory
