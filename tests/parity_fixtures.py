"""What the parity tests compare: logits and greedy tokens of numem and of transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from numem.models.lm import LM
from tests.model_fixtures import tiny_vocabulary

# Ids that the tiny tokenizer knows; rows of a head beyond them are padding, which numem never samples.
KNOWN = len(tiny_vocabulary())


def prompt(length: int, seed: int = 1) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, 250, length)]


def peer_of(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).train(False)


def logits(lm: LM, ids: list[int], keep: int | None = None) -> np.ndarray:
    """Logits of the last `keep` positions (default: all), [positions, vocab]."""
    engine = lm.session().engine
    sequence, first = engine.pool.allocate(), len(ids) - (keep or len(ids))
    if first:
        engine.append([(sequence, ids[:first])])
    (found,) = engine.append([(sequence, ids[first:])], logits="all")
    return found


def generated(lm: LM, ids: list[int], count: int) -> tuple[list[int], np.ndarray]:
    """Greedy tokens after a prompt, and the logits [count + 1, vocab] from the last token of the prompt on."""
    tokens = lm.generate_ids(ids, count, ignore_eos=True)
    return tokens, logits(lm, ids + tokens, count + 1)


def error(peer: Any, ids: list[int], tokens: list[int], ours: np.ndarray) -> float:
    """Largest difference of logits to those of the peer, whose greedy choice each token must be.

    The peer sees prompt and tokens at once: where every token is its first choice after those before it, its greedy
    generation is the same.
    """
    with torch.inference_mode():
        theirs = peer(torch.tensor([ids + tokens]), logits_to_keep=len(ours)).logits[0].numpy()
    known = theirs[-len(tokens) - 1 : -1, :KNOWN]
    assert tokens == known.argmax(axis=1).tolist()
    return float(np.abs(ours - theirs).max())
