"""Tinker's SDK, unmodified but for the address: it samples, and trains an adapter."""

import os

import numpy as np
import pytest

pytest.importorskip("tinker")

import tinker  # noqa: E402
import torch  # noqa: E402
from tinker import types  # noqa: E402

from rollout_engine import SamplingParams  # noqa: E402
from rollout_engine.rollouts.tinker import lora_trainer  # noqa: E402
from rollout_engine.serve.options import ServeOptions  # noqa: E402
from rollout_engine.serve.server import HttpServer  # noqa: E402
from tests.transcripts import recording, save  # noqa: E402
from tests.unit.serve.tinker_client import own_output  # noqa: E402

CLIENT = "tinker"
PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def url(request, policy, checkpoint, tmp_path_factory):
    options = ServeOptions(port=0, served_model_name="tiny", tinker=str(tmp_path_factory.mktemp("saved")))
    with recording(checkpoint) as calls:
        with HttpServer(policy, options, lora_trainer(policy)) as server:
            yield server.url
    if os.environ.get("RECORD") == "1" and not request.session.testsfailed:
        save(CLIENT, f"{CLIENT} {tinker.__version__}", calls)


@pytest.fixture
def service(url, monkeypatch):
    monkeypatch.setenv("TINKER_API_KEY", "tml-any")
    monkeypatch.setenv("TINKER_BASE_URL", url)
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    with tinker.ServiceClient() as made:
        yield made


def sft_data():
    """Two sequences, and which of their tokens count."""
    rows = [([5, 6, 7, 8, 9], [0, 0, 1, 1, 1]), ([20, 21, 22, 23], [0, 1, 1, 0.5])]
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(ids),
            loss_fn_inputs={"target_tokens": np.array([*ids[1:], 2]), "weights": np.array(weights, np.float32)},
        )
        for ids, weights in rows
    ]


def rl_datum(prompt, sequence, advantage):
    """A sample as the cookbook's `rl_loop` trains on it."""
    zeros = [0.0] * (len(prompt) - 1)
    return types.Datum(
        model_input=types.ModelInput.from_ints(prompt + sequence.tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": torch.tensor([0] * len(zeros) + sequence.tokens),
            "logprobs": torch.tensor(zeros + sequence.logprobs),
            "advantages": torch.tensor(zeros + [advantage] * len(sequence.tokens)),
        },
    )


def test_samples_and_their_log_probs_are_the_engines(service, policy):
    sampler = service.create_sampling_client(base_model="tiny").result()
    settings = types.SamplingParams(max_tokens=6, seed=11, temperature=0.7)
    asked = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 3, "topk_sample_logprobs": 2}
    found = sampler.sample(types.ModelInput.from_ints(PROMPT), 2, settings, **asked).result()
    params = SamplingParams(n=2, max_tokens=6, seed=11, temperature=0.7, logprobs=2, prompt_logprobs=3)
    output = own_output(policy, PROMPT, params)
    for sequence, expected in zip(found.sequences, output.outputs, strict=True):
        assert sequence.tokens == expected.token_ids and sequence.stop_reason in ("stop", "length")
        assert sequence.logprobs_np.tobytes() == expected.logprobs.tobytes()
        assert np.array_equal(sequence.topk_logprobs_np.token_ids, expected.top_logprobs[0])
    assert len({sequence.sequence_id for sequence in found.sequences}) == 2
    assert found.prompt_logprobs[0] is None and found.topk_prompt_logprobs[0] is None
    assert found.prompt_logprobs[1:] == output.prompt_logprobs[1:].tolist()
    assert [i for i, _ in found.topk_prompt_logprobs[1]] == output.prompt_top_logprobs[0][1].tolist()


def test_a_prompt_is_scored(service, score):
    sampler = service.create_sampling_client(base_model="tiny").result()
    assert sampler.compute_logprobs(types.ModelInput.from_ints(PROMPT)).result()[1:] == score(PROMPT[:1], PROMPT[1:])


def test_what_is_refused_has_its_reason(service):
    sampler = service.create_sampling_client(base_model="tiny").result()
    prompt, settings = types.ModelInput.from_ints(PROMPT), types.SamplingParams(max_tokens=1, seed=0)
    with pytest.raises(tinker.BadRequestError, match="prompt_alt_tokens_k"):
        sampler.sample(prompt, 1, settings, prompt_alt_tokens_k=2).result()
    with pytest.raises(tinker.NotFoundError, match="tiny"):
        service.create_sampling_client(base_model="another/model").result()
    training = service.create_lora_training_client(base_model="tiny", rank=4).result()
    with pytest.raises(tinker.BadRequestError, match="'ppo'"):
        training.forward_backward(sft_data(), "cispo").result()
    with pytest.raises(tinker.RequestFailedError, match="no gradients"):
        training.optim_step(types.AdamParams()).result()


def test_an_adapter_learns_what_it_is_shown(service, policy):
    training = service.create_lora_training_client(base_model="tiny", rank=8, seed=3).result()
    info = training.get_info()
    assert (info.model_name, info.is_lora, info.lora_rank) == ("tiny", True, 8)
    assert training.get_tokenizer().encode("ab") == policy.tokenizer.encode("ab")
    losses = []
    for _ in range(8):
        passed = training.forward_backward(sft_data(), "cross_entropy")
        stepped = training.optim_step(types.AdamParams(learning_rate=1e-2))
        losses.append(passed.result().metrics["loss:sum"])
        assert stepped.result().metrics["unclipped_grad_l2:mean"] > 0
    assert losses[-1] < 0.5 * losses[0]


def test_log_probs_in_training_are_the_samplers(service):
    training = service.create_lora_training_client(base_model="tiny", rank=8, seed=3).result()
    for step in range(2):
        sampler = training.save_weights_and_get_sampling_client().result()
        settings = types.SamplingParams(max_tokens=5, seed=step)
        sequences = sampler.sample(types.ModelInput.from_ints(PROMPT), 4, settings).result().sequences
        data = [rl_datum(PROMPT, each, 1.0 - 2 * (i % 2)) for i, each in enumerate(sequences)]
        for loss in ("importance_sampling", "ppo"):
            found = training.forward_backward(data, loss).result().loss_fn_outputs
            for output, sequence in zip(found, sequences, strict=True):
                assert output["logprobs"].tolist()[len(PROMPT) - 1 :] == sequence.logprobs
        training.optim_step(types.AdamParams(learning_rate=1e-2)).result()


def test_a_custom_loss_is_computed_by_the_client(service):
    training = service.create_lora_training_client(base_model="tiny", rank=4, seed=3).result()

    def loss(data, logprobs):
        return -sum(each.sum() for each in logprobs), {"tokens": float(sum(len(each) for each in logprobs))}

    assert training.forward_backward_custom(sft_data(), loss).result().metrics["tokens"] == 9
    assert training.optim_step(types.AdamParams()).result().metrics


def test_states_are_saved_and_loaded(service, url, policy):
    training = service.create_lora_training_client(base_model="tiny", rank=4, seed=3).result()
    training.forward_backward(sft_data(), "cross_entropy").result()
    training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    state = training.save_state("one").result().path
    named = training.save_weights_for_sampler("one").result().path
    expected = training.forward(sft_data(), "cross_entropy").result().metrics["loss:sum"]
    training.forward_backward(sft_data(), "cross_entropy").result()
    training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    assert training.forward(sft_data(), "cross_entropy").result().metrics["loss:sum"] != expected
    training.load_state(state).result()
    assert training.forward(sft_data(), "cross_entropy").result().metrics["loss:sum"] == expected
    with tinker.ServiceClient() as other:
        again = other.create_training_client_from_state_with_optimizer(state).result()
        assert again.forward(sft_data(), "cross_entropy").result().metrics["loss:sum"] == expected
    sampler = service.create_sampling_client(model_path=named).result()
    settings = types.SamplingParams(max_tokens=5, temperature=0.0)
    [sequence] = sampler.sample(types.ModelInput.from_ints(PROMPT), 1, settings).result().sequences
    params = SamplingParams(max_tokens=5, temperature=0.0)
    output = own_output(policy, PROMPT, params, named)
    assert sequence.tokens == output.outputs[0].token_ids
    rest = service.create_rest_client()
    assert rest.get_weights_info_by_tinker_path(state).result().lora_rank == 4
    run_id = types.ParsedCheckpointTinkerPath.from_tinker_path(state).training_run_id
    assert {each.tinker_path for each in rest.list_checkpoints(run_id).result().checkpoints} == {state, named}
    rest.delete_checkpoint_from_tinker_path(state).result()
    assert [each.tinker_path for each in rest.list_checkpoints(run_id).result().checkpoints] == [named]
