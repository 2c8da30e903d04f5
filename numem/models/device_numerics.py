"""The arithmetic of a model on a GPU: what its program computes at its shapes, and the proof that rows stand alone.

The self-test is a model of a few layers, one of each kind that the model has, with the true sizes of every matrix but
the vocabulary and weights from a fixed stream. Its tokens are evaluated at once, in pieces, and one by one beside other
lanes: logits and pages must have the same bytes, and these are the digest. Versions of libraries are no part of it:
builds that compute the same bits share state.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from numem.errors import ModelError
from numem.identity.chain import PAGE_TOKENS
from numem.identity.digest import blake3_of
from numem.identity.fingerprint import NumericPolicy
from numem.kernels.cuda.matrix import STEP, Matrix, Stack
from numem.kernels.cuda.selftest import POLICY, Inputs, require_equal
from numem.kernels.formats import FORMATS
from numem.kernels.operations import Linear
from numem.models.architecture.descriptor import FULL, SLIDING, Descriptor
from numem.models.device_transformer import DeviceTransformer
from numem.models.forward import Experts, Feed, LayerWeights, ModelWeights, NormWeights
from numem.models.numerics import position_tables
from numem.runtime.engine import Rows
from numem.runtime.paging.pages import DTYPES, PageStorage
from numem.runtime.sampling import Sampler

LENGTH = 700  # tokens: key tiles, and products of every number of rows
LANES = (1, 3, 7, 13, 32)  # rows beside each other: every tile of rows that a step of decoding has
VOCAB = 16384  # rows of the embedding at most

_SAMPLERS = (Sampler(0.7, 0, 1.0, 1), Sampler(1.0, 20, 1.0, 2), Sampler(1.3, 0, 0.9, 3), Sampler())


def device_policy(
    d: Descriptor, dtype: str, device: torch.device, *, quantised: Sequence[str] = (), length: int = LENGTH
) -> NumericPolicy:
    """The numeric policy of a model on a device.

    Args:
        dtype: of weights and pages.
        quantised: formats that matrices are held in.
        length: tokens of the self-test.

    Raises:
        ModelError: a row whose bytes depend on other rows or on the form in which it was computed.
    """
    outputs: list[Tensor] = list(position_tables(d))
    for kind in ("dense", *(name for name in sorted(quantised) if _packed(name))):
        outputs += _probe(d, dtype, device, kind, min(length, d.position_limit))
    return NumericPolicy(POLICY, blake3_of(t.cpu().contiguous().view(torch.uint8).numpy() for t in outputs))


def _packed(name: str) -> bool:
    return FORMATS[name].code in (4, 8) and FORMATS[name].block == STEP


def _probe(d: Descriptor, dtype: str, device: torch.device, kind: str, length: int) -> list[Tensor]:
    small = shrunk(d)
    inputs = Inputs(device, DTYPES[dtype])
    weights = seeded(small, inputs, kind, length)
    decoder = DeviceTransformer(small, weights, dtype=dtype, max_position=length, device=device)
    tokens = inputs.take(length).long().remainder_(small.vocab).cpu()
    return _Trial(decoder, tokens, f"{d.family} {dtype} {kind}").outputs()


def shrunk(d: Descriptor) -> Descriptor:
    """One layer of each kind that a model has, and a small vocabulary."""
    mixtures = (False,) * d.layers if d.moe is None else d.moe.layers
    kinds = sorted(set(zip(d.layer_kinds, mixtures, strict=True)))
    moe = None if d.moe is None else replace(d.moe, layers=tuple(mixture for _, mixture in kinds))
    return replace(
        d, layers=len(kinds), layer_kinds=tuple(kind for kind, _ in kinds), moe=moe, vocab=min(d.vocab, VOCAB)
    )


def seeded(d: Descriptor, inputs: Inputs, kind: str, positions: int) -> ModelWeights:
    """Weights of a model from a stream; layers share their matrices, as they are large.

    Args:
        kind: "dense", or a packed format, of every matrix that it divides.
    """
    q, kv = d.heads * d.head_dim, d.kv_heads * d.head_dim

    def matrix(n: int, k: int, bias: bool = False) -> Linear:
        fits = kind != "dense" and FORMATS[kind].fits(k)
        return cast(Linear, inputs.matrix(n, k, kind if fits else "dense", bias=bias))

    def norm(width: int) -> Tensor:
        return inputs.values(width).mul_(0.25).add_(1.0 - d.norm.offset)

    embed, qkv = matrix(d.vocab, d.hidden), matrix(q + 2 * kv, d.hidden, d.attn_bias.q)
    out = matrix(d.hidden, q, d.attn_bias.o)
    feed = Feed(matrix(2 * d.inter, d.hidden, d.mlp_bias), matrix(d.hidden, d.inter, d.mlp_bias))
    experts = None
    if d.moe is not None:
        router = cast(Linear, Matrix.dense(inputs.values(d.moe.experts, d.hidden).mul_(0.125)))

        def stack(n: int, k: int) -> Sequence[Linear]:
            assert d.moe is not None
            whole = cast(Matrix, matrix(d.moe.experts * n, k))
            return cast(Sequence[Linear], Stack(whole, d.moe.experts))

        experts = Experts(router, stack(2 * d.moe.inter, d.hidden), stack(d.hidden, d.moe.inter))
    layers = tuple(
        LayerWeights(
            {place: NormWeights(norm(d.hidden), None) for place in d.norms},
            qkv,
            norm(d.head_dim) if d.qk_norm else None,
            norm(d.head_dim) if d.qk_norm else None,
            out,
            experts if experts is not None and d.moe is not None and d.moe.layers[index] else feed,
        )
        for index in range(d.layers)
    )
    tables = {FULL: d.rope_tables(positions), SLIDING: d.local_rope_tables(positions)}
    placed = {name: (cos.to(inputs.device), sin.to(inputs.device)) for name, (cos, sin) in tables.items()}
    return ModelWeights(embed, embed, None, NormWeights(norm(d.hidden), None), layers, None, placed)


@dataclass(slots=True)
class _Trial:
    """Tokens of one text, evaluated in every way."""

    decoder: DeviceTransformer
    tokens: Tensor
    what: str

    def outputs(self) -> list[Tensor]:
        """What is the same in every way: logits, chosen tokens, keys and values."""
        whole, count = self._pages(), len(self.tokens)
        logits = self._run(whole, range(count))
        parts = self._pages()
        parts.table = list(reversed(parts.table))
        step = max(1, count // 3 + 5)
        cut = [self._run(parts, range(at, min(at + step, count))) for at in range(0, count, step)]
        require_equal(torch.cat(cut), logits, f"{self.what}: a text in pieces")
        order = torch.tensor(parts.table, device=self.decoder.device)
        for name, mine, theirs in (
            ("keys", whole.k, parts.k),
            ("values", whole.v, parts.v),
        ):
            require_equal(
                _rows(mine, count), _rows(theirs[:, order], count), f"{self.what}: {name} of a text in pieces"
            )
        ends = sorted({0, 1, count // 2, count - 2, *(at for at in (127, 128) if at < count)})
        self._lanes(whole, logits, ([at] for at in ends))
        self._lanes(whole, logits, (range(max(0, count - lanes), count) for lanes in LANES))
        chosen = self._chosen(whole, logits)
        return [logits, chosen, _rows(whole.k, count), _rows(whole.v, count)]

    def _lanes(self, text: "_Text", logits: Tensor, groups: Iterable[Sequence[int]]) -> None:
        """Positions side by side, each a lane of its own over the same pages, which it leaves as they are."""
        before = [_rows(t, len(self.tokens)).clone() for t in (text.k, text.v)]
        for positions in groups:
            got = self._run(text, positions, apart=True)
            require_equal(got, logits[list(positions)], f"{self.what}: {len(positions)} lanes")
        after = [_rows(t, len(self.tokens)) for t in (text.k, text.v)]
        for old, new in zip(before, after, strict=True):
            require_equal(new, old, f"{self.what}: keys and values of lanes")

    def _chosen(self, text: "_Text", logits: Tensor) -> Tensor:
        """Tokens that samplers choose, the same beside each other and alone."""
        count = min(len(_SAMPLERS), len(self.tokens))
        positions = range(len(self.tokens) - count, len(self.tokens))
        asked = list(zip(_SAMPLERS, positions, strict=False))
        limit = logits.shape[1]
        self._run(text, positions, apart=True)
        pages = cast(PageStorage, text)
        together = self.decoder.choose(asked, limit, pages)
        for place, each in enumerate(asked):
            self._run(text, [each[1]], apart=True)
            if self.decoder.choose([each], limit, pages) != [together[place]]:
                raise ModelError(f"self-test: {self.what}: a sampled token depends on the other rows; use device='cpu'")
        return torch.tensor(together)

    def _run(self, text: "_Text", positions: Sequence[int], *, apart: bool = False) -> Tensor:
        """Logits [M, vocab] of rows at these positions, of one lane or each of its own."""
        at = torch.tensor(list(positions))
        table = torch.tensor(text.table, dtype=torch.int32)
        lanes = torch.arange(len(at), dtype=torch.int32) if apart else torch.zeros(len(at), dtype=torch.int32)
        slots = table[at // PAGE_TOKENS].long() * PAGE_TOKENS + at % PAGE_TOKENS
        tables = table.expand(len(at) if apart else 1, -1).contiguous()
        rows = Rows(self.tokens[at], at, slots, lanes, tables, torch.arange(len(at)))
        return self.decoder.forward(rows, cast(PageStorage, text)).clone()

    def _pages(self) -> "_Text":
        t = self.decoder
        pages = -(-len(self.tokens) // PAGE_TOKENS)
        shape = (t.spec.slabs[0].members, pages, t.kv_heads, PAGE_TOKENS, t.head_dim)
        k, v = (torch.full(shape, torch.nan, dtype=DTYPES[t.dtype], device=t.device) for _ in range(2))
        return _Text(k, v, list(range(pages)))


@dataclass(slots=True)
class _Text:
    """Pages of one text, all NaN at first, and their order; what a pass reads of a `PageStorage`."""

    k: Tensor
    v: Tensor
    table: list[int]


def _rows(pages: Tensor, count: int) -> Tensor:
    """Rows [layers, kv_heads, count, head_dim] of pages in logical order."""
    layers, _, heads, _, dim = pages.shape
    return pages.transpose(1, 2).reshape(layers, heads, -1, dim)[:, :, :count]
