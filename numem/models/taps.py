"""Looking into a forward pass: the residual stream and what the blocks add to it, read or replaced.

A tap is called as `tap(point, layer, array)` with float32 [rows, hidden], a copy; what it returns takes the array's place,
None leaves it as it is. Points of a layer, in order:

    resid-pre   what enters the layer
    attn-out    what its attention adds (after a norm of the branch, where the family has one)
    resid-mid   their sum (after a norm of the sum, where the family has one)
    mlp-out     what its feed-forward adds
    resid-post  what leaves the layer

A pass whose taps change nothing gives the same bits as one without taps.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from numem.errors import ContextLengthError, InputError, UnsupportedModelError
from numem.models.lm import LM
from numem.models.transformer import Transformer
from numem.runtime.engine import whole_texts

POINTS = ("resid-pre", "attn-out", "resid-mid", "mlp-out", "resid-post")

# A point and a layer, from 0.
Place = tuple[str, int]
Edit = Callable[[np.ndarray], np.ndarray | None]


@dataclass(frozen=True, slots=True)
class Trace:
    """What a traced pass saw.

    Attributes:
        logits: float32 [tokens, vocab].
        captured: float32 [tokens, hidden] at each place asked for, after its edit.
    """

    logits: np.ndarray
    captured: Mapping[Place, np.ndarray]


def trace(
    lm: LM, tokens: Sequence[int], capture: Sequence[Place] = (), edit: Mapping[Place, Edit] | None = None
) -> Trace:
    """Evaluate tokens from position 0 in one pass, in pages of its own.

    Args:
        capture: places to copy.
        edit: at a place, a function from its array (float32 [tokens, hidden]) to what takes its place; None from it
            leaves the array as it is.

    Raises:
        InputError: no tokens, an unknown point or layer, or an edit of another shape or dtype.
        ContextLengthError: more tokens than max_position.
        UnsupportedModelError: the model lies on a GPU.
    """
    decoder = _decoder(lm)
    edits = {} if edit is None else edit
    for point, layer in (*capture, *edits):
        if point not in POINTS or not 0 <= layer < lm.descriptor.layers:
            raise InputError(
                f"trace: there is no {point!r} of layer {layer}; points are {', '.join(POINTS)}, layers "
                f"0 to {lm.descriptor.layers - 1}"
            )
    wanted, captured = set(capture), dict[Place, np.ndarray]()

    def tap(point: str, layer: int, array: np.ndarray) -> np.ndarray | None:
        place = (point, layer)
        changed = edits[place](array) if place in edits else None
        if place in wanted:
            captured[place] = np.array(array if changed is None else changed)
        return changed

    if len(tokens) > lm.max_position:
        raise ContextLengthError(f"trace: {len(tokens)} tokens pass max_position {lm.max_position}; shorten the text")
    rows, pages = whole_texts([tokens])
    logits = decoder.forward(rows, decoder.scratch(pages), tap=tap).numpy()
    return Trace(logits, captured)


def hidden_states(lm: LM, tokens: Sequence[int], positions: str = "last") -> np.ndarray:
    """The residual stream as it enters each layer, and last the final hidden state, after the final norm.

    Args:
        positions: "last", or "all".

    Returns:
        float32 [layers + 1, hidden], or [layers + 1, tokens, hidden].

    Raises:
        InputError, ContextLengthError, UnsupportedModelError: as `trace`.
    """
    if positions not in ("last", "all"):
        raise InputError(f'hidden_states: positions {positions!r} is neither "last" nor "all"')
    *entering, leaving = _streams(lm, tokens)
    found = np.stack([*entering, _decoder(lm).normed(torch.from_numpy(leaving)).numpy()])
    return found[:, -1] if positions == "last" else found


def logit_lens(lm: LM, tokens: Sequence[int]) -> np.ndarray:
    """Logits of the last position, had the model ended where the residual stream enters each layer, or leaves the last.

    Returns:
        float32 [layers + 1, vocab]; the last row is the model's own logits.

    Raises:
        InputError, ContextLengthError, UnsupportedModelError: as `trace`.
    """
    streams = _streams(lm, tokens)
    return _decoder(lm).unembed(torch.from_numpy(np.stack([stream[-1] for stream in streams]))).numpy()


def _decoder(lm: LM) -> Transformer:
    if not isinstance(lm.decoder, Transformer):
        raise UnsupportedModelError(f"taps: {lm.directory} lies on {lm.decoder.device}; load it with device='cpu'")
    return lm.decoder


def _streams(lm: LM, tokens: Sequence[int]) -> list[np.ndarray]:
    """The residual stream at every layer's entry, and at the last one's exit, before the final norm."""
    layers = lm.descriptor.layers
    places = [*(("resid-pre", layer) for layer in range(layers)), ("resid-post", layers - 1)]
    captured = trace(lm, tokens, places).captured
    return [captured[place] for place in places]
