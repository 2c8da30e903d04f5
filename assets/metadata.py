"""What a person reads on an event in the UI: bounded tables, numbers with their units, previews on request.

Events never shrink, so nothing here grows with the data: at most 20 rows and 20 kB a value, the total stated.

Dagster concept: https://docs.dagster.io/guides/build/assets/metadata-and-tags
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import dagster as dg

MAX_ROWS = 20
MAX_CELL = 200
MAX_VALUE_BYTES = 20_000
# Room for the schema and the framing of every row in Dagster's serialisation.
_SCHEMA_BYTES = 6_000

Cell = str | int | float | None


def table(
    name: str, columns: Mapping[str, str], rows: Sequence[Sequence[Cell]], total: int | None = None
) -> dict[str, Any]:
    """A table of at most 20 rows as metadata, beside the statement how many there are.

    Args:
        name: key of the metadata entry; the statement stands under `<name>_shown`.
        columns: column name -> Dagster type: "string", "int" or "float".
        rows: all rows, or the first of `total`; those beyond the bound are left out.
    """
    schema = dg.TableSchema(columns=[dg.TableColumn(column, kind) for column, kind in columns.items()])
    shown = [dict(zip(columns, map(_cell, row), strict=True)) for row in rows[:MAX_ROWS]]
    while len(json.dumps(shown)) > MAX_VALUE_BYTES - _SCHEMA_BYTES:
        shown.pop()
    return {
        name: dg.MetadataValue.table(records=[dg.TableRecord(row) for row in shown], schema=schema),
        f"{name}_shown": f"{len(shown)} of {len(rows) if total is None else total}",
    }


def lines(values: Sequence[str], total: int | None = None) -> str:
    """At most 20 sentences (of `total`) as a Markdown list, the rest counted; "none" of no values."""
    if not values:
        return "none"
    more = (len(values) if total is None else total) - min(len(values), MAX_ROWS)
    rest = [f"- and {more} more"] if more else []
    return "\n".join([*(f"- {clip(value)}" for value in values[:MAX_ROWS]), *rest])


def clip(text: str, limit: int = MAX_CELL) -> str:
    """One line of at most `limit` characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def ms(value: float) -> dg.FloatMetadataValue:
    """Milliseconds to a tenth."""
    return dg.MetadataValue.float(round(value, 1))


def _cell(value: Cell) -> str | int | float:
    if value is None:
        return ""
    return clip(value) if isinstance(value, str) else round(value, 3)
