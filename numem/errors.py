"""Every error numem raises on purpose.

NumemError
├── InputError                 a user's file, line or value           (ValueError)
│   ├── ContextLengthError     a prompt or boundary past max_position
│   └── OutOfPlanError         a plan asked for tokens that are not there
├── ModelError
│   ├── UnknownModelError      no such registry key or directory      (LookupError)
│   ├── FetchError             a source could not be fetched or its sha256 differs
│   ├── CheckpointError        files of a model that contradict each other
│   └── UnsupportedModelError  recognised, but this engine does not run it
├── IncompatibleError          state of another identity; `.fields` names what differs
├── ManifestError              a manifest that is not schema version 1
├── StoreError
│   ├── SchemeError            a tier on a scheme that Lance does not commit to
│   ├── NotFoundError          no such id                             (KeyError)
│   ├── IntegrityError         bytes that are not what their digest says
│   ├── StorageFullError       no space for a publication
│   ├── RecoveryError          a dataset that cannot be opened safely
│   ├── BackendError           an object store without a guarantee that commits rest on
│   ├── UnknownOutcomeError    a write that may have landed: its reply was lost
│   ├── LeaseHeldError         another process maintains the memory
│   ├── LeaseLostError         a maintenance lease that another holder took over
│   ├── DeadlineError          a read that did not end in time
│   ├── ReadOnlyError          a write to a memory that is only read, or to a directory without write access
│   └── ClosedError            used after close, or in a forked child
└── CapacityError              not enough pages, lanes or staging bytes
    ├── RejectedError          a publication or request that was refused or dropped; `.code` says at which limit
    │   └── QuotaError         a scope that would go over its quota
    └── LeaseError             a lease released twice or used after release

Messages name the thing at fault and what to do about it, on one line.
"""


class NumemError(Exception):
    """Base of all errors raised on purpose; the message is one line."""

    def __str__(self) -> str:
        # KeyError would print the repr of its argument.
        return str(self.args[0]) if self.args else ""


class InputError(NumemError, ValueError):
    """A user's file, line or value is wrong."""


class ContextLengthError(InputError):
    """A prompt or boundary lies beyond the model's max_position."""


class OutOfPlanError(InputError):
    """A plan was asked for positions outside its tokens."""


class ModelError(NumemError):
    """A model cannot be resolved, read or run."""


class UnknownModelError(ModelError, LookupError):
    """No registry key and no directory of this name."""


class FetchError(ModelError):
    """A model source could not be fetched, or its bytes are not the pinned ones."""


class CheckpointError(ModelError):
    """The files of a model contradict each other or themselves."""


class UnsupportedModelError(ModelError):
    """The architecture or a setting is recognised, but not run by this engine.

    Attributes:
        code: "model-type", "architecture", "layer-type", "kind" (text or embeddings) or "setting".
    """

    def __init__(self, message: str, code: str = "setting") -> None:
        super().__init__(message)
        self.code = code


class IncompatibleError(NumemError):
    """State belongs to another identity.

    Attributes:
        fields: dotted names of the identity fields that differ, sorted.
    """

    def __init__(self, message: str, fields: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.fields = fields


class ManifestError(NumemError, ValueError):
    """A manifest is not a valid document of a known schema version."""


class StoreError(NumemError):
    """The durable plane refused or failed."""


class SchemeError(StoreError, ValueError):
    """A tier URL is on a scheme that Lance does not commit to."""


class NotFoundError(StoreError, KeyError):
    """No such id in the memory."""


class IntegrityError(StoreError):
    """Stored bytes do not match their digest or length."""


class StorageFullError(StoreError, OSError):
    """A publication ran out of space; nothing of it is visible."""


class RecoveryError(StoreError):
    """A dataset cannot be opened at a state that is known to be good."""


class BackendError(StoreError):
    """An object store does not give a guarantee that commits rest on."""


class UnknownOutcomeError(StoreError):
    """The reply to a write was lost; it may have landed, and nothing was deleted."""


class LeaseHeldError(StoreError):
    """Another process holds the maintenance lease."""


class LeaseLostError(StoreError):
    """A maintenance lease ended: another holder has a newer epoch, or it was not renewed in time."""


class DeadlineError(StoreError):
    """A read did not end in time; what it was to fill is undefined, and nothing was quarantined.

    Attributes:
        nbytes: bytes that came in time.
    """

    def __init__(self, message: str, nbytes: int = 0) -> None:
        super().__init__(message)
        self.nbytes = nbytes


class ReadOnlyError(StoreError):
    """A write to a memory that was opened for reading alone, or whose directory cannot be written."""


class ClosedError(StoreError):
    """A handle was used after close, or in a forked child."""


class CapacityError(NumemError):
    """Not enough pages, lanes or staging bytes; nothing was changed."""


class RejectedError(CapacityError):
    """A publication or request was refused or dropped at a limit; nothing of it is stored.

    Attributes:
        code: "staging-bytes", "capture-queue", "publication-queue", "quota" or "submission-queue".
    """

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class QuotaError(RejectedError):
    """A scope would go over its quota; nothing of the node was staged or published.

    Attributes:
        scope: whose.
        used, quota: bytes.
    """

    def __init__(self, message: str, scope: bytes, used: int, quota: int) -> None:
        super().__init__(message, "quota")
        self.scope = scope
        self.used = used
        self.quota = quota


class LeaseError(CapacityError):
    """A lease was released twice or used after its release."""
