"""One worker that does in the background what signals ask for: each task at most once pending, signals coalesced."""

from collections.abc import Callable, Mapping
from threading import Condition, Thread

from numem.errors import NumemError, StoreError


class Background:
    """Named tasks on one thread, which starts with the first signal.

    Args:
        tasks: name -> what to do; what it raises on purpose is kept in `errors`, the worker goes on.
    """

    def __init__(self, tasks: Mapping[str, Callable[[], object]]) -> None:
        self._tasks = tasks
        self._changed = Condition()
        self._pending: dict[str, None] = {}
        self._running = ""
        self._closing = False
        self._thread: Thread | None = None
        self.errors: dict[str, NumemError] = {}

    def signal(self, name: str) -> bool:
        """Ask for a task; False where it is pending already, or the worker is closing. Never blocks."""
        with self._changed:
            if self._closing or name in self._pending:
                return False
            self._pending[name] = None
            if self._thread is None:
                self._thread = Thread(target=self._work, name="numem-residency", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            return True

    def settle(self) -> None:
        """Return when nothing is pending or running."""
        with self._changed:
            while self._pending or self._running:
                self._changed.wait()

    def close(self) -> None:
        """Do what is pending, and end. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._running = ""
                self._changed.notify_all()
                while not self._pending and not self._closing:
                    self._changed.wait()
                if not self._pending:
                    return
                name = self._running = next(iter(self._pending))
                del self._pending[name]
            try:
                self._tasks[name]()
                self.errors.pop(name, None)
            except NumemError as error:
                self.errors[name] = error
            except Exception as error:  # noqa: BLE001 - a defect must not end the worker: `settle` would wait for ever
                self.errors[name] = StoreError(f"{name}: {type(error).__name__}: {error}")
