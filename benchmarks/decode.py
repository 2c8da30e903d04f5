"""Greedy decoding: tokens a second of one lane and of 32, beside transformers with a static cache and compilation."""

from collections import Counter

import torch

from benchmarks.common import Bench, Ceilings, Stat, release, wall
from benchmarks.models import Made
from benchmarks.peer_transformers import Peer
from benchmarks.shapes import TITLES, bytes_per_token, kv_bytes

STEPS = 64
CONTEXTS = {1: 512, 32: 2048}
LARGE = ("30b",)  # shapes that are measured in bfloat16 alone
MANY_ONLY = "8b"  # the shape that is measured with many lanes


def run(bench: Bench, ceilings: Ceilings) -> None:
    """Every shape, format and lane count that the arguments name."""
    bench.warm += [
        "weights and pages resident, keys and values random, CUDA graph captured and replayed before",
        f"a sample is {STEPS} steps by one call, host copies of lane state and tokens included",
        "peer: weights and static cache resident, compiled and run before; a sample is as many steps, token fed back",
    ]
    for shape in bench.args.shapes.split(","):
        for lanes in map(int, bench.args.lanes.split(",")):
            if lanes > 1 and shape != MANY_ONLY:
                continue
            ours = {}
            for form in bench.args.formats.split(","):
                if form != "bf16" and (shape in LARGE or lanes > 1):
                    continue
                name = f"{TITLES[shape]} {form}, {lanes} lanes"
                ours[form] = bench.attempt(
                    name, lambda s=shape, f=form, n=lanes, w=name: _ours(bench, ceilings, w, s, f, n)
                )
                release()
            if lanes == 1:
                for mode in bench.args.peer.split(","):
                    if mode != "none":
                        name = f"transformers {mode}, {TITLES[shape]} bf16"
                        bench.attempt(name, lambda s=shape, m=mode, w=name, o=ours: _peer(bench, w, s, m, o))
                        release()


def _ours(bench: Bench, ceilings: Ceilings, name: str, shape: str, form: str, lanes: int) -> Stat:
    context, steps = bench.size(CONTEXTS.get(lanes, 2048), 24), bench.size(STEPS, 3)
    lanes = bench.size(lanes, min(lanes, 3))
    made = Made.of(bench, shape, form, lanes=lanes, context=context + steps)
    made.fill()
    stat = Stat.of([us / steps for us in wall(lambda: made.decode(context, steps), bench.size(12, 1), warm=2)])
    kernels = _kernels(bench, made, context)
    weights = bytes_per_token(made.descriptor, made.weights)
    kv = lanes * kv_bytes(made.descriptor, context + steps // 2)
    floor_us = (weights + kv) / ceilings.copy / 1e3
    bench.add(
        name, us_a_step=stat, tokens_s=stat.rate(lanes * 1e6),
        weights_mb=weights / 1e6, kv_mb=kv / 1e6,
        share_of_copy=floor_us / stat.median,
        kernels=kernels, us_a_kernel=stat.rate(1) and stat.median / max(kernels, 1),
        share_with_gaps=(floor_us + kernels * ceilings.gap_pdl) / stat.median,
        kernels_a_layer=(kernels / made.descriptor.layers),
    )  # fmt: skip
    return stat


def _peer(bench: Bench, name: str, shape: str, mode: str, ours: dict[str, Stat | None]) -> None:
    context, steps = bench.size(CONTEXTS[1], 24), bench.size(STEPS, 3)
    peer = Peer(bench, shape)
    repeats = bench.size(6, 1)
    loop = peer.stepper(mode, 1, context, (repeats + 2) * steps + 16)
    stat = Stat.of([us / steps for us in wall(lambda: loop(steps), repeats, warm=1)])
    ratios = {f"ours_{form}_times": stat.median / one.median for form, one in ours.items() if one is not None}
    bench.add(name, us_a_step=stat, tokens_s=stat.rate(1e6), **ratios)


def _kernels(bench: Bench, made: Made, context: int) -> int:
    """Kernels of one step, by the profiler's count; with --profile they are listed with their microseconds."""
    if bench.dry:
        return 0
    steps = 4
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        made.decode(context, steps)
    spent: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith(("Memcpy", "Memset")):
            spent[event.name] += event.device_time_total
            count[event.name] += 1
    if bench.args.profile:
        for kernel, us in spent.most_common(16):
            bench.add(
                f"  kernel {kernel[:60]}", a_step=count[kernel] / steps, us_each=us / count[kernel],
                us_a_step=us / steps,
            )  # fmt: skip
    return round(sum(count.values()) / steps)
