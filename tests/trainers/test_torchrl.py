"""A policy of TorchRL's that generates by our engine, alone and inside TorchRL's own collector, advantages and loss."""

from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("torchrl.modules.llm")

import torch  # noqa: E402
from tensordict import TensorDict  # noqa: E402
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement  # noqa: E402
from torchrl.envs.llm import ChatEnv  # noqa: E402
from torchrl.modules.llm import ChatHistory, LogProbs, Masks, Text, Tokens, TransformersWrapper  # noqa: E402
from torchrl.objectives.llm import GRPOLoss, MCAdvantage  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from envs_adapters.trainers.torchrl import EnginePolicy, EngineWeightSyncScheme, ExactTransformersWrapper  # noqa: E402
from rollout_engine import RolloutPolicy, exact  # noqa: E402
from rollout_engine.base.errors import ConfigError, RequestError  # noqa: E402
from rollout_engine.testing import tiny_checkpoint  # noqa: E402
from tests.trainers.recorder import Recorder  # noqa: E402
from tests.trainers.torchrl_runs import chats, collector_of, ragged, texts, token_rows  # noqa: E402

# TorchRL's own use of what it depends on.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
SHORT = {"max_new_tokens": 6}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(checkpoint):
    with RolloutPolicy.from_pretrained(checkpoint, dtype="float32") as policy:
        yield policy


def actor_of(checkpoint, engine, kind=ExactTransformersWrapper, **options):
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model = exact.enable(model) if kind is ExactTransformersWrapper else model
    return kind(model, tokenizer=engine.tokenizer, input_mode="tokens", generate=False, **options)


def test_it_writes_the_containers_of_torchrls_own_wrappers(engine):
    policy = EnginePolicy(engine, input_mode="text", generate_kwargs=SHORT, seed=1)
    asked = texts("one", "two plus two")
    given = policy(asked)
    assert given is asked and policy.in_keys == [("text", "prompt")]
    kinds = {"text": Text, "tokens": Tokens, "masks": Masks, "log_probs": LogProbs}
    assert {*policy.out_keys} == {*kinds, "versions"}
    assert all(isinstance(given[key], kind) for key, kind in kinds.items())
    for row, prompt in zip(given.unbind(0), ["one", "two plus two"], strict=True):
        start, length = len(engine.tokenizer(prompt)["input_ids"]), len(row["tokens", "response"])
        assert row["tokens", "prompt"].tolist() == engine.tokenizer(prompt)["input_ids"] and 0 < length <= 6
        assert row["tokens", "full"].equal(torch.cat([row["tokens", "prompt"], row["tokens", "response"]]))
        assert row["masks", "all_attention_mask"].tolist() == [True] * (start + length)
        assert row["masks", "all_assistant_mask"].tolist() == [False] * start + [True] * length
        assert row["versions", "full"].tolist() == [-1] * start + [engine.policy_version] * length
        assert row["log_probs", "full"][:start].isnan().all()
        assert row["log_probs", "full"][start:].equal(row["log_probs", "response"])
        assert row["text", "full"] == prompt + row["text", "response"]


def test_histories_are_answered_by_the_chat_template(engine):
    policy = EnginePolicy(engine, generate_kwargs=SHORT, seed=1)
    given = policy(chats("one", "two plus two"))
    assert isinstance(given["history"], ChatHistory)
    for row, question in zip(given.unbind(0), ["one", "two plus two"], strict=True):
        rendered = row["history"].prompt.apply_chat_template(tokenizer=engine.tokenizer, add_generation_prompt=True)
        assert question in rendered and row["text", "prompt"] == rendered
        assert row["tokens", "prompt"].tolist() == engine.tokenizer(rendered, add_special_tokens=False)["input_ids"]
        messages = row["history"].full.unbind(0)
        assert [message.role for message in messages] == ["user", "assistant"]
        assert messages[1].content == row["text", "response"] == row["history"].response[0].content
    named = policy.get_new_version(chat_template="{{ messages[0]['content'] }}")(chats("one"))
    assert list(named["text", "prompt"]) == ["one"]


def test_a_conversation_of_two_turns_goes_on(engine):
    policy = EnginePolicy(engine, generate_kwargs=SHORT, seed=1)
    env = ChatEnv(tokenizer=engine.tokenizer, batch_size=(2,))
    start = env.reset(TensorDict(query=["one", "two plus two"], batch_size=(2,)))
    first, second = env.rollout(2, policy, auto_reset=False, tensordict=start).unbind(1)
    for before, after in zip(first.unbind(0), second.unbind(0), strict=True):
        assert after["history"].prompt.content == before["history"].full.content
        assert after["text", "prompt"].startswith(before["text", "full"])
        assert after["masks", "all_assistant_mask"].sum() == len(after["tokens", "response"])


def test_threads_share_the_engine(engine):
    policy = EnginePolicy(engine, input_mode="text", generate_kwargs=SHORT | {"temperature": 0})

    def answer(prompt):
        return policy(texts(prompt))[0]["tokens", "full"].tolist()

    prompts = [f"prompt {number}" for number in range(6)]
    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(answer, prompts)) == list(map(answer, prompts))


def test_token_prompts_may_be_padded_on_the_left(engine):
    policy = EnginePolicy(engine, input_mode="tokens", generate_kwargs=SHORT | {"temperature": 0}, inplace=False)
    pad = engine.tokenizer.pad_token_id
    given = policy(token_rows([7, 8, 9], [7, 8]))
    padded = token_rows([7, 8, 9], [pad, 7, 8])
    for row in padded.unbind(0):
        row["tokens"].padded = True
    again = policy(padded)
    assert "text" not in given.keys()
    for one, two in zip(ragged(given, "tokens", "full"), ragged(again, "tokens", "full"), strict=True):
        assert one.tolist() == two.tolist()


def test_equal_prompts_are_one_group_and_samples_differ(engine):
    recorder = Recorder(engine)
    policy = EnginePolicy(engine, input_mode="text", generate_kwargs=SHORT, seed=3)
    policy.connection.policy = recorder
    recorder.tokenizer = engine.tokenizer
    given = policy(texts("one", "two", "one", "one"))
    assert [params.n for params in recorder.rollouts[0].params] == [3, 1]
    assert list(given["text", "prompt"]) == ["one", "two", "one", "one"]
    assert len({tuple(ids.tolist()) for ids in ragged(given, "tokens", "response")}) > 2
    many = policy.get_new_version(num_samples=5)(texts("one", "two"))
    assert many.shape == (2, 5) and [params.n for params in recorder.rollouts[1].params] == [5, 5]
    assert list(many[1]["text", "prompt"]) == ["two"] * 5


def test_padded_output_has_one_shape(engine):
    policy = EnginePolicy(engine, input_mode="text", generate_kwargs=SHORT, seed=1)
    loose, padded = policy(texts("one", "two plus two")), policy.get_new_version(pad_output=True)
    given = padded(texts("one", "two plus two"))
    tokens, real = given["tokens", "full"], given["masks", "all_attention_mask"]
    assert tokens.shape == real.shape == given["log_probs", "full"].shape and given["tokens"].padded
    for row, ids in enumerate(ragged(loose, "tokens", "full")):
        assert tokens[row][real[row]].tolist() == ids.tolist()


@pytest.mark.parametrize("inplace", [True, False, "empty"])
def test_where_the_result_goes(engine, inplace):
    policy = EnginePolicy(engine, input_mode="text", generate_kwargs=SHORT, inplace=inplace)
    asked = texts("one", "two")
    asked["other"] = torch.zeros(2)
    given = policy(asked)
    assert (given is asked) == (inplace is True) and ("other" in given.keys()) == (inplace is True)
    assert policy(asked[0])["tokens", "full"].ndim == 1


@pytest.mark.parametrize("kind", [TransformersWrapper, ExactTransformersWrapper])
def test_log_probs_of_the_trained_model_agree(checkpoint, engine, kind):
    policy = EnginePolicy(engine, input_mode="text", generate_kwargs={"max_new_tokens": 12, "temperature": 0.7})
    given = policy(texts("one", "two plus two", "a", "a"))
    ours = actor_of(checkpoint, engine, kind, inplace=False)(given)
    rows = zip(*(ragged(each, "log_probs", "full") for each in (ours, given)), strict=True)
    largest = max((one - two)[two.isfinite()].abs().max().item() for one, two in rows)
    assert largest == 0.0 if kind is ExactTransformersWrapper else 0.0 < largest < 1e-4


@pytest.mark.parametrize("masking", ["sft", "rlhf", "generic"])
def test_a_loss_sees_ratios_of_exactly_one_and_has_the_gradient_of_torchrls_own(checkpoint, engine, masking):
    given = EnginePolicy(engine, input_mode="text", generate_kwargs=SHORT, seed=5)(texts("one", "two plus two", "a"))
    given["advantage"] = torch.tensor([1.0, -0.5, 2.0]).view(3, 1, 1)
    gradients = []
    for kind in (ExactTransformersWrapper, TransformersWrapper):
        actor = actor_of(checkpoint, engine, kind)
        result = GRPOLoss(actor, masking_strategy=masking)(given.clone())
        (result.loss_objective + result.loss_entropy).backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in actor.parameters()]))
        if kind is ExactTransformersWrapper:
            assert (result.ESS.item(), result.kl_approx.item(), result.clip_fraction.item()) == (1.0, 0.0, 0.0)
    assert gradients[0].norm() > 0
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-3, atol=1e-5)


def test_collector_advantages_loss_and_sync_work_together(checkpoint, engine):
    actor = actor_of(checkpoint, engine)
    policy = EnginePolicy(engine, generate_kwargs=SHORT, seed=2)
    collector = collector_of(policy, engine.tokenizer, batches=3, track_policy_version=True)
    sync = EngineWeightSyncScheme(policy)
    sync.init_on_sender(model_id="policy", context=collector, model=actor)
    sync.register_collector(collector)
    sync.connect()
    first = engine.policy_version
    buffer = ReplayBuffer(storage=LazyStackStorage(8), sampler=SamplerWithoutReplacement(), batch_size=8)
    buffer.append_transform(MCAdvantage(grpo_size=4, prompt_key="query"))
    loss, optimizer = GRPOLoss(actor), torch.optim.SGD(actor.parameters(), lr=1e-2)
    for step, data in enumerate(collector):
        buffer.extend(data.reshape(-1))
        batch = buffer.sample()
        versions = {version for row in ragged(batch, "versions", "full") for version in row.tolist() if version >= 0}
        assert versions == {first + step} and batch["next", "policy_version"].unique().tolist() == [step]
        result = loss(batch)
        assert result.kl_approx.item() == 0.0
        result.loss_objective.backward()
        optimizer.step(), optimizer.zero_grad(), buffer.empty()
        sync.send()
    assert (step, engine.policy_version, collector.policy_version) == (2, first + 3, 3)


REFUSED = [
    ({"engine": 3}, ConfigError, "engine=3"),
    ({"input_mode": "chat"}, ConfigError, "input_mode='chat'"),
    ({"inplace": "yes"}, ConfigError, "inplace='yes'"),
    ({"inplace": True, "num_samples": 2}, ConfigError, "inplace=True"),
    ({"input_mode": "tokens", "pad_output": True}, ConfigError, "pad_output"),
    ({"prefer_tokens": True, "pad_output": True}, ConfigError, "pad_output"),
    ({"num_samples": 0}, ConfigError, "num_samples=0"),
    ({"num_samples": 2, "generate_kwargs": {"num_return_sequences": 3}}, ConfigError, "num_return_sequences=3"),
    ({"generate_kwargs": {"num_beams": 4}}, ConfigError, "'num_beams': 4"),
    ({"generate_kwargs": {"seed": 4}}, ConfigError, "seed= to the policy"),
    ({"generate_kwargs": {"max_new_tokns": 4}}, ConfigError, "Did you mean 'max_new_tokens'"),
    ({"generate_kwargs": {"max_tokens": 4, "max_new_tokens": 5}}, ConfigError, "Leave one out"),
    ({"generate_kwargs": {"do_sample": False, "temperature": 1.0}}, ConfigError, "Leave one out"),
    ({"generate_kwargs": {"temperature": -1.0}}, RequestError, "temperature"),
]


@pytest.mark.parametrize(("options", "error", "text"), REFUSED)
def test_options_without_equal_are_refused(engine, options, error, text):
    with pytest.raises(error, match=text):
        EnginePolicy(**({"engine": engine} | options))


def test_calls_that_cannot_be_answered_are_refused(checkpoint, engine):
    policy = EnginePolicy(engine)
    with pytest.raises(ConfigError, match="input has only .*text"):
        policy(texts("one"))
    with pytest.raises(ConfigError, match="TransformersWrapper"):
        policy.get_new_version(generate=False)
    with pytest.raises(ConfigError, match="logits"):
        policy(chats("one"), logits_only=True)
    with pytest.raises(ConfigError, match="num_return_sequences"):
        policy(chats("one"), num_return_sequences=2)
    with pytest.raises(ConfigError, match="EnginePolicy generates"):
        ExactTransformersWrapper(None, generate=True)
    with pytest.raises(ConfigError, match="pad_model_input"):
        ExactTransformersWrapper(None, pad_model_input=False)


def test_another_version_is_warned_about(engine, caplog, monkeypatch):
    EnginePolicy(engine)
    assert not caplog.text
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.15.0")
    EnginePolicy(engine)
    assert "TorchRL 0.15.0 is installed" in caplog.text and "pip install 'torchrl==0.14.*'" in caplog.text
