"""A gateway without a server: its sessions record what a test says."""

import threading
from types import SimpleNamespace


class FakeSession:
    """A session; `say` records an answer."""

    def __init__(self, number, sampling):
        self.id, self.api_key, self.sampling = f"session-{number}", f"key-{number}", sampling
        self.openai_base_url = f"http://localhost/sessions/{self.id}/v1"
        self.anthropic_base_url = f"http://localhost/sessions/{self.id}"
        self.is_closed, self._rows, self.ended_by = False, [], None

    def say(self, *token_ids, reward=None):
        sample = SimpleNamespace(token_ids=list(token_ids), version_spans=[])
        messages = [{"role": "assistant", "content": str(token_ids)}]
        row = SimpleNamespace(reward=reward, messages=messages, samples=[(0, sample)], turns=[len(self._rows)])
        self._rows.append(row)

    def rows(self):
        return list(self._rows)

    def reward(self, reward, row=None):
        for each in self._rows if row is None else [self._rows[row]]:
            each.reward = reward

    def close(self):
        self.is_closed = True


class FakeGateway:
    """Sessions of a rollout, in the order in which they were made."""

    def __init__(self):
        self.sessions, self.is_closed, self._lock = [], False, threading.Lock()

    def session(self, *, sampling_params, tokens=None, pin_version=False):
        with self._lock:
            made = FakeSession(len(self.sessions), sampling_params)
            made.pin_version = pin_version
            self.sessions.append(made)
            return made

    def close(self):
        self.is_closed = True
