"""What `numem bench models` runs, and how much of it."""

from dataclasses import dataclass

# Decoders, and the 4-bit format of each whose width is nearest to that of its GGUF file. Q4_1 has 5 bits a weight;
# Q4_K_M of Gemma-3-270M keeps a third of its matrices in 5 bits and its embedding in 8.
DECODERS = {"smollm2-135m-instruct": "q4a", "gemma-3-270m": "q4k"}

EMBEDDER = "all-minilm-l6-v2"


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a run.

    Attributes:
        context: prompt tokens; new: tokens decoded after them.
        pairs: samples of each side, taken in turns after one that warms up.
        gemv: bytes of the matrices that are multiplied in turn, far more than the caches hold.
        texts: short texts that are embedded at a time.
    """

    context: int = 1024
    new: int = 48
    pairs: int = 7
    gemv: int = 1 << 30
    texts: int = 1000


WHOLE = Shape()
