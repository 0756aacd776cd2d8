"""The console that everything on a terminal goes through."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from batchscape.outgoing import outgoing


class OutgoingConsole(Console):
    """A console whose texts, also those in tables and bars, leave by `outgoing`."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """See `rich.console.Console.render`; every text and every cell of a table comes by."""
        if isinstance(renderable, str):
            renderable = outgoing(renderable)
        elif isinstance(renderable, Text):
            cleaned = outgoing(renderable.plain)
            if cleaned != renderable.plain:
                renderable = renderable.blank_copy(cleaned)
        return super().render(renderable, options)
