"""A report as blocks, written as Markdown and as one HTML page that loads nothing."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #1b1f24;
       background: #fff; }
h1, h2 { line-height: 1.2; } h2 { margin-top: 2.2rem; border-bottom: 1px solid #d7dbe0; padding-bottom: .2rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; margin: .8rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid #e4e7eb; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { background: #f4f6f8; }
img { max-width: 100%; height: auto; }
.note { border-left: 4px solid #c77700; padding: .4rem .9rem; background: #fff8ec; }
@media (prefers-color-scheme: dark) { body { color: #e3e6ea; background: #15181c; } th { background: #22272e; }
  th, td { border-color: #333a42; } h2 { border-color: #333a42; } .note { background: #2b2415; }
  img { background: #fff; } }
"""


@dataclass(frozen=True, slots=True)
class Heading:
    text: str


@dataclass(frozen=True, slots=True)
class Text:
    text: str
    is_note: bool = False


@dataclass(frozen=True, slots=True)
class Bullets:
    lines: Sequence[str]


@dataclass(frozen=True, slots=True)
class Grid:
    """A table. The first column is text."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Picture:
    title: str
    path: Path


Block = Heading | Text | Bullets | Grid | Picture


def as_markdown(blocks: Sequence[Block], folder: Path) -> str:
    """The blocks as Markdown. Pictures are links relative to `folder`."""
    parts = []
    for block in blocks:
        match block:
            case Heading(text):
                parts.append(f"## {text}")
            case Text(text, is_note):
                parts.append(f"> {text}" if is_note else text)
            case Bullets(lines):
                parts.append("\n".join(f"* {line}" for line in lines))
            case Grid(header, rows):
                table: list[Sequence[str]] = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
                parts.append("\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in table))
            case Picture(name, path):
                parts.append(f"![{name}]({path.relative_to(folder).as_posix()})")
    return "\n\n".join(parts) + "\n"


def as_html(title: str, blocks: Sequence[Block]) -> str:
    """The report as one page, its pictures inside."""
    parts = [f"<h1>{html.escape(title)}</h1>"]
    for block in blocks:
        match block:
            case Heading(text):
                parts.append(f"<h2>{html.escape(text)}</h2>")
            case Text(text, is_note):
                parts.append(f'<p class="note">{html.escape(text)}</p>' if is_note else f"<p>{html.escape(text)}</p>")
            case Bullets(lines):
                parts.append("<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in lines) + "</ul>")
            case Grid(header, rows):
                head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
                body = "".join(
                    "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
                )
                parts.append(f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>')
            case Picture(name, path):
                data = base64.b64encode(path.read_bytes()).decode()
                parts.append(f'<p><img alt="{html.escape(name)}" src="data:image/png;base64,{data}"></p>')
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>'
        + "\n".join(parts)
        + "</body></html>\n"
    )
