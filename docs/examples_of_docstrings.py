"""Extension of Griffe: `Example:` of a docstring is code, as `Examples:` is."""

from __future__ import annotations

from typing import Any

import griffe


class ExamplesOfDocstrings(griffe.Extension):
    """Renames the sections, which would be text otherwise."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = obj.docstring.value.replace("Example:\n", "Examples:\n")
