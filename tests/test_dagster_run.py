"""The job in process, on a persistent instance, over a tiny random model."""

import json
import shutil
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import dagster as dg
import pytest

from dagster_project import runs
from dagster_project.assets.metadata import MAX_ROWS, MAX_VALUE_BYTES
from dagster_project.definitions import build_defs
from dagster_project.deployment import Deployment
from dagster_project.instance import open_instance
from dagster_project.jobs import CONTINUE_PROMPTS
from dagster_project.partitions import add_batches
from dagster_project.runs import Finished, Settings, continue_prompts
from numem.errors import InputError
from numem.job import record as facts
from numem.job.batch import Batch, load_batch, make_batch, save_batch
from numem.job.prompts import read_prompts
from numem.job.record import silent
from numem.job.reports import PrefillReport, PublishedReport
from numem.job.summary import summarise
from numem.store.memory import Memory
from tests.dagster_fixtures import MARKER, deployment, materialisation, metadata, model_directory, table

QUICK = Settings(max_new_tokens=4, lanes=2, ignore_eos=True, arrivals="restore", again=True)
ASSETS = (
    "prompts",
    "prefill",
    "published_chunks",
    "promoted_replicas",
    "restored_prefixes",
    "decoded_continuations",
)
# 2 passages of 1 + 560 + 8 + 1 shared tokens, a digit and 20, 21 or 22 of each question.
REQUESTED = 2 * (3 * 570 + 21 + 22 + 23)
ONCE = 2 * (570 + 21 + 22 + 23)
CHUNKS = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_directory(tmp_path_factory.mktemp("dagster"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return table(tmp_path_factory.mktemp("tables") / "prompts.jsonl")


@dataclass
class Ran:
    """Two runs of the job over one table and one memory, the second under a new handle of everything."""

    where: Deployment
    root: Path
    first: Finished
    second: Finished


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, model: Path, prompts: Path) -> Ran:
    root = tmp_path_factory.mktemp("runs")
    where = deployment(root, model)
    first = continue_prompts(where, prompts, QUICK, progress=silent)
    return Ran(where, root / "memory", first, continue_prompts(where, prompts, QUICK, progress=silent))


@pytest.fixture
def instance(ran: Ran) -> Iterator[dg.DagsterInstance]:
    with open_instance(ran.root) as opened:
        yield opened


def distinct(batch: Batch) -> int:
    """Nodes of the trie of all prompts: what must be computed once each."""
    return len({item.tokens[:n] for item in batch.items for n in range(1, len(item.tokens) + 1)})


def test_first_run_computes_each_token_once(ran: Ran) -> None:
    summary = ran.first.summary
    with Memory(ran.root) as memory:
        batch = load_batch(memory, summary.batch)
    assert summary.requested_tokens == batch.tokens == REQUESTED
    assert summary.computed_tokens + summary.shared_tokens + summary.restored_tokens == REQUESTED
    assert summary.computed_tokens == distinct(batch) == ONCE
    assert (summary.chunks_stored, summary.chunks_reused) == (CHUNKS, 0)
    assert summary.exact is True
    assert summary.proof["prompts"] == 2
    assert summary.warnings == ()


def test_second_run_writes_nothing_and_computes_suffixes_only(ran: Ran) -> None:
    """dagster#14842: Dagster runs every step again; the short cut is inside them, and they say so."""
    summary = ran.second.summary
    assert (summary.chunks_stored, summary.chunks_reused, summary.stored_bytes) == (0, CHUNKS, 0)
    assert summary.computed_tokens == 2 * (21 + 22 + 23)
    assert summary.exact is True
    assert Path(summary.outputs).read_bytes().count(b"\n") == 6


def test_a_chunk_met_by_prefill_and_publication_is_reused_once(ran: Ran) -> None:
    with Memory(ran.root) as memory:
        batch = load_batch(memory, ran.first.summary.batch)
        decoded = facts.recall(memory, batch, ran.second.run_id, "decode")
        memory.record("job/decode", bytes.fromhex(batch.id), {**(decoded or {}), "run": "both"})
        facts.record(memory, batch, "both", "prefill", PrefillReport((), 0, 0, reused_chunks=CHUNKS, ms=1.0))
        assert summarise(memory, batch, "both").chunks_reused == CHUNKS
        facts.record(memory, batch, "both", "publish", PublishedReport(0, 0, CHUNKS, 0, missing=0, ms=1.0))
        summary = summarise(memory, batch, "both")
        assert (summary.chunks_stored, summary.chunks_reused) == (0, CHUNKS)
        facts.record(memory, batch, "both", "publish", PublishedReport(2, 2, 3, 10, missing=1, ms=1.0))
        summary = summarise(memory, batch, "both")
        assert (summary.chunks_stored, summary.chunks_reused) == (2, CHUNKS - 3)


def test_out_gets_the_completions_of_its_own_run(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run of the same batch ends just before this one delivers; both deliver into one directory."""
    prompts = table(tmp_path / "t.jsonl", passages=1, questions=2, length=40)
    where, out = deployment(tmp_path, model), tmp_path / "out"
    both: list[Finished] = []
    copy = runs._copy

    def late(outputs: Path, to: Path) -> Path:
        both.append(continue_prompts(where, prompts, replace(QUICK, max_new_tokens=1), progress=silent))
        return copy(outputs, to)

    one = continue_prompts(where, prompts, QUICK, out=out, progress=silent)
    before = (out / "completions.jsonl").read_bytes()
    monkeypatch.setattr(runs, "_copy", late)
    two = continue_prompts(where, prompts, QUICK, out=out, progress=silent)
    assert one.summary.outputs == two.summary.outputs == str(out / "completions.jsonl")
    assert (out / "completions.jsonl").read_bytes() == before
    assert [path.name for path in out.iterdir()] == ["completions.jsonl"]
    assert both[0].summary.decode_tokens < two.summary.decode_tokens


def test_a_delivery_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = tmp_path / "out/completions.jsonl", tmp_path / "new/completions.jsonl"
    for path in (old, new):
        path.parent.mkdir()
        path.write_text(path.parent.name)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(shutil, "copyfileobj", full)
        runs._copy(new, old.parent)
    assert (old.read_text(), list(old.parent.iterdir())) == ("out", [old])
    assert runs._copy(new, old.parent) == old
    assert (old.read_text(), old.stat().st_mode & 0o777) == ("new", 0o644)


def test_everything_a_run_writes_stays_below_the_memory(ran: Ran) -> None:
    assert Path(ran.first.summary.outputs).is_relative_to(ran.root)
    assert ran.first.instance == ran.root / "dagster"
    assert sorted(p.name for p in ran.root.parent.iterdir()) == ["memory"]


@pytest.mark.parametrize("asset", ASSETS)
def test_versions_are_content(ran: Ran, instance: dg.DagsterInstance, asset: str) -> None:
    first, second = (
        materialisation(instance, asset, ran.first.summary.batch, run.run_id) for run in (ran.first, ran.second)
    )
    for record in (first, second):
        assert record.asset_materialization is not None and record.asset_materialization.tags is not None
        assert len(record.asset_materialization.tags["dagster/data_version"]) in (32, 64)
    assert first.asset_materialization and second.asset_materialization
    tags = [r.asset_materialization.tags or {} for r in (first, second) if r.asset_materialization]
    assert tags[0]["dagster/data_version"] == tags[1]["dagster/data_version"]


def test_metadata_is_bounded_and_named(ran: Ran, instance: dg.DagsterInstance) -> None:
    """dagster#17189, airbyte PR#45336: no value grows with the data."""
    for asset in ASSETS:
        record = materialisation(instance, asset, ran.first.summary.batch)
        assert record.asset_materialization is not None
        entries = record.asset_materialization.metadata
        assert 5 <= len(entries) <= 20
        for key, value in entries.items():
            assert len(dg.serialize_value(cast(Any, value))) <= MAX_VALUE_BYTES, key
    record = materialisation(instance, "decoded_continuations", ran.first.summary.batch)
    assert record.asset_materialization is not None
    prompts = record.asset_materialization.metadata["prompts"]
    assert isinstance(prompts, dg.TableMetadataValue)
    assert {"id", "tokens", "computed", "shared", "restored"} <= {column.name for column in prompts.schema.columns}
    assert len(prompts.records) == 6
    shown = metadata(record)
    assert shown["prompts_shown"] == "6 of 6"
    assert "data:image/svg+xml;base64," in shown["figure"]


def test_checks_pass_and_name_their_partition(ran: Ran, instance: dg.DagsterInstance) -> None:
    """dagster#17005, #27747: a check verifies the batch that was just materialised, and says which."""
    found = {}
    for event in instance.all_logs(ran.second.run_id):
        if event.dagster_event and event.dagster_event.event_type_value == "ASSET_CHECK_EVALUATION":
            check = event.dagster_event.asset_check_evaluation_data
            found[check.check_name] = check.passed
            assert check.partition == ran.second.summary.batch
            assert check.metadata["partition"].value == ran.second.summary.batch
            assert ran.second.summary.batch in (check.description or "")
    assert found == dict.fromkeys(
        ("chunks_intact", "lineage_closed", "stored_once", "replicas_intact", "restored_bit_exact"), True
    )


def run_assets(where: Deployment, instance: dg.DagsterInstance, batch: str, *assets: str) -> dg.ExecuteInProcessResult:
    """Materialise some of the assets alone, as a click in the UI would."""
    overrides = {"memory": where.memory_resource(), "model": where.model_resource()}
    defs = build_defs(resource_overrides=overrides)
    add_batches(instance, [batch])
    return defs.resolve_job_def(CONTINUE_PROMPTS).execute_in_process(
        instance=instance,
        partition_key=batch,
        run_config={
            "loggers": {"console": {"config": {"log_level": "CRITICAL"}}},
            "resources": {"runtime": {"config": {"max_new_tokens": 4, "lanes": 2, "ignore_eos": True}}},
        },
        asset_selection=[dg.AssetKey(asset) for asset in assets] or None,
    )


@pytest.mark.parametrize("asset", ASSETS)
def test_single_assets_run_alone(ran: Ran, instance: dg.DagsterInstance, asset: str) -> None:
    """dagster#18965, #20925: a retry is a re-run, of any part, with the same result."""
    batch = ran.first.summary.batch
    before = materialisation(instance, asset, batch, ran.first.run_id).asset_materialization
    result = run_assets(ran.where, instance, batch, asset)
    after = materialisation(instance, asset, batch, result.run_id).asset_materialization
    assert before is not None and after is not None
    assert (after.tags or {})["dagster/data_version"] == (before.tags or {})["dagster/data_version"]
    assert all(check.passed for check in result.get_asset_check_evaluations())


def test_parents_are_the_exact_events(ran: Ran, instance: dg.DagsterInstance, tmp_path: Path) -> None:
    """The override of Dagster's lineage tags, and the high-water mark that it replaces: an upgrade must show here."""
    one = ran.first.summary.batch
    with ran.where.memory_resource().opened() as memory:
        lm = ran.where.model_resource().load()
        other = make_batch(lm, read_prompts(table(tmp_path / "t.jsonl", passages=1, length=300)), model="m")
        save_batch(memory, other)
    run_assets(ran.where, instance, one, "prefill")
    run_assets(ran.where, instance, other.id, "prompts", "prefill")
    result = run_assets(ran.where, instance, one, "published_chunks")
    record = materialisation(instance, "published_chunks", one, result.run_id)
    parent = materialisation(instance, "prefill", one)
    newest = materialisation(instance, "prefill", other.id)
    assert record.asset_materialization and parent.asset_materialization
    tags = record.asset_materialization.tags or {}
    assert newest.storage_id > parent.storage_id
    assert tags["dagster/input_event_pointer/prefill"] == str(parent.storage_id)
    assert (
        tags["dagster/input_data_version/prefill"] == (parent.asset_materialization.tags or {})["dagster/data_version"]
    )

    @dg.asset(deps=["prefill"], partitions_def=dg.DynamicPartitionsDefinition(name="prompt_batches"))
    def plain() -> dg.MaterializeResult[Any]:
        return dg.MaterializeResult()

    upstream = dg.AssetSpec("prefill", partitions_def=dg.DynamicPartitionsDefinition(name="prompt_batches"))
    done = dg.materialize([plain, upstream], partition_key=one, instance=instance, selection=[plain])
    marked = materialisation(instance, "plain", one, done.run_id).asset_materialization
    assert marked is not None
    assert (marked.tags or {})["dagster/input_event_pointer/prefill"] == str(newest.storage_id)


def test_lost_spool_is_recomputed_and_counted(tmp_path: Path, model: Path, prompts: Path) -> None:
    where = deployment(tmp_path, model)
    with where.memory_resource().opened() as memory, open_instance(memory.local) as instance:
        batch = make_batch(where.model_resource().load(), read_prompts(prompts), model=str(model))
        save_batch(memory, batch)
        run_assets(where, instance, batch.id, "prompts", "prefill")
        assert len(memory.staged(batch.chunk_ids())) == CHUNKS
    spool = tmp_path / "memory/spool"
    shutil.rmtree(spool)
    with where.memory_resource().opened() as memory, open_instance(memory.local) as instance:
        result = run_assets(where, instance, batch.id, *ASSETS[2:])
        published = metadata(materialisation(instance, "published_chunks", batch.id))
        assert (published["chunks_stored"], published["chunks_missing"]) == (0, CHUNKS)
        decoded = metadata(materialisation(instance, "decoded_continuations", batch.id))
        assert decoded["tokens_restored"] == 0
        assert "6 chunks were gone before publication" in decoded["warnings"]
        assert decoded["exact"] == "true"
        failed = {check.check_name for check in result.get_asset_check_evaluations() if not check.passed}
        assert failed == {"chunks_intact", "lineage_closed", "replicas_intact"}
    again = continue_prompts(where, prompts, QUICK, progress=silent)
    assert (again.summary.chunks_stored, again.summary.exact) == (CHUNKS, True)
    assert Path(again.summary.outputs).is_file() and Path(str(decoded["outputs"])).is_file()


def test_wiping_events_deletes_no_data(ran: Ran, instance: dg.DagsterInstance) -> None:
    """dagster#14749, #15526: deletion is the tier's business, not Dagster's."""
    with Memory(ran.root) as memory:
        before = memory.usage()
    for asset in ASSETS:
        instance.wipe_assets([dg.AssetKey(asset)])
    with Memory(ran.root) as memory:
        batch = load_batch(memory, ran.first.summary.batch)
        assert memory.usage() == before
        assert all(memory.available(chunk) for chunk in batch.chunk_ids())
        assert memory.verify(batch.chunk_ids()).ok


def texts(directory: Path) -> Iterator[bytes]:
    """Everything that an instance keeps, as bytes: rows of its databases and other files."""
    for path in sorted(directory.rglob("*")):
        if path.suffix == ".db":
            with sqlite3.connect(path) as database:
                yield "\n".join(database.iterdump()).encode()
        elif path.is_file():
            yield path.read_bytes()


def test_no_prompt_text_in_any_event_unless_asked_for(tmp_path: Path, model: Path) -> None:
    prompts = table(tmp_path / "t.jsonl", passages=1, length=40)
    where = deployment(tmp_path, model)
    done = continue_prompts(where, prompts, QUICK, progress=silent)
    rows = [json.loads(line) for line in Path(done.summary.outputs).read_text().splitlines()]
    assert not any(MARKER.encode() in text for text in texts(done.instance))
    assert not any(str(rows[0]["tokens"])[1:-1].encode() in text for text in texts(done.instance))
    continue_prompts(where, prompts, replace(QUICK, previews=True), progress=silent)
    assert any(MARKER.encode() in text for text in texts(done.instance))


def test_tables_on_events_stop_at_twenty_rows(tmp_path: Path, model: Path) -> None:
    prompts = table(tmp_path / "t.jsonl", passages=1, questions=24, length=40)
    where = deployment(tmp_path, model)
    done = continue_prompts(where, prompts, replace(QUICK, max_new_tokens=1, proof=False), progress=silent)
    with open_instance(tmp_path / "memory") as instance:
        shown = metadata(materialisation(instance, "decoded_continuations", done.summary.batch))
    assert shown["prompts_shown"] == f"{MAX_ROWS} of 24"
    assert done.summary.exact is None


def test_checks_of_a_damaged_batch_name_it_and_spare_others(tmp_path: Path, model: Path) -> None:
    """dagster#17005: damage in one batch fails the checks of that batch alone."""
    where = deployment(tmp_path, model)
    one = continue_prompts(where, table(tmp_path / "a.jsonl", passages=1, length=300), QUICK, progress=silent)
    for path in (tmp_path / "memory/object").rglob("*.blob"):
        damage(path)
    two = continue_prompts(where, table(tmp_path / "b.jsonl", passages=1, length=300, seed=5), QUICK, progress=silent)
    assert not [w for w in two.summary.warnings if "check" in w]
    again = continue_prompts(where, tmp_path / "a.jsonl", QUICK, progress=silent)
    (warning,) = [w for w in again.summary.warnings if "check chunks_intact" in w]
    assert one.summary.batch in warning
    assert again.summary.exact is True


def damage(path: Path) -> None:
    body = bytearray(path.read_bytes())
    body[len(body) // 2] ^= 1
    path.write_bytes(body)


def test_run_config_cannot_choose_places_or_models(ran: Ran, instance: dg.DagsterInstance) -> None:
    overrides = {"memory": ran.where.memory_resource(), "model": ran.where.model_resource()}
    job = build_defs(resource_overrides=overrides).resolve_job_def(CONTINUE_PROMPTS)
    for key, config in (("memory", {"home": "/elsewhere"}), ("model", {"key": "other"})):
        with pytest.raises(dg.DagsterResourceFunctionError) as caught:
            job.execute_in_process(
                instance=instance,
                partition_key=ran.first.summary.batch,
                run_config={
                    "resources": {key: {"config": config}},
                    "loggers": {"console": {"config": {"log_level": "CRITICAL"}}},
                },
            )
        assert isinstance(caught.value.user_exception, InputError)
        assert f"resources.{key} is set by the deployment" in str(caught.value.user_exception)


def test_table_of_another_batch_is_refused(ran: Ran, instance: dg.DagsterInstance, tmp_path: Path) -> None:
    other = table(tmp_path / "other.jsonl", passages=1)
    job = build_defs(
        resource_overrides={"memory": ran.where.memory_resource(), "model": ran.where.model_resource()}
    ).resolve_job_def(CONTINUE_PROMPTS)
    with pytest.raises(InputError, match=f"not {ran.first.summary.batch}"):
        job.execute_in_process(
            instance=instance,
            partition_key=ran.first.summary.batch,
            asset_selection=[dg.AssetKey("prompts")],
            run_config=QUICK.run_config(str(other)),
        )
