"""What the tests on real pretrained weights share: the reference text and its loss."""

from pathlib import Path

import numpy as np
import torch

from numem import LM

TEXT = Path(__file__).parent / "data" / "moby_dick_head.txt"  # the opening of Moby-Dick (1851), public domain
COUNT = 1024


def text_ids(lm: LM) -> list[int]:
    """The first COUNT ids of the text, special tokens that the tokenizer adds included."""
    ids = lm.tokenizer.encode(TEXT.read_text(encoding="utf-8"))[:COUNT]
    assert len(ids) == COUNT
    return ids


def text_logits(lm: LM) -> np.ndarray:
    """Logits after every id of the text, float32 [COUNT, vocab]."""
    engine = lm.session(pages=COUNT // 16).engine
    (rows,) = engine.append([(engine.pool.allocate(), text_ids(lm))], logits="all")
    return rows


def loss(lm: LM, logits: np.ndarray) -> float:
    """Mean negative log-likelihood, in nats, of ids 1 to COUNT given those before them."""
    ids = torch.tensor(text_ids(lm)[1:])
    total = 0.0
    for start in range(0, COUNT - 1, 128):  # a row of Gemma's is 1 MiB
        stop = min(start + 128, COUNT - 1)
        table = torch.from_numpy(logits[start:stop]).double().log_softmax(dim=-1)
        total -= float(table[torch.arange(stop - start), ids[start:stop]].sum())
    return total / (COUNT - 1)
