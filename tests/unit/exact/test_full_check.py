"""`exact.check(full=True)` compares every token's log-prob at every place, in bounded memory."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout_engine import RolloutPolicy, SamplingParams, exact
from rollout_engine.base.errors import RequestError
from rollout_engine.exact import distributions
from rollout_engine.testing import tiny_checkpoint

PROMPTS = ["2 + 2 =", "The sky is"]
PARAMS = SamplingParams(max_tokens=6, temperature=0.8, top_k=20, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def policy(path):
    with RolloutPolicy.from_pretrained(path) as policy:
        yield policy


@pytest.fixture(scope="module")
def trainer(path):
    return exact.enable(AutoModelForCausalLM.from_pretrained(path))


def rollout(policy, **options):
    return policy.rollout(PROMPTS, PARAMS, num_samples=2, seed=0, use_tqdm=False, **options)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_an_exact_trainer_has_all_the_bits(policy, trainer, layout, monkeypatch):
    batch = rollout(policy, layout=layout)
    monkeypatch.setattr(distributions, "_PIECE_NUMEL", 600)  # two rows of 259
    report = exact.check(batch, model=trainer, engine=policy, full=True)
    assert report.is_exact and report.num_tokens == 24 and report.first_different is None
    assert str(report) == f"exact: 24 distributions of {report.vocab_size} tokens equal bit for bit"
    mask = batch["masks", "all_assistant_mask"]
    assert torch.equal(~report.differences.isnan(), mask) and not report.kl[mask].any()
    assert exact.check(batch, model=trainer).is_exact  # of the sampled tokens


def test_a_trainer_of_other_weights_differs_and_the_report_says_where(policy, trainer):
    batch, other = rollout(policy), copy.deepcopy(trainer)
    with torch.no_grad():
        other.get_output_embeddings().weight[7] += 0.01
    report = exact.check(batch, model=other, engine=policy, full=True)
    assert not report.is_exact and report.num_different == 24
    assert 0 < report.mean_kl <= report.largest_kl < 1e-2 and report.largest_difference > 1e-3
    first = tuple(batch["masks", "all_assistant_mask"].nonzero()[0].tolist())
    assert report.first_different == first and float(report.differences[first]) > 0
    assert str(report).startswith("not exact: 24 of 24 distributions")


def test_rows_are_the_log_probs_of_whole_distributions(policy, trainer):
    ids = list(range(5, 25))
    rows = torch.from_numpy(policy.distributions(ids, [1, 7, 20], temperature=0.5))
    torch.testing.assert_close(rows.exp().sum(-1), torch.ones(3))
    tokens = torch.tensor([[*ids, 9]])
    with torch.no_grad():
        logprobs = exact.token_logprobs(trainer, tokens, temperature=0.5)
    assert torch.equal(logprobs[0, [0, 6, 19]], rows[range(3), [ids[1], ids[7], 9]])
    with pytest.raises(RequestError, match="places=21 is not allowed.*from 1 to 20"):
        policy.distributions(ids, [21])
    assert policy.distributions(ids, []).shape == (0, 0)


def test_arguments_that_do_not_belong_together_are_refused(policy, trainer):
    batch = rollout(policy)
    logprobs = torch.zeros(batch["log_probs", "full"][:, 1:].shape)
    for given, said in [
        (dict(model=trainer, full=True), "compares a model with an engine"),
        (dict(engine=policy, full=True), "compares a model with an engine"),
        (dict(logprobs=logprobs, model=trainer), "Give logprobs or the model"),
        (dict(model=trainer, engine=policy.engine, full=True), r"must be a RolloutPolicy.*RolloutPolicy\(llm\)"),
        (dict(), "Give logprobs or the model"),
        (dict(model=trainer, engine=policy), "engine= goes with full=True"),
    ]:
        with pytest.raises(ValueError, match=said):
            exact.check(batch, **given)
    with pytest.raises(RequestError, match="temperature=None.*no note of the one that sampled"):
        exact.check(batch.to_tensordict(), model=trainer, engine=policy, full=True)
    assert exact.check(batch.to_tensordict(), None, 0.8, model=trainer, engine=policy, full=True).is_exact
