"""Figures on events: stacked bars as SVG inside Markdown, drawn here because a few kB must do and nothing be written.

matplotlib would take 0.6 s to import, keep a font cache on disk and make 26 kB of the same bars.
"""

import base64
import math
from collections.abc import Mapping, Sequence
from html import escape

import dagster as dg

COLOURS = ("#4f7cac", "#c0df85", "#db6c79", "#9a8fb5")
MAX_BARS = 32
_WIDTH, _HEIGHT = 640, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 10, 34, 30


def stacked_bars(
    title: str, series: Mapping[str, Sequence[float]], *, unit: str, each: str, total: int | None = None
) -> dg.MarkdownMetadataValue:
    """Bars of at most 32 things, their parts stacked.

    Args:
        series: name of a part -> its value for each thing; equal lengths.
        unit: of the values, on the axis.
        each: what one bar is, under the axis.
        total: how many things there are, where only the first have values.
    """
    known = max((len(values) for values in series.values()), default=0)
    shown, count = min(known, MAX_BARS), known if total is None else total
    top = _ceiling(max((sum(v[i] for v in series.values()) for i in range(shown)), default=0))
    inner, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    step = inner / max(shown, 1)
    parts = [_text(_LEFT, 14, title, weight="bold")]
    for tick in range(5):
        y = _TOP + height - height * tick / 4
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="#ccc" stroke-width=".5"/>')
        parts.append(_text(_LEFT - 6, y + 4, f"{top * tick / 4:g}", anchor="end"))
    floor = [0.0] * shown
    for at, (colour, (name, values)) in enumerate(zip(COLOURS, series.items(), strict=False)):
        x = _LEFT + 150 * at
        parts.append(f'<rect x="{x}" y="20" width="9" height="9" fill="{colour}"/>')
        parts.append(_text(x + 13, 28, name))
        path = []
        for i in range(shown):
            low, floor[i] = floor[i], floor[i] + values[i]
            a, b = (_TOP + height * (1 - v / top) for v in (low, floor[i]))
            path.append(f"M{_LEFT + step * (i + 0.1):.1f} {b:.1f}h{step * 0.8:.1f}V{a:.1f}h-{step * 0.8:.1f}z")
        parts.append(f'<path d="{"".join(path)}" fill="{colour}"/>')
    more = f" (the first {shown} of {count})" if count > shown else ""
    parts.append(_text(_LEFT, _HEIGHT - 8, f"{each}, 1 to {shown}{more}; {unit}"))
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
        f'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="#fff"/>{"".join(parts)}</svg>'
    )
    data = base64.b64encode(svg.encode()).decode()
    return dg.MetadataValue.md(f"![{escape(title)}](data:image/svg+xml;base64,{data})")


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-weight="{weight}" fill="#333">{escape(text)}</text>'


def _ceiling(value: float) -> float:
    """The smallest of 1, 2, 4, 5, 8, 10 times a power of ten that is not below the value."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(m * power for m in (1, 2, 4, 5, 8, 10) if m * power >= value)
