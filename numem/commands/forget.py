"""`numem forget`: deletion for good, of what the store holds and of what the main job keeps beside it."""

from typing import Annotated

import typer

from numem.commands.lineage import user
from numem.commands.residency import node_ids
from numem.environment import memory_home
from numem.errors import NotFoundError
from numem.terminal import JsonFlag, MemoryOption, busy, emit, guarded, open_memory


@guarded
def forget(
    scope: Annotated[
        str | None, typer.Option("--scope", metavar="HEX", help="A tenant: all states of a scope.")
    ] = None,
    branch: Annotated[str | None, typer.Option("--branch", help="A branch, and what it alone reaches.")] = None,
    node: Annotated[
        str | None, typer.Option("--node", metavar="ID", help="A state, and all that builds on it.")
    ] = None,
    reason: Annotated[str, typer.Option("--reason", help="Why; it is kept.")] = "",
    actor: Annotated[str | None, typer.Option("--actor", help="Who asks for it. Default: the user.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    memory: MemoryOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Delete states for good: payload, tokens, batches and outputs. Exits with 1 when something could not be reached."""
    from numem.job.forget import ForgottenBatches, forget_batches
    from numem.store.upkeep.forget import ForgetReport

    if sum(given is not None for given in (scope, branch, node)) != 1:
        raise typer.BadParameter("give exactly one of --scope, --branch and --node")
    if scope is not None and (len(scope) != 64 or set(scope.lower()) - set("0123456789abcdef")):
        raise typer.BadParameter(f"--scope {scope[:80]!r}: a scope has 64 hex digits; `numem show ID` prints it")
    if as_json and not yes:
        raise typer.BadParameter("--json asks no questions; say --yes too")
    what = f"scope {scope}" if scope is not None else f"branch {branch}" if branch is not None else f"state {node}"
    home = memory_home(memory)
    tenant = None if scope is None else bytes.fromhex(scope)
    with open_memory(memory) as store:
        if not yes:
            typer.confirm(f"Delete {what} of {home}, for good?", abort=True)
        with busy("forgetting"):
            ids = None if node is None else node_ids(store, [node])
            try:
                report = store.care.forget(scope=tenant, branch=branch, ids=ids, actor=actor or user(), reason=reason)
                job = forget_batches(store, tenant)
            except NotFoundError:
                # An earlier attempt may have ended between the store and the job's files.
                report, job = ForgetReport(), forget_batches(store, tenant)
                if job == ForgottenBatches():
                    raise
    unreached = [*report.unreached, *job.unreached]
    result = {
        "memory": home,
        "nodes": report.nodes,
        "pieces": report.pieces,
        "shared": report.shared,
        "volumes": report.volumes,
        "staged": report.staged,
        "bytes": report.bytes,
        "batches": list(job.batches),
        "files": job.files,
        "unreached": unreached,
    }
    emit(
        result,
        as_json,
        f"{report.nodes:,} states and {report.pieces:,} pieces ({report.bytes:,} bytes) are gone; {report.shared:,} pieces "
        f"that others use stay; {len(job.batches):,} batches with {job.files:,} files removed",
        *(f"NOT REACHED: {place}" for place in unreached),
    )
    if unreached:
        raise typer.Exit(1)
