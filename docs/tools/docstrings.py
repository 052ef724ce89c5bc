"""An extension of griffe, which reads the API for the site, for our docstrings and verbs.

Examples (`>>> ...`) become blocks of code, and verbs lose their first parameter, the driver, which callers do not give.
"""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^(>>> .*(?:\n(?:>>>|\.\.\.).*)*)", re.MULTILINE)
VERBS = "rollout_engine.engine.verbs."


class Docstrings(griffe.Extension):
    """Rewrites objects as they are loaded."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Fence the examples of a docstring."""
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(r"```pycon\n\1\n```", obj.docstring.value)

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Leave out the driver of a verb."""
        if func.path.startswith(VERBS) and len(func.parameters) and func.parameters[0].name == "driver":
            del func.parameters["driver"]
