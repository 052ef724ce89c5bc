"""TRL's real GRPOTrainer, generating by our engine."""

import pytest

pytest.importorskip("trl")

import torch  # noqa: E402
from trl import GRPOTrainer  # noqa: E402

from envs_adapters.trainers.trl import ExactLogprobs, attach, make_rollout_func  # noqa: E402
from rollout_engine import RolloutPolicy, exact  # noqa: E402
from rollout_engine.base.errors import ConfigError, RequestError  # noqa: E402
from rollout_engine.testing import tiny_checkpoint  # noqa: E402
from tests.trainers.recorder import Recorder  # noqa: E402
from tests.trainers.trl_runs import PROMPTS, grpo_trainer, logged, model_of  # noqa: E402

# TRL's own use of what it depends on.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
DIFFERENCE = "sampling/sampling_logp_difference/max"


class ExactGRPOTrainer(ExactLogprobs, GRPOTrainer):
    """As the documentation makes it."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def policy(checkpoint):
    with RolloutPolicy.from_pretrained(checkpoint, dtype="float32") as policy:
        yield Recorder(policy)


def test_a_rollout_func_samples_under_the_trainers_weights_of_each_step(checkpoint, policy, tmp_path):
    seen = []

    def reward(prompts, completions, completion_ids, policy_version, **_):
        seen.append((prompts, completion_ids, policy_version))
        return [float(len(text)) for text in completions]

    trainer = grpo_trainer(checkpoint, tmp_path, reward=reward, rollout_func=make_rollout_func(policy), max_steps=3)
    trainer.train()
    assert [report.version for report in policy.updates] == [1, 2, 3]
    assert [versions for _, _, versions in seen] == [[1] * 8, [2] * 8, [3] * 8]
    for (prompts, completions, _), run in zip(seen, policy.rollouts, strict=True):
        assert [params.n for params in run.params] == [4, 4]
        assert prompts == [prompt for prompt in dict.fromkeys(prompts) for _ in range(4)]
        assert all(0 < len(ids) <= 6 for ids in completions)
        assert len({tuple(ids) for ids in completions}) > 1
    assert len({run.seed for run in policy.rollouts}) == 3


def test_weights_are_pushed_once_per_step_however_often_it_generates(checkpoint, policy, tmp_path):
    trainer = grpo_trainer(
        checkpoint,
        tmp_path,
        rollout_func=make_rollout_func(policy),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        steps_per_generation=1,
    )
    trainer.train()
    assert (len(policy.rollouts), len(policy.updates)) == (8, 2)
    assert len({run.seed for run in policy.rollouts}) == 8


def test_weights_that_change_between_two_trainings_are_pushed_too(checkpoint, policy, tmp_path):
    trainer = grpo_trainer(checkpoint, tmp_path, rollout_func=make_rollout_func(policy), max_steps=1)
    trainer.train()
    trainer.train()
    assert [run.batch["policy_version"].max().item() for run in policy.rollouts] == [1, 2]


def test_a_run_can_be_repeated(checkpoint, tmp_path):
    runs = []
    for _ in range(2):
        with RolloutPolicy.from_pretrained(checkpoint, dtype="float32") as policy:
            trainer = grpo_trainer(checkpoint, tmp_path, rollout_func=make_rollout_func(policy))
            trainer.train()
            runs.append([value.clone() for value in trainer.model.state_dict().values()])
    assert all(torch.equal(one, two) for one, two in zip(*runs, strict=True))


def test_exact_logprobs_equal_the_engines_and_without_them_they_are_close(checkpoint, policy, tmp_path):
    differences = {}
    for name, kind, model in (
        ("exact", ExactGRPOTrainer, exact.enable(model_of(checkpoint))),
        ("plain", GRPOTrainer, model_of(checkpoint)),
    ):
        trainer = grpo_trainer(checkpoint, tmp_path, kind=kind, model=model, temperature=0.8)
        attach(trainer, policy)
        trainer.train()
        differences[name] = logged(trainer, DIFFERENCE)
        ratios = logged(trainer, "sampling/importance_sampling_ratio/max")
        assert len(differences[name]) == len(ratios) == 2
        assert name != "exact" or ratios == [1.0, 1.0]
    assert differences["exact"] == [0.0, 0.0]
    assert 0 < max(differences["plain"]) < 1e-3


@pytest.mark.parametrize("options", [{}, {"num_iterations": 2, "max_steps": 4}], ids=["fresh", "reused"])
def test_exact_logprobs_log_the_difference_where_trl_does_not(options, checkpoint, policy, tmp_path):
    trainer = grpo_trainer(
        checkpoint,
        tmp_path,
        kind=ExactGRPOTrainer,
        model=exact.enable(model_of(checkpoint)),
        rollout_func=make_rollout_func(policy),
        **options,
    )
    trainer.train()
    steps = options.get("max_steps", 2)
    assert len(policy.rollouts) == 2 and logged(trainer, DIFFERENCE) == [0.0] * steps
    plain = grpo_trainer(checkpoint, tmp_path, kind=ExactGRPOTrainer, rollout_func=make_rollout_func(policy), **options)
    plain.train()
    assert all(0 < difference < 1e-3 for difference in logged(plain, DIFFERENCE))


def test_an_exact_model_without_exact_log_probs_refuses_trls_left_padding(checkpoint, policy, tmp_path):
    trainer = grpo_trainer(checkpoint, tmp_path, model=exact.enable(model_of(checkpoint)))
    attach(trainer, policy)
    with pytest.raises(ValueError, match="right-padded.*exact.token_logprobs"):
        trainer.train()


def test_exact_logprobs_give_the_gradients_and_entropies_of_trls_own(checkpoint, tmp_path):
    ids = torch.randint(3, 259, (3, 12))
    mask = torch.ones_like(ids)
    mask[0, :4], mask[1, 10:], mask[2, :2] = 0, 0, 0
    results = []
    for kind, model in (
        (ExactGRPOTrainer, exact.enable(model_of(checkpoint))),
        (GRPOTrainer, model_of(checkpoint)),
    ):
        trainer = grpo_trainer(checkpoint, tmp_path, kind=kind, model=model, temperature=0.7)
        logprobs, entropies, loss = trainer._get_per_token_logps_and_entropies(
            model, ids, mask, 6, batch_size=2, compute_entropy=True
        )
        assert loss is None and logprobs.shape == entropies.shape == (3, 6)
        (logprobs * mask[:, -6:]).sum().backward()
        results.append((logprobs.detach(), entropies.detach(), model.get_input_embeddings().weight.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_attached_and_with_a_rollout_func_weights_are_still_pushed_once(checkpoint, policy, tmp_path):
    trainer = grpo_trainer(checkpoint, tmp_path, rollout_func=make_rollout_func(policy))
    attach(trainer, policy)
    trainer.train()
    assert (len(policy.updates), len(logged(trainer, DIFFERENCE))) == (2, 2)


def test_truncated_sampling_and_conversations_reach_the_engine(checkpoint, policy, tmp_path):
    trainer = grpo_trainer(
        checkpoint,
        tmp_path,
        rollout_func=make_rollout_func(policy),
        temperature=0.9,
        top_p=0.8,
        top_k=20,
        min_p=0.01,
        repetition_penalty=1.2,
        generation_kwargs={"min_new_tokens": 2, "presence_penalty": 0.5},
        max_steps=1,
    )
    trainer.train_dataset = trainer.train_dataset.map(
        lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]}
    )
    trainer.train()
    (run,) = policy.rollouts
    text = trainer.processing_class.decode(run.prompts[0]["prompt_token_ids"])
    assert text.startswith("<|user|>") and text.endswith("<|assistant|>") and any(p in text for p in PROMPTS)
    params = run.params[0]
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.9, 0.8, 20, 0.01)
    assert (params.repetition_penalty, params.presence_penalty) == (1.2, 0.5)
    assert (params.max_tokens, params.min_tokens, params.stop_token_ids, params.ignore_eos) == (6, 2, [2], True)
    assert params.logprobs_mode == "processed"


def test_what_cannot_be_honoured_is_refused_by_name(checkpoint, policy, tmp_path):
    def refused(match, **options):
        trainer = grpo_trainer(checkpoint, tmp_path, **options)
        with pytest.raises(ConfigError, match=match):
            attach(trainer, policy)
        return trainer

    refused("num_beams.*no equal", generation_kwargs={"num_beams": 4})
    refused("stop_token_ids", generation_kwargs={"stop_token_ids": [5]})
    trainer = grpo_trainer(checkpoint, tmp_path)
    attach(trainer, policy)
    with pytest.raises(ConfigError, match="use_vllm=True"):
        attach(trainer, policy)
    with pytest.raises(RequestError, match="takes no pictures"):
        trainer.vllm_generation.generate([[3]], [["image"]], 1)


def test_exact_logprobs_refuse_what_has_no_exact_equal(checkpoint, tmp_path):
    trainer = grpo_trainer(checkpoint, tmp_path, kind=ExactGRPOTrainer, entropy_coef=0.1)
    ids = torch.ones(1, 4, dtype=torch.long)
    with pytest.raises(ConfigError, match="entropy_coef"):
        trainer._get_per_token_logps_and_entropies(trainer.model, ids, ids, 2)
    trainer._entropy_bonus_enabled = False
    with pytest.raises(ConfigError, match="router_aux_loss_coef"):
        trainer._get_per_token_logps_and_entropies(trainer.model, ids, ids, 2, compute_aux_loss=True)
    with pytest.raises(ConfigError, match="pixel_values"):
        trainer._get_per_token_logps_and_entropies(trainer.model, ids, ids, 2, pixel_values=ids)


def test_another_trl_is_named_beside_the_tested_one(checkpoint, policy, tmp_path, monkeypatch, caplog):
    trainer = grpo_trainer(checkpoint, tmp_path)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.99.0")
    make_rollout_func(policy)
    assert "TRL 1.99.0 is installed" in caplog.text and "tested with TRL 1.16" in caplog.text
    monkeypatch.setattr(GRPOTrainer, "_generate_single_turn", lambda self: self.use_vllm)
    with pytest.raises(ConfigError, match="does not use _last_loaded_step.*tested with TRL 1.16, and TRL 1.99.0"):
        attach(trainer, policy)
    del trainer.vllm_mode
    with pytest.raises(ConfigError, match="GRPOTrainer has no vllm_mode"):
        attach(trainer, policy)


def test_a_completion_behind_a_tools_result_has_the_tokens_that_fit(checkpoint, tmp_path, caplog):
    with RolloutPolicy.from_pretrained(checkpoint, dtype="float32", max_model_len=32) as policy:
        generation = attach(grpo_trainer(checkpoint, tmp_path, max_completion_length=16), policy)
        prompts = [[5 + index] * length for index, length in enumerate((10, 20, 31, 32, 40))]
        _, completions, logprobs, _ = generation.generate(prompts, None, 1)
        assert [len(each) for each in logprobs] == [len(each) for each in completions]
        for prompt, completion in zip(prompts, completions, strict=True):
            assert len(completion) <= min(16, max(32 - len(prompt), 0))
            assert bool(completion) is (len(prompt) < 32)
        assert "2 of 5 prompts with a tool's result fill max_model_len=32" in caplog.text
        with pytest.raises(RequestError, match="max_model_len"):
            generation.generate([[5] * 32] * 4, None, 4)
        with pytest.raises(RequestError, match="max_tokens=16"):
            generation.complete([[5] * 20])
