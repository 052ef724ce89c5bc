"""Hidden states that came with the outputs of a core over the fake executor."""

from rollout_engine.core.fake_columns import fake_states


class RecordedStates:
    """Those of each request's prompt, and of each sequence's tokens."""

    def __init__(self):
        self._prompts, self._tokens = {}, {}

    def record(self, outputs, keys):
        """Take those of a step; `keys`: sequence id -> (request id, sample index)."""
        for first, rows in outputs.prompt_hidden_states.items():
            assert keys[first][0] not in self._prompts, "the prompt's states came twice"
            self._prompts[keys[first][0]] = rows.tolist()
        has_states = outputs.hidden_states is not None
        for sequence, row in zip(outputs.sequence_ids, outputs.hidden_states, strict=True) if has_states else ():
            self._tokens.setdefault(keys[sequence], []).append(row.tolist())

    def check(self, request_id, request, tokens):
        """Those of the tokens came, and once those of the whole prompt, if they were asked for."""
        asked = request.params.return_hidden_states
        for index in range(request.params.n):
            own = tokens[request_id, index]
            if asked is not None and own:
                assert self._tokens[request_id, index] == fake_states(own).tolist()
            if asked == "all" and own:
                assert self._prompts[request_id] == fake_states(request.prompt_token_ids).tolist()
