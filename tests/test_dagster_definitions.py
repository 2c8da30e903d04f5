"""The code location: its graph, its jobs, and what importing it costs."""

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.run_coordinator import DefaultRunCoordinator

from dagster_project.assets.batches import PROMPT_BATCHES, PROMPT_BATCHES_NAME
from dagster_project.definitions import build_defs, defs
from dagster_project.instance import open_instance
from dagster_project.jobs import JOBS
from dagster_project.partitions import add_batches
from dagster_project.resources.process import dagster_thread, shared
from numem.environment import parse_tiers
from numem.errors import CapacityError, InputError
from numem.store.config import TierSpec

ROOT = Path(__file__).parents[1]

# key: (parents, kinds, checks)
MAINTENANCE: dict[str, tuple[list[str], set[str], list[str]]] = {
    "compacted_store": ([], {"lance"}, ["no_orphans", "store_intact"]),
    "reconciled_replicas": ([], {"lance"}, []),
}
GRAPH: dict[str, tuple[list[str], set[str], list[str]]] = {
    **MAINTENANCE,
    "prompts": ([], {"json"}, []),
    "prefill": (["prompts"], {"torch"}, []),
    "published_chunks": (["prefill"], {"lance"}, ["chunks_intact", "lineage_closed", "stored_once"]),
    "promoted_replicas": (["published_chunks"], {"lance"}, ["replicas_intact"]),
    "restored_prefixes": (["promoted_replicas"], {"torch"}, []),
    "decoded_continuations": (["restored_prefixes"], {"torch"}, ["restored_bit_exact"]),
}


def test_definitions_load() -> None:
    dg.Definitions.validate_loadable(defs)
    dg.Definitions.validate_loadable(build_defs())


def test_graph_has_its_shape() -> None:
    """dagster#20542, #24148, #33282: assets are listed explicitly, so the graph's edges are pinned."""
    found = {}
    for node in defs.resolve_asset_graph().asset_nodes:
        maintains = node.key.to_user_string() in MAINTENANCE
        assert node.group_name == ("maintenance" if maintains else "inference")
        assert node.owners == ["team:numem"]
        assert node.partitions_def == (None if maintains else PROMPT_BATCHES)
        assert node.code_version and len(node.code_version) == 32
        assert node.description
        found[node.key.to_user_string()] = (
            sorted(parent.to_user_string() for parent in node.parent_keys),
            set(node.kinds),
            sorted(check.name for check in node.check_keys),
        )
    assert found == GRAPH


def test_partitions_are_batches_only() -> None:
    """dagster#33456, #12441, discussions #21693, #18788: one dimension, and nothing below a batch is a partition."""
    definitions = {node.partitions_def for node in defs.resolve_asset_graph().asset_nodes}
    assert definitions == {PROMPT_BATCHES, None}
    assert not isinstance(PROMPT_BATCHES, dg.MultiPartitionsDefinition)


def test_only_the_named_job_leaves_the_process() -> None:
    """pudl#4662, dagster#28492: inference runs in process; the job that does not is on this list, without plain fork."""
    names = {job.name: job.executor_def for job in JOBS}
    assert names["continue_prompts"] is dg.in_process_executor
    assert {name for name, executor in names.items() if executor is not dg.in_process_executor} == {
        "continue_prompts_multiprocess"
    }
    assert set(names) == {
        *("continue_prompts", "continue_prompts_multiprocess", "maintain_store", "scrub_store", "reconcile_replicas")
    }
    for name in names:
        assert defs.resolve_job_def(name).name == name


def test_resources_are_flat() -> None:
    """dagster#19277, #14112: a resource nested in another is torn down while the outer one still uses it."""
    for resource in (defs.resources or {}).values():
        for field in type(resource).model_fields.values():
            assert field.annotation in (str, int, float, bool)


def test_importing_the_code_location_is_light() -> None:
    """dagster#26194, #25780, #6824: no torch, no Lance; the bounds are loose, bare Dagster takes 0.9 s and 66 MB."""
    code = (
        "import time; t = time.perf_counter()\n"
        "import sys, dagster_project.definitions as d\n"
        "d.defs.resolve_asset_graph()\n"
        "heavy = [m for m in ('torch', 'lance', 'lancedb', 'transformers', 'matplotlib') if m in sys.modules]\n"
        "kib = next(int(line.split()[1]) for line in open('/proc/self/status') if line.startswith('VmRSS'))\n"
        "print(heavy, time.perf_counter() - t < 10, kib < 200_000)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[] True True"
    assert done.stderr == ""


def test_forty_thousand_batches_can_be_added(tmp_path: Path) -> None:
    """dagster#16260: one statement with too many SQL variables; keys go in by the hundreds."""
    with open_instance(tmp_path) as instance:
        add_batches(instance, (f"{i:032x}" for i in range(40_000)))
        add_batches(instance, [f"{5:032x}"])
        assert len(instance.get_dynamic_partitions(PROMPT_BATCHES_NAME)) == 40_000


def test_instance_is_the_shipped_one_and_keeps_edits(tmp_path: Path) -> None:
    """dagster#28456, #32560: run monitoring frees the slots of killed runs. Telemetry and nux are off, no queue."""
    with open_instance(tmp_path) as instance:
        assert Path(instance.root_directory) == tmp_path / "dagster"
        assert not instance.telemetry_enabled
        assert not instance.nux_enabled
        assert instance.run_monitoring_enabled
        assert isinstance(instance.run_coordinator, DefaultRunCoordinator)
    with (tmp_path / "dagster/dagster.yaml").open("a") as file:
        file.write("\n# mine\n")
    with open_instance(tmp_path):
        assert (tmp_path / "dagster/dagster.yaml").read_text().endswith("# mine\n")


def test_second_dagster_thread_is_refused() -> None:
    """dagster#7442, #4041: two threads that materialise in one process hang; the second gets an error instead."""
    caught: list[BaseException] = []

    def intrude() -> None:
        try:
            with dagster_thread():
                pass
        except CapacityError as error:
            caught.append(error)

    with dagster_thread(), dagster_thread():
        thread = threading.Thread(target=intrude)
        thread.start()
        thread.join()
    assert len(caught) == 1 and "another thread" in str(caught[0])
    thread = threading.Thread(target=intrude)
    thread.start()
    thread.join()
    assert len(caught) == 1


def test_shared_handle_opens_once_and_closes_last() -> None:
    """dagster#19277: open, use, close, in this order, and once however many hold it."""
    calls: list[str] = []

    def open_() -> str:
        calls.append("open")
        return "handle"

    def use() -> Any:
        return shared("test", open_, lambda _: calls.append("close"))

    with use() as a, use() as b:
        assert a is b
        calls.append("use")
    assert calls == ["open", "use", "close"]


def test_tiers_of_the_environment() -> None:
    assert parse_tiers("") is None
    assert parse_tiers("object=/a, ssd=s3://b/c") == {"object": TierSpec("/a"), "ssd": TierSpec("s3://b/c")}
    with pytest.raises(InputError, match=r"NUMEM_TIERS: 'ssd' is not name=url"):
        parse_tiers("ssd")


def test_workspace_file_names_this_code_location() -> None:
    assert "module_name: dagster_project.definitions" in (ROOT / "workspace.yaml").read_text()
