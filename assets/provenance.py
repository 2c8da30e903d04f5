"""Exact lineage on Dagster's events: which event of the parent, in this partition, an asset was made from.

Dagster records the newest event of the parent over all partitions, and for a partitioned parent a hash instead of its
data version. The exact values are written in their place; the catalog remains the record that decides anything.

Dagster concept: https://docs.dagster.io/guides/build/assets/asset-versioning-and-caching
"""

import hashlib
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

import dagster as dg

INPUT_VERSION = "dagster/input_data_version/"
INPUT_EVENT = "dagster/input_event_pointer/"
DATA_VERSION = "dagster/data_version"

_PROGRAM = ("identity", "job", "kernels", "models", "runtime", "state")
_SOURCES = (".py", ".c", ".h")


@cache
def code_version(*rooms: str) -> str:
    """Fingerprint of rooms of the library, by default those that compute state: SHA-256 over sources, 32 hex digits."""
    digest = hashlib.sha256(b"numem/code/v1")
    for room in rooms or _PROGRAM:
        for name, body in _sources(files("numem") / room, room):
            for part in (name.encode(), body):
                digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()[:32]


def _sources(directory: Traversable, name: str) -> Iterable[tuple[str, bytes]]:
    for entry in sorted(directory.iterdir(), key=lambda e: e.name):
        path = f"{name}/{entry.name}"
        if entry.is_dir():
            yield from _sources(entry, path)
        elif entry.name.endswith(_SOURCES):
            yield path, entry.read_bytes()


def exact_parents(context: dg.AssetExecutionContext) -> dict[str, str]:
    """Event tags that name, for every parent, its event of this partition: that of this run, else the newest."""
    tags = {}
    for parent in sorted(context.assets_def.dependency_keys):
        record = _event(context, parent)
        if record is None or record.asset_materialization is None:
            continue
        name = parent.to_user_string()
        tags[f"{INPUT_EVENT}{name}"] = str(record.storage_id)
        tags[f"{INPUT_VERSION}{name}"] = (record.asset_materialization.tags or {}).get(DATA_VERSION, "")
    return tags


def _event(context: dg.AssetExecutionContext, asset: dg.AssetKey) -> dg.EventLogRecord | None:
    wanted = dg.AssetRecordsFilter(asset_key=asset, asset_partitions=[context.partition_key])
    records = context.instance.fetch_materializations(wanted, limit=20).records
    mine = [record for record in records if record.run_id == context.run_id]
    return next(iter([*mine, *records]), None)
