"""The policy version of a session that keeps one: that of its first answer, or the one that its params ask for."""

from collections.abc import Mapping
from typing import Any

from rollout_engine.base.errors import RequestError
from rollout_engine.base.outputs import CompletionOutput
from rollout_engine.sessions.errors import SessionEndedError


class SessionVersion:
    """Decides which version a session's requests ask for; it is used under the session's lock."""

    def __init__(self, sampling: Mapping[str, Any], *, pins: bool) -> None:
        """`sampling`: params of the session. `pins`: all answers are to be of the version that the first one has.

        Raises `RequestError` for both a version in the params and `pins`.
        """
        self._asked: int | None = sampling.get("policy_version")
        self._least: int = sampling.get("min_policy_version") or 0
        self._pins, self._version = pins, self._asked
        self.is_past = False
        """Whether a request was refused, or ended without an answer, since the version is no longer live."""
        if pins and self._asked is not None:
            bound = "false with policy_version, which is the version of all requests"
            raise RequestError.for_field("pin_version", pins, bound)

    def params_at(self, live: int, *, has_begun: bool) -> dict[str, Any]:
        """Sampling params of a request for the session's version; none if it keeps none, or has to wait for its first.

        `has_begun`: whether the session has answers, or other requests that run. Raises `SessionEndedError` once the
        version is past.
        """
        if not self._pins and self._asked is None:
            return {}
        if self._pins and not has_begun:
            self._version = live if live >= self._least else None
        version = self._version
        if version is None:
            return {}
        if live > version or (self._pins and live < version):
            self.is_past = True
            what = f"its answers are of policy version {version}, and version {live} is live"
            advice = "Make a new one for the live version. Its rows stay readable"
            raise SessionEndedError(f"The session takes no more requests: {what}. {advice}.")
        if self._pins:
            return {"policy_version": version, "min_policy_version": None, "version_wait": "end"}
        return {"version_wait": "end"} if has_begun else {}

    def note_answer(self, sample: CompletionOutput) -> None:
        """Keep the version of the first answer, if it was not known when its request was queued."""
        if self._pins and self._version is None and sample.version_spans:
            self._version = sample.version_spans[-1].policy_version

    def note_no_answer(self, live: int) -> None:
        """Note that a request has ended without an answer: for an update, if another version is live now."""
        if self._version is not None and live > self._version:
            self.is_past = True
