"""The decode stage on several GPUs: one scheduler a GPU, fed and read as if they were one."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from numem.runtime.device.fleet import Fleet
from numem.runtime.request import Outcome, Request

# How often the caller is told that time has passed.
_TICK_S = 0.2


class Several:
    """The surface of a scheduler that the decode stage uses, over a fleet that is open.

    Args:
        lanes: of each runtime; some requests more than that are under way in each, so that lanes do not wait.

    Attributes:
        decode_tokens: tokens decoded by all of them.
        decode_ms: time that the one which decoded longest took for its tokens.
    """

    def __init__(self, fleet: Fleet, lanes: int) -> None:
        self._fleet = fleet
        self._window = (lanes + 2) * len(fleet.runtimes)
        self.decode_tokens = 0
        self.decode_ms = 0.0

    def run(self, requests: Iterable[Request], progress: Callable[[], None]) -> Iterator[Outcome]:
        """Yield outcomes as requests end; leaving the iterator early cancels what has not ended."""
        pending: dict[Future[list[Outcome]], str] = {}
        with ThreadPoolExecutor(self._window, thread_name_prefix="numem-several") as pool:
            try:
                for request in requests:
                    while len(pending) >= self._window:
                        yield from self._ended(pending, progress)
                    stream = self._fleet.submit(request, streamed=False)
                    pending[pool.submit(stream.wait)] = request.id
                while pending:
                    yield from self._ended(pending, progress)
            finally:
                for request_id in pending.values():
                    self._fleet.cancel(request_id)
        self._measure()

    def _ended(self, pending: dict[Future[list[Outcome]], str], progress: Callable[[], None]) -> Iterator[Outcome]:
        done, _ = wait(pending, timeout=_TICK_S, return_when=FIRST_COMPLETED)
        if done:
            self._measure()
        for future in done:
            del pending[future]
            yield from future.result()
        progress()

    def _measure(self) -> None:
        found = self._fleet.call(lambda scheduler: (scheduler.decode_tokens, scheduler.decode_ms))
        self.decode_tokens = sum(tokens for tokens, _ in found)
        self.decode_ms = max(ms for _, ms in found)
