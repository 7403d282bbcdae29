"""Draws pictures of lessons as SVG: lanes of cells, and plots. Readable in light and dark."""

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, LANE, LETTER = 760, 30, 6.6  # pixels: of a picture, height of a lane, mean width of a letter
FILLS = ["#d8dee4", "#a5d0ff", "#ffc680", "#a6e3a1", "#e0b8f5", "#f9b4b4", "#a3e2e0", "#f2e08a"]
DARK = ["#3d444d", "#1f5f9e", "#8f5a10", "#2f6e38", "#6b3f85", "#8c3a3a", "#1f6b69", "#6f6420"]
STYLE = "\n".join(
    (
        "text{font:12px system-ui,sans-serif;fill:#1f2328} .title{font-weight:600;font-size:13px}",
        ".page{fill:#fff} .line{fill:none;stroke-width:2} .axis{stroke:#8c959f;fill:none}",
        *(f".f{i}{{fill:{color}}}" for i, color in enumerate(FILLS)),
        *(f".s{i}{{stroke:{color}}}" for i, color in enumerate(DARK)),
        "@media(prefers-color-scheme:dark){text{fill:#e6edf3} .page{fill:#0d1117}",
        *(f".f{i}{{fill:{color}}}" for i, color in enumerate(DARK)),
        *(f".s{i}{{stroke:{color}}}" for i, color in enumerate(FILLS)),
        "}",
    )
)


def text(x: float, y: float, content: str, anchor: str = "start", style: str = "") -> str:
    attributes = f' text-anchor="{anchor}"' * (anchor != "start") + f' class="{style}"' * bool(
        style
    )
    return f'<text x="{x:.0f}" y="{y:.0f}"{attributes}>{escape(content, quote=False)}</text>'


def picture(title: str, height: float, parts: Sequence[str]) -> str:
    size = f'viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" height="{height:.0f}"'
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
            f"<title>{escape(title, quote=False)}</title>",
            f"<style>{STYLE}</style>",
            '<rect class="page" width="100%" height="100%" rx="6"/>',
            text(12, 22, title, style="title"),
            *parts,
            "</svg>\n",
        )
    )


def ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers from `low` to `high`."""
    step = 10 ** math.floor(math.log10((high - low) or 1))
    step = next(s for s in (step / 5, step / 2, step, 2 * step) if (high - low) / s <= 6)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step + 1e-9) + 1)]


def names(legend: Mapping[str, int], x: float, y: float, style: str = "f") -> list[str]:
    """Return squares with their names, from left to right."""
    parts = []
    for name, color in legend.items():
        parts.append(
            f'<rect class="{style}{color}" x="{x:.0f}" y="{y - 10}" width="12" height="12"/>'
        )
        parts.append(text(x + 17, y, name))
        x += 36 + LETTER * len(name)
    return parts


def lanes(
    title: str,
    rows: Sequence[tuple[str, Sequence[tuple[float, float, str, int]]]],
    axis: str = "",
    legend: Mapping[str, int] | None = None,
) -> str:
    """Draw lanes from top to bottom, each with a name and cells (start, length, text, color)."""
    left = 24 + LETTER * max(len(name) for name, _ in rows)
    cells = [cell for _, cells in rows for cell in cells]
    low, high = min(c[0] for c in cells), max(c[0] + c[1] for c in cells)
    scale = (WIDTH - 16 - left) / (high - low)
    parts, y = [], 34
    for name, lane in rows:
        parts.append(text(left - 8, y + 18, name, "end"))
        drawn = [cell for cell in lane if cell[1] > 1e-6]
        for start, length, content, color in drawn:
            content = content.strip()
            x, width = left + (start - low) * scale, max(length * scale - 1.5, 1)
            box = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="{LANE - 5}"'
            parts.append(f'<rect class="f{color}" {box} rx="2"/>')
            if len(content) * LETTER <= width + 2:
                parts.append(text(x + width / 2, y + 17, content, "middle"))
            elif start == drawn[-1][0]:
                parts.append(text(x + width + 6, y + 17, content))
        y += LANE
    if axis:
        for tick in ticks(low, high):
            x = left + (tick - low) * scale
            parts.append(f'<path class="axis" d="M{x:.1f} {y}v5"/>')
            parts.append(text(x, y + 17, f"{tick:g}", "middle"))
        parts.append(text(left - 8, y + 17, axis, "end"))
        y += 24
    if legend:
        parts += names(legend, left, y + 18)
        y += 28
    return picture(title, y + 8, parts)


def plot(
    title: str,
    x_name: str,
    y_name: str,
    lines: Mapping[str, Sequence[tuple[float, float]]],
) -> str:
    """Draw lines through points (x, y), from the origin."""
    left, top, bottom = 80, 62, 300
    high_x, high_y = (max(p[i] for line in lines.values() for p in line) for i in (0, 1))

    def at(x: float, y: float) -> tuple[float, float]:
        return left + x / high_x * (WIDTH - 40 - left), bottom - y / high_y * (bottom - top)

    parts = [f'<path class="axis" d="M{left} {top}V{bottom}H{WIDTH - 24}"/>']
    for tick in ticks(0, high_x):
        x, _ = at(tick, high_y)
        parts.append(f'<path class="axis" d="M{x:.1f} {bottom}v5"/>')
        parts.append(text(x, bottom + 18, f"{tick:,.12g}", "middle"))
    for tick in ticks(0, high_y):
        _, y = at(high_x, tick)
        parts.append(f'<path class="axis" d="M{left} {y:.1f}h-5"/>')
        parts.append(text(left - 9, y + 4, f"{tick:,.12g}", "end"))
    parts += [text(12, top - 18, y_name), text(WIDTH - 24, bottom + 36, x_name, "end")]
    for color, line in enumerate(lines.values(), 1):
        places = [at(*point) for point in line]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        parts.append(f'<path class="line s{color}" d="M{path}"/>')
        parts += [
            f'<circle class="f{color} s{color}" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>'
            for x, y in places
        ]
    legend = {name: color for color, name in enumerate(lines, 1)}
    parts += names(legend, left + LETTER * len(y_name), top - 18)
    return picture(title, bottom + 46, parts)
