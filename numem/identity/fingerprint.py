"""Identity of numerical state: semantic fingerprint + numeric policy + device class (+ tenant salt).

The scope derived from an identity roots every chain of causal ids, so state of two identities can never meet.
Library versions are provenance: they are recorded beside state, never part of an identity.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from numem.errors import IncompatibleError, InputError
from numem.identity.canonical import canonical_json, flatten
from numem.identity.digest import framed_sha256


class Grade(StrEnum):
    """How far two identities agree; nothing below `EXACT` is used unless asked for."""

    EXACT = "exact"
    NUMERICAL = "numerical"  # same meaning, other arithmetic: policy or device class differ
    TRANSFORM = "transform"  # the semantic fingerprint differs


@dataclass(frozen=True, slots=True)
class NumericPolicy:
    """The arithmetic that made some bytes.

    Attributes:
        name: the policy's name, for people.
        self_test: BLAKE3-256 of the bytes its fixed self-test produces. Builds that compute the same bits share
            state; builds that do not never mix.
    """

    name: str
    self_test: bytes

    def canonical(self) -> bytes:
        return canonical_json({"name": self.name, "self_test": self.self_test})


@dataclass(frozen=True, slots=True)
class Compatibility:
    """Outcome of comparing two identities: the grade, and the dotted names of the fields that differ."""

    grade: Grade
    fields: tuple[str, ...]


@dataclass(frozen=True)
class Identity:
    """Everything that must agree before numerical state may be reused.

    Attributes:
        semantic: what is computed, as a tree of plain values (weights digest, configuration, KV layout, ...; or
            equations, scheme, mesh, parameters, boundary conditions).
        policy: how it is computed.
        device_class: on what kind of device, for example "cpu" or "cuda-sm90".
        salt: a tenant's secret, empty for none.
    """

    semantic: Mapping[str, Any]
    policy: NumericPolicy
    device_class: str
    salt: bytes = b""
    scope: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.semantic:
            raise InputError("identity: the semantic fingerprint is empty; state needs at least one field")
        if not self.device_class:
            raise InputError("identity: device_class is empty")
        object.__setattr__(
            self,
            "scope",
            framed_sha256(
                "numem/scope/v1", self.fingerprint, self.policy.canonical(), self.device_class.encode(), self.salt
            ),
        )

    @property
    def fingerprint(self) -> bytes:
        """SHA-256 of the canonical semantic tree, 32 bytes."""
        return hashlib.sha256(canonical_json(self.semantic)).digest()

    @property
    def content_key(self) -> bytes | None:
        """Key of this tenant's content ids (32 bytes, derived from the salt), None without a salt."""
        return framed_sha256("numem/content-key/v1", self.salt) if self.salt else None

    def describe(self) -> dict[str, Any]:
        """The identity as plain JSON values, without the salt itself."""
        return {
            "semantic": dict(self.semantic),
            "policy": {"name": self.policy.name, "self_test": self.policy.self_test.hex()},
            "device_class": self.device_class,
            "salted": bool(self.salt),
        }

    def compare(self, other: "Identity") -> Compatibility:
        """Compare with another identity and name every field that differs."""
        mine, theirs = self._leaves(), other._leaves()
        fields = tuple(sorted(k for k in mine.keys() | theirs.keys() if mine.get(k) != theirs.get(k)))
        if not fields:
            return Compatibility(Grade.EXACT, ())
        numeric = all(name.startswith("policy.") or name == "device_class" for name in fields)
        return Compatibility(Grade.NUMERICAL if numeric else Grade.TRANSFORM, fields)

    def require_exact(self, other: "Identity", what: str = "state") -> None:
        """Raise IncompatibleError naming the differing fields unless both identities are equal."""
        result = self.compare(other)
        if result.grade is not Grade.EXACT:
            raise IncompatibleError(
                f"{what} belongs to another identity ({result.grade}): {', '.join(result.fields)} differ; "
                "recompute it under this identity or load the model it was made with",
                result.fields,
            )

    def _leaves(self) -> dict[str, bytes]:
        leaves = {f"semantic.{k}": v for k, v in flatten(self.semantic).items()}
        leaves["policy.name"] = self.policy.name.encode()
        leaves["policy.self_test"] = self.policy.self_test
        leaves["device_class"] = self.device_class.encode()
        leaves["salt"] = self.salt
        return leaves
