"""Scores on a device: beginnings that rows share are computed once, to the bits of each row alone."""

import numpy as np
import pytest

# Of the interpreter: arithmetic on NaN and infinities, which the kernels mean.
pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning",
    "ignore:invalid value encountered:RuntimeWarning",
    "ignore:divide by zero encountered in log:RuntimeWarning",
)


@pytest.mark.slow
def test_scores_compute_a_shared_beginning_once_and_candidates_are_parts_of_one_softmax(engine_on, monkeypatch):
    llm = engine_on("device", deterministic=True)
    prompt, completions = list(range(40, 62)), [[5, 6], [5, 7], [9]]
    alone = [llm.score_candidates([prompt], [each], [each] * len(each), top_k=2) for each in ([5, 6], [5, 7], [9])]
    model, sizes = llm.frontend.client.driver.executor.worker.runner.model, []
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda batch, *given: sizes.append(len(batch[0])) or forward(batch, *given))
    found = llm.score_candidates([prompt] * 3, completions, [[5, 6], [6, 5], [5, 7], [7, 5], [9, 5]], top_k=2)
    assert sizes == [16, 7, 2, 1]  # a step takes 16 tokens at most
    assert np.array_equal(found.logprobs, np.concatenate([each.logprobs for each in alone]))
    assert np.array_equal(found.top_ids, np.concatenate([each.top_ids for each in alone]))
    assert np.array_equal(found.top_logprobs, np.concatenate([each.top_logprobs for each in alone]))
    assert found.candidates[[0, 2, 4], 0].tolist() == [alone[i].candidates[0, 0] for i in range(3)]
    assert found.candidates[:, 0][[0, 2, 4]].tolist() == found.logprobs[[0, 2, 4]].tolist()
    theirs = engine_on("cpu").score_candidates([prompt] * 3, completions, np.arange(10).reshape(5, 2), top_k=2)
    ours = llm.score_candidates([prompt] * 3, completions, np.arange(10).reshape(5, 2), top_k=2)
    np.testing.assert_allclose(ours.candidates, theirs.candidates, atol=2e-4, rtol=0)
