"""The words about a request whose version is not the live one."""

import re

import pytest

from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.base.version_pin import describe_end


@pytest.mark.parametrize(
    "fields, live, said",
    [
        ({"policy_version": 3}, 4, "policy_version=3, and version 4 is live: it ended.*ask for the live version"),
        ({"policy_version": 5, "version_wait": "end"}, 4, "an earlier one: it ended.*version_wait='wait'"),
        ({"min_policy_version": 5, "version_wait": "end"}, 4, "min_policy_version=5.*Send it again after that update"),
    ],
)
def test_an_end_out_of_range_says_which_version_is_live_and_what_to_do(fields, live, said):
    assert re.search(said, describe_end(SamplingParams(**fields), live))
