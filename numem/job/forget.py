"""Forgetting what the main job keeps beside the store: batches hold prompts as tokens, outputs hold completions as text.

`Memory.care.forget` deletes what the store itself holds, and knows nothing of these files.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from numem.errors import InputError
from numem.identity.chain import plan
from numem.job.batch import Batch, load_batch
from numem.store.memory import Memory


@dataclass(frozen=True, slots=True)
class ForgottenBatches:
    """What was removed of the job.

    Attributes:
        batches: ids of batches whose file and outputs are gone, in order.
        files: files removed.
        unreached: places that may still hold some of it, and why.
    """

    batches: tuple[str, ...] = ()
    files: int = 0
    unreached: tuple[str, ...] = ()


def forget_batches(memory: Memory, scope: bytes | None = None) -> ForgottenBatches:
    """Remove batches, with their outputs, of a scope, and those with a prompt of which a state was forgotten.

    Call it after `Memory.care.forget`; calling it again is harmless. A batch file that cannot be read may hold such
    prompts too, and is named instead of removed.
    """
    gone: list[str] = []
    files = 0
    unreached: list[str] = []
    for path in sorted((memory.local / "batches").glob("*.json")):
        try:
            batch = load_batch(memory, path.stem)
        except InputError as error:
            unreached.append(f"{path}: {error}")
            continue
        if (scope is not None and batch.scope == scope.hex()) or memory.care.forgotten(_states(batch)):
            # The batch last: while it is there, another call finds what is left.
            files += _remove(memory.local / "outputs" / batch.id) + 1
            path.unlink()
            gone.append(batch.id)
    history = memory.local / "dagster"
    if gone and history.is_dir():
        unreached.append(
            f"{history}: events of these batches show beginnings of texts where a run asked for previews; delete the "
            "directory, or those runs in numem ui"
        )
    return ForgottenBatches(tuple(gone), files, tuple(unreached))


def _states(batch: Batch) -> set[bytes]:
    """Causal ids of every state that the batch's prompts lead through."""
    scope = bytes.fromhex(batch.scope)
    return {chunk.id for item in batch.items for chunk in plan(scope, item.tokens)} | set(batch.chunk_ids())


def _remove(directory: Path) -> int:
    count = sum(path.is_file() for path in directory.rglob("*"))
    if directory.is_dir():
        shutil.rmtree(directory)
    return count
