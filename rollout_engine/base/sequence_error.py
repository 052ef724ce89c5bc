"""The error of a model runner that concerns one sequence of a step."""


class SequenceError(Exception):
    """Raised in place of a step's result, before anything is computed: one sequence can never be computed.

    Its request ends with the message; the others of the step are computed again.
    """

    def __init__(self, sequence_id: int, message: str) -> None:
        super().__init__(message)
        self.sequence_id = sequence_id
