"""Extension of Griffe: `Example:` of a docstring is code, as `Examples:` is."""

from __future__ import annotations

import re
from typing import Any

import griffe


def _with_text(found: re.Match[str]) -> str:
    """What the heading says becomes the first line."""
    text = found[1].strip()
    return f"Examples:\n    {text[0].upper()}{text[1:]}\n\n" if text else "Examples:\n"


class ExamplesOfDocstrings(griffe.Extension):
    """Renames the sections, which would be text otherwise."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            text = obj.docstring.value
            obj.docstring.value = re.sub(
                r"^Example:(.*)\n", _with_text, text, flags=re.MULTILINE
            )
