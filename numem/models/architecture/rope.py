"""Rotary position embeddings: the value, and the tables of cos and sin that it makes."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from numem.errors import ContextLengthError, InputError, UnsupportedModelError
from numem.models.architecture import rope_kinds

KINDS = ("default", "linear", "llama3", "yarn", "longrope", "proportional")


@dataclass(frozen=True, slots=True)
class Rope:
    """One rotary embedding.

    Attributes:
        kind: one of KINDS.
        theta: base.
        dim: rotated components per head (even); the others pass as they are.
        interleaved: True for pairs (2i, 2i+1), False for half-split pairs (i, i + dim/2).
        params: the kind's own parameters as floats.
        attention_factor: multiplies cos and sin.
        factors: longrope's divisors for sequences within the pretraining length, one per pair.
    """

    kind: str
    theta: float
    dim: int
    interleaved: bool = False
    params: Mapping[str, float] = field(default_factory=dict)
    attention_factor: float = 1.0
    factors: tuple[float, ...] = ()

    @property
    def limit(self) -> int:
        """Positions after which the frequencies would change in mid-sequence; 0 where they never do."""
        return int(self.params["original_max_position_embeddings"]) if self.kind == "longrope" else 0

    def inv_freq(self) -> np.ndarray:
        """Angle per position of each pair, float32 [dim/2].

        Rounded to float32 as in the reference implementation: models were trained with these float32 frequencies and
        angles, so "more exact" tables would be tables of another model (at position 1,000 the angles already differ
        by 4e-5).
        """
        p = self.params
        base = rope_kinds.plain(self.theta, self.dim, self.dim // 2)
        match self.kind:
            case "linear":
                return rope_kinds.linear(base, p["factor"])
            case "llama3":
                return rope_kinds.llama3(base, p)
            case "yarn":
                return rope_kinds.yarn(base, self.theta, self.dim, p)
            case "longrope":
                return rope_kinds.longrope(base, self.factors)
            case "proportional":
                return rope_kinds.proportional(self.theta, self.dim, p["partial_rotary_factor"], p["factor"])
        return base

    def tables(self, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (cos, sin), float32 [positions, dim/2], of float32 angles; the functions are rounded once.

        Raises:
            UnsupportedModelError: positions that need the second list of longrope.
        """
        if positions < 1:
            raise InputError(f"rope tables: {positions} positions; ask for at least 1")
        if self.limit and positions > self.limit:
            raise UnsupportedModelError(
                f"rope_type 'longrope': {positions} positions exceed the {self.limit} of its short list; a sequence "
                "that grows past them changes its frequencies, so cached keys cannot be restored exactly; load the "
                f"model with max_position {self.limit} or less"
            )
        angles = np.arange(positions, dtype=np.float32)[:, None] * self.inv_freq()[None, :]
        wide = angles.astype(np.float64)
        cos = (np.cos(wide) * self.attention_factor).astype(np.float32)
        sin = (np.sin(wide) * self.attention_factor).astype(np.float32)
        return torch.from_numpy(cos), torch.from_numpy(sin)


def check_positions(positions: int, max_pos: int) -> None:
    """Refuse tables beyond what the model was made for."""
    if positions > max_pos:
        raise ContextLengthError(
            f"max_position {positions} exceeds the model's {max_pos} positions; ask for at most {max_pos}"
        )
