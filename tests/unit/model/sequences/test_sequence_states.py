"""The sequences of a runner, and what those of one prompt share."""

import numpy as np

from rollout_engine.base.messages import NewSequence, SchedulerOutput
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.model.sampling.prompt_logprobs import PromptScorer
from rollout_engine.model.sequences.sequence_states import SequenceStates

VOCAB_SIZE = 300


def work(*new):
    return SchedulerOutput(0, 0, [], list(new), [], [], [])


def test_the_sequences_of_a_prompt_share_the_columns_of_their_masks():
    states = SequenceStates(VOCAB_SIZE, (), PromptScorer(VOCAB_SIZE))
    group, other = (SamplingParams(allowed_token_ids=ids, logit_bias={1: 1.0}) for ids in ([9, 3, 3], [5]))
    states.begin_step(work(*(NewSequence(i, [4], 1, other if i == 2 else group, seed=i) for i in range(4))))
    edits = states.edits_of([states[i] for i in range(4)], [1] * 4)
    assert [edits[i].allowed.tolist() for i in range(4)] == [[3, 9], [3, 9], [5], [3, 9]]
    assert np.shares_memory(edits[0].allowed, edits[1].allowed) and np.shares_memory(edits[0].allowed, edits[3].allowed)
    assert edits[0].bias is edits[3].bias and edits[0].bias is not edits[2].bias
