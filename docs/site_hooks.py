"""MkDocs hooks: pages from outside `docs/`, the notebook, and links that hold in the site as they do in the repository.

Every page is written for readers of the repository: its links are paths of the checkout. The site also shows
`PAGES`, which lie elsewhere or are no Markdown. A link to a file that the site does not have becomes plain text.
"""

from __future__ import annotations

import base64
import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "quick-start.md",
    "benchmarks/README.md": "benchmarks.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "docs/quickstart.ipynb": "notebook.md",
}
"""Markdown outside `docs/`, and the notebook, by the path in the repository: the path in the site."""
IMAGES = "benchmarks/results"
ICON = "cli/relaygr/ui/static/icon.svg"
"""The logo, which is that of the live page."""
FENCE = re.compile(r"^(?P<open>```\w+) \w+$")
LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages and images from outside `docs/`."""
    for source, target in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        if source.endswith(".ipynb"):
            text, images = markdown_of(text, posixpath.basename(source))
            for uri, image in images.items():
                files.append(File.generated(config, uri, content=image))
        files.append(File.generated(config, target, content=text))
    files.append(File.generated(config, "images/icon.svg", abs_src_path=str(ROOT / ICON)))
    for image in sorted((ROOT / IMAGES).rglob("*.png")):
        files.append(File.generated(config, image.relative_to(ROOT).as_posix(), abs_src_path=str(image)))
    return files


def markdown_of(notebook: str, name: str) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown, which links to the file `name`, and its pictures by their paths in the site."""
    parts: list[str] = []
    images: dict[str, bytes] = {}
    for cell in json.loads(notebook)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            if output["output_type"] == "stream":
                parts.append(f"```\n{''.join(output['text']).rstrip()}\n```")
            elif "image/png" in output["data"]:
                uri = f"images/{posixpath.splitext(name)[0]}-{len(images) + 1}.png"
                images[uri] = base64.b64decode("".join(output["data"]["image/png"]))
                parts.append(f"![What this code draws]({uri})")
    parts.insert(1, f'<a href="{name}" download>Download the notebook</a>')
    return "\n\n".join(parts), images


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:  # noqa: ARG001 - MkDocs passes it by name
    """Rewrites links, and drops the names that some code blocks bear for the tests."""
    here = source_of(page.file.src_uri)
    lines, in_code = [], False
    for line in markdown.splitlines():
        if line.startswith("```"):
            in_code = not in_code
            line = FENCE.sub(r"\g<open>", line)
        elif not in_code:
            line = LINK.sub(lambda link: in_site(link, here, page.file.src_uri, files), line)
        lines.append(line)
    return "\n".join(lines)


def source_of(uri: str) -> str:
    """The path in the repository of a page of the site."""
    return next((source for source, target in PAGES.items() if target == uri), f"docs/{uri}")


def in_site(link: re.Match[str], here: str, page: str, files: Files) -> str:
    """A link of the file `here` as the site's `page` needs it."""
    target = link["target"]
    if "://" in target or target.startswith("mailto:"):
        return link[0]
    source = posixpath.normpath(posixpath.join(posixpath.dirname(here), target))
    uri = PAGES.get(source, source.removeprefix("docs/"))
    if files.get_file_from_path(uri) is not None:
        path = posixpath.relpath(uri, posixpath.dirname(page) or ".")
        return f"{link['image']}[{link['text']}]({path}{link['anchor'] or ''})"
    if (ROOT / source).exists():
        return link["text"]
    return link[0]
