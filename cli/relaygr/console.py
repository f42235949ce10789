"""The consoles of the commands: they print texts as they are, but for what a terminal would obey."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from relaygr.runtime.printable import printable


class _PlainConsole(Console):
    """Escapes what would move a terminal's cursor or change its colours: it may come from a message of others."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text, style, control = segment
            if control is None and not text.isprintable():
                yield Segment(printable(text, but="\n"), style)
            else:
                yield segment


def plain_console(*, stderr: bool = False, soft_wrap: bool = False, width: int | None = None) -> Console:
    """Prints texts as they are: they may have names of users, in which `[red]` or `:abc:` is no markup."""
    return _PlainConsole(stderr=stderr, soft_wrap=soft_wrap, width=width, highlight=False, markup=False, emoji=False)
