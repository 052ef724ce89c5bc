"""The result of a step that ran at once, and failed."""

from typing import NoReturn


class Failed:
    """The result of a step that ran at once, and failed."""

    def __init__(self, error: Exception) -> None:
        self.error, self.raised = error, False

    def __call__(self) -> NoReturn:
        self.raised = True
        raise self.error
