"""A session that keeps one policy version."""

import pytest

from rollout_engine.base.errors import RequestError
from rollout_engine.base.outputs import CompletionOutput, VersionSpan
from rollout_engine.sessions.errors import SessionEndedError
from rollout_engine.sessions.versions import SessionVersion

PINNED = {"policy_version": 3, "min_policy_version": None, "version_wait": "end"}


def sample(version):
    return CompletionOutput(0, "", [5], None, None, None, None, "stop", None, [VersionSpan(0, 1, version, version)], 7)


def test_a_session_without_a_version_asks_for_none():
    version = SessionVersion({"temperature": 1.0}, pins=False)
    assert version.params_at(3, has_begun=False) == version.params_at(4, has_begun=True) == {}
    version.note_no_answer(9)
    assert not version.is_past


def test_the_version_is_that_of_the_first_answer():
    version = SessionVersion({}, pins=True)
    assert version.params_at(2, has_begun=False)["policy_version"] == 2, "its request had no answer"
    assert version.params_at(3, has_begun=False) == version.params_at(3, has_begun=True) == PINNED
    for live in (4, 2):  # an update, and a trainer that went back
        with pytest.raises(SessionEndedError, match=f"policy version 3, and version {live} is live"):
            version.params_at(live, has_begun=True)
    assert version.is_past


def test_a_first_answer_that_waits_for_a_version_decides():
    version = SessionVersion({"min_policy_version": 3}, pins=True)
    assert version.params_at(1, has_begun=False) == {}
    version.note_answer(sample(3))
    version.note_answer(sample(5))
    assert version.params_at(3, has_begun=True) == PINNED


def test_a_version_that_is_asked_for_is_waited_for_once():
    version = SessionVersion({"policy_version": 3}, pins=False)
    assert version.params_at(1, has_begun=False) == {} and version.params_at(3, has_begun=True) == {
        "version_wait": "end"
    }
    version.note_no_answer(3)
    assert not version.is_past
    version.note_no_answer(4)
    assert version.is_past
    with pytest.raises(SessionEndedError):
        version.params_at(4, has_begun=True)
    with pytest.raises(RequestError, match="pin_version"):
        SessionVersion({"policy_version": 3}, pins=True)
