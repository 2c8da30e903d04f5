"""Decoding several steps on a device without the host: one CUDA graph a step, over a fixed number of lanes.

    host      load lanes |              read tokens | read tokens |
    device               | step | step | ...  | step | ...        |   each leaves its tokens where the next one reads them

A graph is captured once per number of lanes, length of the longest lane (both rounded up to powers of two) and way of
sampling; what a step does for a lane depends on neither.
"""

from collections.abc import Callable, Iterator, Sequence
from threading import Lock
from typing import Any, Protocol
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from numem.errors import CapacityError
from numem.identity.chain import PAGE_TOKENS
from numem.runtime.device.state import LaneState, Step
from numem.runtime.device.streams import turn
from numem.runtime.paging.pages import PageStorage

HISTORY = 256  # steps of one call at most
PIECE = 4  # steps after which the host may read: while it takes their tokens, the device goes on


_capture = Lock()  # torch records one graph at a time in a process


class Stepper(Protocol):
    """What a graph captures: a decoder that runs a step on the state of lanes."""

    device: torch.device
    max_position: int
    tile: int

    def step(
        self, state: LaneState, storage: PageStorage, history: Tensor, tiles: int, sampled: bool, limit: int
    ) -> None:
        """Evaluate every lane's token, choose next ones below `limit`, note them in history[counter] and count."""


class DecodeGraphs:
    """Steps of a decoder over one storage.

    Args:
        decoder: runs a step as launches.
        storage: the pages; not kept alive by this.
        limit: ids from here on are never chosen.
    """

    def __init__(self, decoder: Stepper, storage: PageStorage, limit: int) -> None:
        self._decoder, self._storage, self._limit = decoder, ref(storage), limit
        self._states: dict[int, tuple[LaneState, Tensor, Tensor]] = {}
        self._graphs: dict[tuple[int, int, bool], torch.cuda.CUDAGraph] = {}
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def decode(self, items: Sequence[Step], steps: int) -> np.ndarray:
        """Decode `steps` tokens of every lane; keys and values of positions [position, position + steps) are written.

        Returns:
            int64 [steps, lanes]: the tokens chosen, -1 where a lane's logits were not finite.
        """
        return np.concatenate(list(self.pieces(items, steps)))

    def pieces(self, items: Sequence[Step], steps: int) -> Iterator[np.ndarray]:
        """As `decode`, a few steps after the other, each as soon as they are done; all are launched before the first."""
        if not 0 < steps <= HISTORY:
            raise CapacityError(f"decode: {steps} steps at once; at most {HISTORY}")
        lanes = _round(len(items))
        state, history, host = self._state(lanes)
        longest = max(step.position for step in items) + steps
        tiles = _round(-(-longest // self._decoder.tile))
        sampled = any(step.sampler.temperature > 0 for step in items)
        cuda = self._decoder.device.type == "cuda"
        done: list[tuple[int, int, torch.cuda.Event | None]] = []
        with turn(self._decoder.device):
            run = self._runner(lanes, tiles, sampled)
            state.load(items)
            for a in range(0, steps, PIECE):
                b = min(a + PIECE, steps)
                for _ in range(a, b):
                    run()
                host[a:b].copy_(history[a:b], non_blocking=True)
                event = torch.cuda.Event() if cuda else None  # type: ignore[no-untyped-call]  # untyped in torch
                if event is not None:
                    event.record(torch.cuda.current_stream(self._decoder.device))
                done.append((a, b, event))
        for a, b, event in done:
            if event is not None:
                event.synchronize()
            yield host[a:b, : len(items)].numpy().copy()

    def _state(self, lanes: int) -> tuple[LaneState, Tensor, Tensor]:
        found = self._states.get(lanes)
        if found is None:
            device = self._decoder.device
            width = -(-(self._decoder.max_position + HISTORY) // PAGE_TOKENS)
            found = self._states[lanes] = (
                LaneState(lanes, width, device),
                torch.zeros((HISTORY, lanes), dtype=torch.int64, device=device),
                torch.zeros((HISTORY, lanes), dtype=torch.int64, pin_memory=device.type == "cuda"),
            )
        return found

    def _runner(self, lanes: int, tiles: int, sampled: bool) -> Callable[[], None]:
        decoder, storage = self._decoder, self._storage()
        assert storage is not None  # whoever decodes holds it
        state, history, _ = self._state(lanes)

        def step() -> None:
            decoder.step(state, storage, history, tiles, sampled, self._limit)

        if decoder.device.type != "cuda":
            return step
        key = (lanes, tiles, sampled)
        graph = self._graphs.get(key)
        if graph is None:
            # Idle lanes touch no page: once to compile and size the buffers, then to record.
            state.clear()
            with _capture, torch.cuda.device(decoder.device):
                step()
                torch.cuda.synchronize(decoder.device)
                graph = torch.cuda.CUDAGraph()
                # torch's own stream for this is one for the process, on the device that came first; and of each priority
                # there are 32 streams in all, so that one of priority 0 may also be a side stream of some engine
                if self._stream is None:
                    self._stream = torch.cuda.Stream(decoder.device, priority=-1)  # type: ignore[no-untyped-call]  # as above
                # loader and publisher threads go on with copies of their own
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                    step()
            self._pool = self._pool or graph.pool()
            self._graphs[key] = graph
        return graph.replay


def _round(n: int) -> int:
    """The next power of two."""
    return 1 << (n - 1).bit_length()
