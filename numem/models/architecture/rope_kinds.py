"""Frequencies of the kinds of rotary embedding: what each kind does to the plain geometric series.

Formulas: Su et al. 2021 (default), Chen et al. 2023 (linear), Peng et al. 2023 (yarn), Ding et al. 2024 (longrope),
Llama 3.1's published scaling (llama3). Every function takes and returns angles per position, one per pair.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np


def plain(theta: float, dim: int, pairs: int) -> np.ndarray:
    """theta^(-2i/dim) for i < pairs, float32.

    The power is taken in float64 and rounded, so that it does not depend on a vector math library.
    """
    exponent = np.arange(0, 2 * pairs, 2, dtype=np.float32) / np.float32(dim)
    power = np.array([theta**e for e in exponent.tolist()], dtype=np.float64).astype(np.float32)
    return np.float32(1.0) / power


def linear(base: np.ndarray, factor: float) -> np.ndarray:
    """Positions pressed together by the factor."""
    return (base / np.float32(factor)).astype(np.float32)


def llama3(base: np.ndarray, params: Mapping[str, float]) -> np.ndarray:
    """Keep short wavelengths, divide long ones by the factor, blend between."""
    base = base.astype(np.float64)
    low, high = params["low_freq_factor"], params["high_freq_factor"]
    original, factor = params["original_max_position_embeddings"], params["factor"]
    wavelength = 2 * math.pi / base
    blend = (original / wavelength - low) / (high - low)
    smooth = (1 - blend) * base / factor + blend * base
    middle = np.where(wavelength < original / high, base, smooth)
    return np.where(wavelength > original / low, base / factor, middle).astype(np.float32)


def yarn(base: np.ndarray, theta: float, dim: int, params: Mapping[str, float]) -> np.ndarray:
    """Interpolate slow pairs, keep fast ones, ramp between the two correction dimensions."""
    base = base.astype(np.float64)
    original = params["original_max_position_embeddings"]

    def correction(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = correction(params["beta_fast"]), correction(params["beta_slow"])
    if params["truncate"]:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, dim - 1.0)
    span = high - low or 0.001
    keep = 1 - np.clip((np.arange(dim // 2, dtype=np.float64) - low) / span, 0, 1)
    return (base / params["factor"] * (1 - keep) + base * keep).astype(np.float32)


def longrope(base: np.ndarray, factors: Sequence[float]) -> np.ndarray:
    """Each pair divided by its own factor, rounded as 1 / (factor * power)."""
    power = np.float32(1.0) / base
    return (np.float32(1.0) / (np.asarray(factors, dtype=np.float32) * power)).astype(np.float32)


def proportional(theta: float, dim: int, share: float, factor: float) -> np.ndarray:
    """The leading share of the pairs turns as in a whole rotation of dim; the others stand still."""
    turning = int(share * dim // 2)
    still = np.zeros(dim // 2 - turning, dtype=np.float32)
    return linear(np.concatenate([plain(theta, dim, turning), still]), factor)


def yarn_attention(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """Multiplier of cos and sin in yarn, where the config does not give it."""

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if mscale and mscale_all_dim:
        return scale(mscale) / scale(mscale_all_dim)
    return scale(1.0)


def longrope_attention(factor: float, original: float) -> float:
    """Multiplier of cos and sin in longrope, where the config does not give it."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
