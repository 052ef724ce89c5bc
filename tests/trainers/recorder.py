"""A policy that is watched, for tests of any trainer."""

from types import SimpleNamespace


class Recorder:
    """A policy that notes its weight updates and rollouts, and what they returned."""

    def __init__(self, policy):
        self._policy = policy
        self.updates, self.rollouts = [], []

    @property
    def frontend(self):
        return self._policy.frontend

    def update_weights(self, *args, **kwargs):
        self.updates.append(self._policy.update_weights(*args, **kwargs))

    def rollout(self, *args, **kwargs):
        batch = self._policy.rollout(*args, **kwargs)
        self.rollouts.append(SimpleNamespace(prompts=args[0], params=args[1], batch=batch, **kwargs))
        return batch
