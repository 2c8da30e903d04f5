"""A model card: what numem knows of a model, from its entry and, where it is here, from its files."""

import json
import math
from collections import Counter
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numem.errors import CheckpointError
from numem.models.hub.entry import Entry
from numem.models.hub.registry import entry_of, is_present, location, resolve

if TYPE_CHECKING:
    from numem.models.architecture.descriptor import Descriptor
    from numem.models.architecture.rope import Rope

# Bytes of one number of attention state.
_STATE_BYTES = {"float32": 4, "bfloat16": 2}


def card(key_or_dir: str | PathLike[str], *, cache: str | PathLike[str] | None = None) -> dict[str, Any]:
    """What is known of a model, as plain values. Nothing is fetched: of an absent one, what its entry says.

    Raises:
        UnknownModelError: neither a key nor a directory.
        CheckpointError, UnsupportedModelError: files that contradict each other, or that this engine does not run.
    """
    if isinstance(key_or_dir, str) and not Path(key_or_dir).is_dir():
        entry = entry_of(key_or_dir)
        here = is_present(entry, cache)
        known = {**entry_card(entry), "present": here}
        return known | directory_card(location(entry, cache)) if here else known
    return {"present": True, **directory_card(resolve(key_or_dir))}


def entry_card(entry: Entry) -> dict[str, Any]:
    """What the registry says of a model."""
    return {
        "key": entry.key,
        "kind": entry.kind,
        "family": entry.family,
        "notes": entry.notes,
        "level": entry.level.label,
        "level_means": entry.level.meaning,
        "licence": entry.licence,
        "accept": entry.accept,
        "source": entry.source.describe(),
    }


def directory_card(directory: Path) -> dict[str, Any]:
    """What the files of a model directory say; weights are not read."""
    from numem.models.architecture.reading import read_descriptor
    from numem.models.text.tokenizer import Tokenizer
    from numem.models.weights.checkpoint import Checkpoint
    from numem.models.weights.lockfile import read_lock

    checkpoint = Checkpoint(directory)
    descriptor = read_descriptor(checkpoint.config, checkpoint.names)
    tokenizer = Tokenizer(directory)
    lock = read_lock(directory)
    d = descriptor
    return {
        "directory": str(directory),
        "recorded": None if lock is None else {"source": dict(lock.source), "weights": lock.weights},
        "architecture": {
            "family": d.family,
            "hidden": d.hidden,
            "layers": d.layers,
            "heads": d.heads,
            "kv_heads": d.kv_heads,
            "head_dim": d.head_dim,
            "inter": d.inter,
            "vocab": d.vocab,
            "positions": d.max_pos,
            "causal": d.causal,
            "tied_head": d.tied_head,
            "window": d.window,
            "sliding_layers": d.layer_kinds.count("sliding"),
            "experts": 0 if d.moe is None else d.moe.experts,
            "rope": _rope(d.rope),
            "rope_local": _rope(d.rope_local),
        },
        "parameters": sum(math.prod(checkpoint.shape(name)) for name in checkpoint.names),
        "bytes": checkpoint.nbytes,
        "kv_bytes_per_token": kv_bytes_per_token(descriptor),
        "tokenizer": {
            "vocab": tokenizer.vocab_size,
            "padded_vocab": tokenizer.padded_vocab_size,
            "bos": tokenizer.bos_id,
            "adds_bos": tokenizer.encode("")[:1] == [tokenizer.bos_id],
            "eos": sorted(tokenizer.eos_ids),
            "chat": tokenizer.template is not None,
            "digest": tokenizer.digest().hex(),
        },
        "quantised": _streams(directory),
    }


def kv_bytes_per_token(descriptor: "Descriptor") -> dict[str, int]:
    """Bytes of attention state that a token adds, all layers together, by the dtype of the state.

    Zero for an encoder, which keeps none. Sliding layers are counted in full.
    """
    numbers = 2 * descriptor.layers * descriptor.kv_heads * descriptor.head_dim if descriptor.causal else 0
    return {dtype: numbers * size for dtype, size in _STATE_BYTES.items()}


def _rope(rope: "Rope | None") -> dict[str, Any] | None:
    return None if rope is None else {"kind": rope.kind, "theta": rope.theta, **dict(rope.params)}


def _streams(directory: Path) -> list[dict[str, Any]]:
    """The quantised matrices beside a model; they are verified when they are loaded."""
    from numem.models.weights.streams import DIRECTORY

    paths = sorted((directory / DIRECTORY).glob("*.safetensors"))
    return [{"file": path.name, "bytes": path.stat().st_size, "formats": _formats(path)} for path in paths]


def _formats(path: Path) -> dict[str, int]:
    """How many matrices each format holds; empty where the file is damaged, which a load finds out and heals."""
    from numem.models.weights.safetensors_file import SafetensorsFile

    try:
        groups = json.loads(SafetensorsFile(path).metadata.get("groups", "{}"))
        return dict(sorted(Counter(entry[0] for entry in groups.values() if entry is not None).items()))
    except (CheckpointError, ValueError, TypeError, LookupError, AttributeError):
        return {}
