"""Order of work on a device: side streams and events, and what stands for them where there is one order of everything."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import RLock
from typing import Any, Protocol

import torch
from torch import Tensor

_turns: dict[torch.device, Any] = {}


@contextmanager
def turn(device: torch.device) -> Iterator[None]:
    """A block in which this thread alone launches on a device, which is current in it.

    Launches of one pass work in memory that all models and threads share, and must lie next to each other in the order
    of the device.
    """
    with _turns.setdefault(device, RLock()), torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        yield


class Event(Protocol):
    """A point in the order of a device's work."""

    def query(self) -> bool:
        """Whether everything before it is done."""
        ...

    def synchronize(self) -> None:
        """Return when everything before it is done."""
        ...


class Streams(Protocol):
    """How a device orders its work. None as a stream is the one on which the calling thread computes."""

    device: torch.device
    page_locked: bool

    def make(self) -> Any:
        """A stream of its own."""
        ...

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Within the block this thread's work goes to the stream."""
        ...

    def record(self, stream: Any = None) -> Event:
        """The point behind everything that the stream was given so far."""
        ...

    def wait(self, event: Event, stream: Any = None) -> None:
        """What the stream is given from now on begins after the event; the host does not wait."""
        ...

    def host_buffer(self, nbytes: int) -> Tensor:
        """Host memory uint8 [nbytes] from and to which copies run beside the host."""
        ...


class CudaStreams:
    """Streams of an NVIDIA GPU."""

    page_locked = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def make(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]  # torch gives it no types

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def record(self, stream: torch.cuda.Stream | None = None) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # as above
        event.record(stream or torch.cuda.current_stream(self.device))
        return event

    def wait(self, event: Any, stream: torch.cuda.Stream | None = None) -> None:
        (stream or torch.cuda.current_stream(self.device)).wait_event(event)

    def host_buffer(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


class _Past:
    """A point that lies behind."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


class OneStream:
    """Everything is done when the call returns: for tensors on the CPU."""

    page_locked = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def make(self) -> None:
        return None

    def on(self, stream: None) -> AbstractContextManager[Any]:
        return nullcontext()

    def record(self, stream: None = None) -> Event:
        return _Past()

    def wait(self, event: Event, stream: None = None) -> None:
        event.synchronize()

    def host_buffer(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)


def streams_of(device: torch.device) -> Streams:
    """The order of a device's work."""
    return CudaStreams(device) if device.type == "cuda" else OneStream(device)
