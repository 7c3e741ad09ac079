"""A flame graph as SVG: nested rectangles, each as wide as its share of the time."""

from dataclasses import dataclass
from xml.sax.saxutils import escape

_WIDTH, _ROW, _MARGIN, _TITLE = 1600, 22, 10, 34
_CHAR = 6.6
_LEAST = 0.4  # narrower ones, in pixels, are not drawn
_COLOURS = {"waiting": "#c9ced6", "Python": "#8fa3bf", "kernel": "#f2b880"}
_SHADES = ("#e4572e", "#e8703a", "#ec8a48", "#efa158", "#f0b56b", "#dd6b3d", "#d98848", "#e59a5c")


@dataclass(frozen=True, slots=True)
class Frame:
    """A time span: name, ns, its parts in order, and extra tooltip text."""

    name: str
    value: float
    inner: tuple["Frame", ...] = ()
    note: str = ""


def depth(frame: Frame) -> int:
    """Return the number of levels of a frame."""
    return 1 + max((depth(part) for part in frame.inner), default=0)


def svg(root: Frame, title: str) -> str:
    """Return the picture of a frame, outermost at the top."""
    height = _TITLE + _ROW * depth(root) + _MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="monospace" font-size="11">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{_MARGIN}" y="22" font-size="14">{escape(title)}</text>',
    ]
    scale = (_WIDTH - 2 * _MARGIN) / max(root.value, 1e-9)
    _draw(lines, root, _MARGIN, _TITLE, scale, root.value, 0)
    return "\n".join([*lines, "</svg>", ""])


def _draw(
    lines: list[str], frame: Frame, x: float, y: float, scale: float, whole: float, place: int
) -> None:
    width = frame.value * scale
    if width < _LEAST:
        return
    colour = _COLOURS.get(frame.name, _SHADES[place % len(_SHADES)])
    share = f"{frame.value / 1e3:.1f} us, {frame.value / whole:.2%}"
    about = ", ".join(part for part in (frame.name, share, frame.note) if part)
    lines.append(
        f'<g><title>{escape(about)}</title><rect x="{x:.2f}" y="{y}" width="{width:.2f}" '
        f'height="{_ROW - 1}" fill="{colour}" rx="1"/>'
    )
    room = int((width - 6) / _CHAR)
    if room >= 3:
        text = frame.name if len(frame.name) <= room else frame.name[: room - 1] + "…"
        lines.append(f'<text x="{x + 3:.2f}" y="{y + 15}">{escape(text)}</text>')
    lines.append("</g>")
    for number, part in enumerate(frame.inner):
        _draw(lines, part, x, y + _ROW, scale, whole, number + place + 1)
        x += part.value * scale
