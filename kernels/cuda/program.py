"""Runs the launches of a model on a device.

The residual stream x is float32. A layer of few rows is five launches:

    [join + norm +] queries, keys, values      q/k norm, rotation, page write, attention      output of attention
    [join + norm +] gate, up, activation       down

where a mixture of experts takes five for the last two: join and norm, router, gate and up, down, combination. And
the join of a launch adds what the last product of the block before it gave. For many rows norms and activation
are launches of their own; the bits are the same.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from numem.kernels.cuda import attention, attention_prefill, embed, gate, head, linear, mixture, norm, rotary, segments
from numem.kernels.cuda import language as nl
from numem.kernels.cuda.lowering import (
    Attention,
    Embedding,
    Launch,
    Lowering,
    Mixed,
    Normed,
    NormOf,
    Product,
    Turn,
    matrix_of,
)
from numem.kernels.cuda.merging import Parts
from numem.kernels.program import Program


@dataclass(slots=True)
class Buffers:
    """Activations of up to `rows` rows."""

    rows: int
    x: tuple[Tensor, Tensor]
    h: Tensor
    y: Tensor
    named: dict[str, Tensor] = field(default_factory=dict)

    def of(self, name: str, rows: int) -> Tensor:
        return self.named[name][:rows]


@dataclass(slots=True)
class DeviceCall:
    """What one run is about, on the device.

    Attributes:
        tokens, positions: int64 [M].
        tables: int32 [lanes, width].
        k, v: pages [layers, pages, kv_heads, 16, head_dim].
        decode: rows are lanes: row i has the table i, and writes where its position lies in it. Else
            slots: int64 [M]; plan, wanted_plan: of `attention_prefill.plan` for all rows and for the wanted ones.
        tiles: key tiles that a grid of decode covers.
        wanted: int64 [R], or None for all rows.
        pdl: launches depend on each other.
    """

    tokens: Tensor
    positions: Tensor
    tables: Tensor
    k: Tensor
    v: Tensor
    decode: bool
    tiles: int = 0
    slots: Tensor | None = None
    plan: attention_prefill.Plan | None = None
    wanted_plan: attention_prefill.Plan | None = None
    wanted: Tensor | None = None
    pdl: bool = False


class DeviceProgram:
    """The launches of a model, with the buffers they work in.

    Args:
        program: as `emit` gives it, not joined.
        dtype: DT.
        device: where weights and buffers lie.
    """

    def __init__(self, program: Program, dtype: torch.dtype, device: torch.device) -> None:
        lowered = Lowering(program)
        self.launches, self.head = tuple(lowered.out), lowered.head
        self.dtype, self.device = dtype, device
        attended = next(each for each in self.launches if isinstance(each, Attention))
        self.shape = attended.attend
        self._widths = self._measure()
        self._buffers: dict[int, Buffers] = {}
        self._scratches: dict[tuple[int, int], attention.Scratch] = {}
        self._slots: dict[int, mixture.Scratch] = {}

    def buffers(self, rows: int, decode: bool) -> Buffers:
        """Buffers of at least so many rows. Those of decoding stay for good: graphs hold their addresses."""
        size = nl.next_power_of_2(rows) if decode else rows
        found = self._buffers.get(size if decode else 0)
        if found is None or found.rows < rows:

            def new(width: int, dtype: torch.dtype) -> Tensor:
                return torch.empty((size, width), dtype=dtype, device=self.device)

            hidden = self._widths["x"]
            found = self._buffers[size if decode else 0] = Buffers(
                size,
                (new(hidden, torch.float32), new(hidden, torch.float32)),
                new(hidden, self.dtype),
                new(hidden, self.dtype),
                {name: new(width, self.dtype) for name, width in self._widths.items() if name != "x"},
            )
        return found

    def hidden(self, call: DeviceCall) -> Tensor:
        """Launch everything but the head; the last hidden state of the wanted rows, DT [R, hidden], until the next run."""
        rows = len(call.tokens)
        buffers = self.buffers(rows, call.decode)
        parts: Parts | None = None
        for each, after in zip(self.launches, (*self.launches[1:], None), strict=True):
            if isinstance(each, Embedding):
                first = each.norm
                embed.embed(
                    each.table, call.tokens, buffers.x[0][:rows], each.scale,
                    weight=first.weight, h=buffers.h[:rows], eps=first.eps, offset=first.offset, pdl=call.pdl,
                )  # fmt: skip
            elif isinstance(each, Normed):
                self._normed(each, buffers, rows, call)
            elif isinstance(each, Product) and parts is not None:
                segments.few_rows(each.matrix, buffers.y[:rows], parts=parts, pdl=call.pdl)
                parts = None
            elif isinstance(each, Product):
                linear.linear(buffers.of(each.source, rows), each.matrix, buffers.y[:rows], pdl=call.pdl)
            elif isinstance(each, Mixed):
                self._mixed(each, buffers, rows, call)
            elif isinstance(each, Attention) and call.decode:
                parts = self._attention_of_lanes(each, after, buffers, rows, call)
            elif isinstance(each, Attention):
                rows = self._attention(each, buffers, rows, call)
                if not rows:
                    break
            else:
                self._join(each.norm, each.turn, buffers, rows, call.pdl)
        return buffers.h[:rows]

    def logits(self, h: Tensor, out: Tensor, limit: int, index: Tensor, value: Tensor, *, pdl: bool = False) -> None:
        """Logits float32 [R, vocab] of last hidden states, and of each row the largest below `limit`."""
        assert self.head is not None
        head.logits_peaks(h, matrix_of(self.head.linear), out, limit, index, value, cap=self.head.cap, pdl=pdl)

    def logits_parts(self, h: Tensor, out: Tensor, limit: int, *, pdl: bool = False) -> head.Parts:
        """Logits likewise, and of each row the largest of every tile, for `step.finish_greedy`."""
        assert self.head is not None
        return head.logits_parts(h, matrix_of(self.head.linear), out, limit, cap=self.head.cap, pdl=pdl)

    def _normed(self, each: Normed, buffers: Buffers, rows: int, call: DeviceCall) -> None:
        matrix, out = each.matrix, buffers.of(each.out, rows)
        turn = each.turn
        gates = each.act is None or linear.gates(matrix, rows)
        if segments.serves(matrix) and rows <= segments.FUSED_ROWS and turn.joins and gates:
            fused = segments.Norm(
                buffers.x[turn.before][:rows],
                buffers.x[turn.after][:rows],
                buffers.y[:rows],
                turn.post,
                each.norm.weight,
                each.norm.eps,
                each.norm.offset,
            )
            segments.few_rows(matrix, out, norm=fused, act=each.act, pdl=call.pdl)
            return
        self._join(each.norm, each.turn, buffers, rows, call.pdl)
        h = buffers.h[:rows]
        if each.act is None or gates:
            linear.linear(h, matrix, out, act=each.act, pdl=call.pdl)
        else:
            both = buffers.of("gate_up", rows)
            linear.linear(h, matrix, both, pdl=call.pdl)
            gate.gate(both, out, each.act, pdl=call.pdl)

    def _mixed(self, each: Mixed, buffers: Buffers, rows: int, call: DeviceCall) -> None:
        self._join(each.norm, each.turn, buffers, rows, call.pdl)
        mixture.mixture(
            buffers.h[:rows], each.router, each.gate_up, each.down, buffers.y[:rows],
            top_k=each.top_k, norm_topk=each.norm_topk, act=each.act,
            scratch=self._slots_of(each, buffers.rows if call.decode else rows, call.decode),
            sort=False if call.decode else None, pdl=call.pdl,
        )  # fmt: skip

    def _join(self, normed: NormOf, turn: Turn, buffers: Buffers, rows: int, pdl: bool) -> None:
        """h = the norm of x joined with a branch; where none joins it is the embedding's, and lies there."""
        if not turn.joins:
            return
        norm.add_norm(
            buffers.x[turn.before][:rows],
            buffers.y[:rows],
            turn.post,
            normed.weight,
            buffers.h[:rows],
            buffers.x[turn.after][:rows],
            eps=normed.eps,
            offset=normed.offset,
            pdl=pdl,
        )

    def _attention_of_lanes(
        self, each: Attention, after: Launch | None, buffers: Buffers, rows: int, call: DeviceCall
    ) -> Parts | None:
        """What is left for the launch after this one to merge, if it is one that does."""
        a, r = each.attend, each.rope
        tiles = attention.seen_tiles(call.tiles, a.window, a.head_dim)
        left = isinstance(after, Product) and segments.merges(after.matrix, rows, a.head_dim, tiles)
        return attention.decode(
            buffers.of("qkv", rows), each.norms, r.cos, r.sin, call.k[a.layer], call.v[a.layer], call.tables,
            call.positions, buffers.of("attended", rows), self._scratch(rows, call.tiles),
            heads=a.heads, kv_heads=a.kv_heads, head_dim=a.head_dim, scale=a.scale, window=a.window,
            softcap=a.softcap, tiles=call.tiles, merge="next" if left else None, pdl=call.pdl,
        )  # fmt: skip

    def _attention(self, each: Attention, buffers: Buffers, rows: int, call: DeviceCall) -> int:
        """How many rows go on."""
        a, r = each.attend, each.rope
        k, v, qkv = call.k[a.layer], call.v[a.layer], buffers.of("qkv", rows)
        sizes: dict[str, Any] = {"heads": a.heads, "kv_heads": a.kv_heads, "head_dim": a.head_dim}
        assert call.slots is not None
        q = buffers.of("q", rows)
        rotary.rope_write(qkv, each.norms, r.cos, r.sin, call.positions, call.slots, k, v, q, **sizes)
        plan = call.plan
        if each.last and call.wanted is not None:
            plan, rows = call.wanted_plan, len(call.wanted)
            if rows:
                for kept in (q, *buffers.x):
                    kept[:rows] = kept[call.wanted]
        if rows:
            assert plan is not None
            attention_prefill.prefill(
                q[:rows], k, v, call.tables, plan, buffers.of("attended", rows),
                **sizes, scale=a.scale, window=a.window, softcap=a.softcap,
            )  # fmt: skip
        return rows

    def _scratch(self, lanes: int, tiles: int) -> attention.Scratch:
        """Partial results of the attention of a step; kept for good likewise."""
        key = (nl.next_power_of_2(lanes), nl.next_power_of_2(tiles))
        if key not in self._scratches:
            a = self.shape
            self._scratches[key] = attention.Scratch.of(key[0], a.heads, a.head_dim, key[1], self.device)
        return self._scratches[key]

    def _slots_of(self, each: Mixed, rows: int, decode: bool) -> mixture.Scratch:
        """Working memory of a mixture; every layer of a model has one shape."""
        key = rows if decode else 0
        found = self._slots.get(key)
        if found is None or len(found.ids) < rows:
            matrix = each.down.matrix
            hidden = matrix.out_features // each.down.count
            found = self._slots[key] = mixture.Scratch.of(
                rows, each.down.count, each.top_k, matrix.in_features, hidden, self.dtype, self.device
            )
        return found

    def _measure(self) -> dict[str, int]:
        """Columns of the buffers."""
        a = self.shape
        first = next(each for each in self.launches if isinstance(each, Embedding))
        gated = [e.matrix.out_features for e in self.launches if isinstance(e, Normed) and e.act is not None]
        inner = max(gated, default=2)
        return {
            "x": first.table.in_features,
            "qkv": (a.heads + 2 * a.kv_heads) * a.head_dim,
            "q": a.heads * a.head_dim,
            "attended": a.heads * a.head_dim,
            "gate_up": inner,
            "gated": inner // 2,
        }
