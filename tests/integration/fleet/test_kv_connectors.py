"""KV connectors of a fleet: its engines share one, and those of users meet."""

import os

import pytest

from rollout_engine import LLM, RolloutService, SamplingParams
from rollout_engine.testing import tiny_checkpoint

pytestmark = pytest.mark.slow
PROMPT = {"prompt_token_ids": [3 + 7 * i % 250 for i in range(300)]}
PARAMS = SamplingParams(max_tokens=10, logprobs=0, ignore_eos=True, seed=3)
OPTIONS = dict(num_kv_blocks=256, max_num_seqs=8, num_threads=1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


def service(checkpoint, connector):
    return RolloutService.from_pretrained(checkpoint, num_replicas=2, verbose=False, kv_connector=connector, **OPTIONS)


def test_replicas_find_the_kv_of_one_another_also_of_lost_ones(checkpoint, tmp_path):
    with LLM(checkpoint, log_stats=False, **OPTIONS) as llm:
        (alone,) = llm.generate([PROMPT], PARAMS, use_tqdm=False)
    with service(checkpoint, f"disk:{tmp_path}") as fleet:
        found = [fleet.generate([PROMPT], PARAMS, replica_index=index % 2)[0] for index in range(4)]
        for output in found:
            assert output.outputs[0].token_ids == alone.outputs[0].token_ids
            assert [float(x).hex() for x in output.outputs[0].logprobs] == [
                float(x).hex() for x in alone.outputs[0].logprobs
            ]
        assert [output.num_cached_tokens for output in found[1:]] == [288] * 3
        assert fleet.reset_prefix_cache(False, True)
        assert fleet.generate([PROMPT], PARAMS)[0].num_cached_tokens == 0


def test_connectors_of_users_meet_those_of_all_other_replicas(checkpoint, tmp_path):
    with service(checkpoint, f"tests.integration.dict_connector:Meeting:{tmp_path}") as fleet:
        fleet.get_num_unfinished_requests()
        pids = sorted(int(path.name) for path in tmp_path.iterdir())
        assert len(pids) == 2 and os.getpid() not in pids
        met = {int(path.name): path.read_text().split() for path in tmp_path.iterdir()}
        assert met == {pids[0]: [str(pids[1])], pids[1]: [str(pids[0])]}
