"""Teachers score the rollouts of a policy: their columns, refusals, and the end of a dead one."""

import asyncio
import shutil

import pytest
import torch
from transformers import AutoTokenizer

from envs_adapters import Observation
from rollout_engine import LLM, AsyncLLM, RolloutPolicy, SamplingParams, Teacher
from rollout_engine.base.errors import ConfigError, LifecycleError, RequestError, TeacherError
from rollout_engine.batches.layout import full_places
from rollout_engine.testing import random_adapter, tiny_checkpoint, tiny_model

PROMPTS = ["a prompt", "b"]
PARAMS = SamplingParams(max_tokens=8, temperature=0.7, ignore_eos=True, logprobs=0)
SIZES = dict(num_kv_blocks=128, max_model_len=128, log_stats=False)
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("student"))


@pytest.fixture(scope="module")
def larger(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("teacher"), seed=7)


@pytest.fixture(scope="module")
def policy(checkpoint):
    with RolloutPolicy.from_pretrained(checkpoint, **SIZES) as made:
        yield made


@pytest.fixture(scope="module")
def big(larger):
    with Teacher(larger, name="big", **SIZES) as made:
        yield made


@pytest.fixture(scope="module")
def scorer(larger):
    with RolloutPolicy.from_pretrained(larger, **SIZES) as made:
        yield made


def rollout(policy, teachers, params=PARAMS, **options):
    given = dict(num_samples=2, seed=1, use_tqdm=False) | options
    return policy.rollout(PROMPTS, params, teachers=teachers, **given)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_teacher_scores_the_sampled_tokens_at_their_temperature(policy, big, scorer, layout):
    batch = rollout(policy, [big, Teacher(policy, name="own")], layout=layout)
    assert torch.equal(batch["teacher", "big", "log_probs"], scorer.score(batch, 0.7))
    assert torch.equal(batch["teacher", "own", "log_probs"], batch["log_probs", "full"])
    assert set(batch["teacher"].keys()) == {"big", "own"} and set(batch["teacher", "big"].keys()) == {"log_probs"}
    plain = policy.rollout(PROMPTS, PARAMS, num_samples=2, seed=1, use_tqdm=False, layout=layout)
    assert "teacher" not in plain.keys() and torch.equal(plain["tokens", "full"], batch["tokens", "full"])


def test_a_teacher_may_have_a_temperature_of_its_own(policy, scorer):
    batch = rollout(policy, Teacher(scorer, temperature=1.0))
    assert torch.equal(batch["teacher", "teacher", "log_probs"], scorer.score(batch, 1.0))


def test_the_teachers_most_likely_tokens(policy, big, scorer):
    batch = rollout(policy, [big], teacher_top_k=3)
    ids, values = (batch["teacher", "big", part] for part in ("top_ids", "top_log_probs"))
    sampled = batch["masks", "all_assistant_mask"]
    assert ids.shape == values.shape == (*sampled.shape, 3) and ids.dtype == torch.int64
    assert (ids[~sampled] == -1).all() and (values[~sampled] == -torch.inf).all()
    assert torch.equal(scorer.score(batch, 0.7, candidate_ids=ids)[sampled], values[sampled])
    assert (values[sampled].diff(dim=-1) <= 0).all()
    assert (batch["teacher", "big", "log_probs"][sampled] <= values[sampled][:, 0]).all()


def test_the_teacher_scores_the_students_most_likely_tokens(policy, big, scorer):
    batch = rollout(policy, [big], PARAMS.clone(logprobs=4), teacher_top_k="student")
    ids, values = (batch["teacher", "big", part] for part in ("top_ids", "top_log_probs"))
    sampled = batch["masks", "all_assistant_mask"]
    assert torch.equal(ids, batch["top_k", "ids"]) and ids.shape[-1] == 4
    assert torch.equal(scorer.score(batch, 0.7, candidate_ids=ids)[sampled], values[sampled])
    assert (values[~sampled] == -torch.inf).all()
    with pytest.raises(
        RequestError, match=r"logprobs=.* must be the same k of at least 1.*SamplingParams\(logprobs=k\)"
    ):
        rollout(policy, [big], teacher_top_k="student")


def test_a_teacher_sees_a_prompt_of_its_own(policy, big, scorer):
    def with_answer(prompt, hint):
        return f"{hint}: {prompt}"

    teachers = [Teacher(policy, name="told", prompt=with_answer), Teacher(policy, name="column", prompt="hint")]
    batch = rollout(policy, teachers, columns={"hint": ["left", "right"]})
    told = batch["teacher", "told", "log_probs"]
    texts = [["left: a prompt", "left: a prompt", "right: b", "right: b"], ["left", "left", "right", "right"]]
    for name, prompts in zip(("told", "column"), texts, strict=True):
        ids = [policy.tokenizer.encode(text) for text in prompts]
        completions = [
            batch["tokens", "full"][place][first:].tolist()
            for place, first in zip(full_places(batch), batch["num_prompt_tokens"].tolist(), strict=True)
        ]
        expected = policy.engine.score(ids, completions, temperature=0.7)
        found = batch["teacher", name, "log_probs"][batch["masks", "all_assistant_mask"]]
        assert torch.equal(found, torch.cat([torch.tensor(each) for each in expected]))
        assert not torch.equal(batch["teacher", name, "log_probs"], batch["log_probs", "full"])
    both = dict(hint=["left", "right"], answer=[1, 2])
    assert torch.equal(rollout(policy, teachers, columns=both)["teacher", "told", "log_probs"], told)
    with pytest.raises(RequestError, match=r"prompt of teacher 'told'.*columns, \['answer'\]. It needs 'hint'"):
        rollout(policy, teachers[:1], columns={"answer": [1, 2]})
    with pytest.raises(RequestError, match=r"prompt of teacher 'column'='hint' .* one of the columns \[\]"):
        rollout(policy, teachers[1:])
    with pytest.raises(RequestError, match=r"prompt of teacher 'told', for prompts\[0\]"):
        rollout(policy, [Teacher(policy, name="told", prompt=lambda prompt: 5)])


def test_a_policy_that_trains_an_adapter_is_its_own_reference(checkpoint):
    with RolloutPolicy.from_pretrained(checkpoint, max_loras=1, max_lora_rank=8, **SIZES) as policy:
        policy.add_lora(random_adapter(tiny_model(), "a", seed=1))
        batch = rollout(policy, [Teacher(policy, name="base"), Teacher(policy, name="a", lora="a")], lora_request="a")
        assert torch.equal(batch["teacher", "base", "log_probs"], policy.score(batch, 0.7))
        assert torch.equal(batch["teacher", "a", "log_probs"], batch["log_probs", "full"])
        assert not torch.equal(batch["teacher", "base", "log_probs"], batch["log_probs", "full"])


def test_a_lagged_teacher_follows_the_policy_at_a_distance(checkpoint):
    with RolloutPolicy.from_pretrained(checkpoint, **SIZES) as policy, Teacher.lagged(policy, every=2) as lagged:
        model, found, copied = tiny_model(), [], []
        for version in range(5):
            batch = rollout(policy, [lagged])
            own = batch["log_probs", "full"]
            found.append(torch.equal(batch["teacher", "lagged", "log_probs"], own))
            copied.append(lagged.source.copied_version)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.1)
            assert policy.update_weights(model).version == version + 1
        assert copied == [0, 0, 2, 2, 4] and found == [True, False, True, False, True]


def test_groups_of_arollout_and_batches_of_collect_have_the_columns(policy, big, scorer):
    async def groups():
        made = policy.arollout(PROMPTS, PARAMS, num_samples=2, seed=1, teachers=[big], teacher_top_k=1)
        return [group async for group in made]

    whole = rollout(policy, [big], teacher_top_k=1)
    for group in asyncio.run(groups()):
        rows = whole[whole["group_id"] == group["group_id"][0]]
        width = group["tokens", "full"].shape[1]
        for part in ("log_probs", "top_ids", "top_log_probs"):
            assert torch.equal(group["teacher", "big", part], rows["teacher", "big", part][:, :width])
    with policy.collect(PROMPTS, PARAMS, num_samples=2, groups_per_batch=1, seed=1, teachers=[big]) as collector:
        for batch in collector:
            assert torch.equal(batch["teacher", "big", "log_probs"], scorer.score(batch, 0.7))


def test_teachers_score_episodes(policy, big, scorer):
    class Twice:
        def reset(self, seed):
            self.turns = 0
            return "first"

        def step(self, action):
            self.turns += 1
            return Observation("again", reward=1.0, terminated=self.turns == 2)

    policy.tokenizer.chat_template = TEMPLATE
    try:
        options = dict(env=Twice, num_episodes=2, num_samples=2, seed=0, use_tqdm=False)
        params = SamplingParams(max_tokens=6)
        batch = policy.rollout(None, params, teachers=[big], **options)
        assert torch.equal(batch["teacher", "big", "log_probs"], scorer.score(batch))
        assert batch["masks", "turn"].max() == 1
        with pytest.raises(RequestError, match="prompt of teacher 'told'.*None"):
            policy.rollout(None, params, teachers=[Teacher(policy, name="told", prompt=str)], **options)
    finally:
        policy.tokenizer.chat_template = None


def test_a_teacher_with_other_tokens_is_refused_before_anything_is_sampled(policy, larger, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(larger, other)
    tokenizer = AutoTokenizer.from_pretrained(larger)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>"]})
    tokenizer.save_pretrained(other)
    with Teacher(other, name="other", **SIZES) as teacher:
        before = policy.get_metrics()
        with pytest.raises(ConfigError, match=r"Teacher 'other': its tokenizer is not the policy's \(259 tokens here"):
            rollout(policy, [teacher])
        assert policy.get_metrics().core.counters.num_steps == before.core.counters.num_steps


def test_without_a_tokenizer_the_sizes_of_vocabularies_decide(policy, larger):
    with Teacher(larger, skip_tokenizer_init=True, **SIZES) as teacher:
        assert rollout(policy, [teacher])["teacher", "teacher", "log_probs"].any()


def test_most_likely_tokens_are_of_both_vocabularies(policy, checkpoint, tmp_path):
    with RolloutPolicy.from_pretrained(tiny_checkpoint(tmp_path, vocab_size=300), **SIZES) as wide:
        teacher = Teacher(wide, name="wide")
        with pytest.raises(RequestError, match="Teacher 'wide': teacher_top_k=2 .*its 300 ids .* policy's 259"):
            rollout(policy, [teacher], teacher_top_k=2)
        own = rollout(policy, [teacher], PARAMS.clone(logprobs=2), teacher_top_k="student")
        ids, sampled = own["top_k", "ids"], own["masks", "all_assistant_mask"]
        expected = wide.score(own, 0.7, candidate_ids=ids)
        assert torch.equal(own["teacher", "wide", "top_log_probs"][sampled], expected[sampled])
        with pytest.raises(RequestError, match="teacher_top_k='student' .*it has 259 ids, the policy 300"):
            rollout(wide, [Teacher(policy)], PARAMS.clone(logprobs=2), teacher_top_k="student")


def test_a_dead_teacher_ends_the_rollout_or_its_columns_alone(policy, larger, caplog):
    engine = LLM(larger, **SIZES)
    engine.shutdown()
    with pytest.raises(TeacherError, match=r"Teacher 'gone' failed: .*on_failure='nan'"):
        rollout(policy, [Teacher(engine, name="gone")])
    gone = Teacher(engine, name="gone", on_failure="nan")
    batch = rollout(policy, [gone, Teacher(policy, name="own")], PARAMS.clone(logprobs=2), teacher_top_k="student")
    sampled = batch["masks", "all_assistant_mask"]
    assert batch["teacher", "gone", "log_probs"][sampled].isnan().all()
    assert not batch["teacher", "gone", "log_probs"][~sampled].any()
    assert batch["teacher", "gone", "top_log_probs"][sampled].isnan().all()
    assert torch.equal(batch["teacher", "own", "log_probs"], batch["log_probs", "full"])
    assert "Teacher 'gone' failed, and its columns are NaN" in caplog.text
    top = rollout(policy, [gone], teacher_top_k=2)["teacher", "gone", "top_ids"]
    assert (top == -1).all()


def test_rows_that_a_teacher_cannot_take_are_its_failures(policy, larger):
    with LLM(larger, **(SIZES | dict(max_model_len=8))) as engine:
        with pytest.raises(TeacherError, match="Teacher 'short' failed: .*max_model_len=8"):
            rollout(policy, [Teacher(engine, name="short")])
        batch = rollout(policy, [Teacher(engine, name="short", on_failure="nan")])
        assert batch["teacher", "short", "log_probs"][batch["masks", "all_assistant_mask"]].isnan().all()


def test_a_teachers_prompt_that_leaves_no_room_is_refused_before_anything_is_sampled(policy):
    options = dict(name="told", prompt=lambda prompt: "x" * 125)
    before = policy.get_metrics().core.counters.num_steps
    with pytest.raises(RequestError, match=r"prompt of teacher 'told', for prompts\[0\]='125 tokens' .*max_tokens=8"):
        rollout(policy, [Teacher(policy, **options)])
    assert policy.get_metrics().core.counters.num_steps == before
    batch = rollout(policy, [Teacher(policy, on_failure="nan", **options)])
    assert batch["teacher", "told", "log_probs"][batch["masks", "all_assistant_mask"]].isnan().all()
    collector = policy.collect(PROMPTS, PARAMS, groups_per_batch=1, teachers=[Teacher(policy, **options)])
    with collector, pytest.raises(TeacherError, match="'told' failed behind the prompt that it alone sees: "):
        next(collector)


def test_log_probs_of_truncated_logits_are_refused_with_teachers_and_warned_of_in_scores(policy, big, caplog):
    processed = PARAMS.clone(top_p=0.8, logprobs_mode="processed", return_support=True)
    for teacher in (big, Teacher(policy, name="own", temperature=0.7)):
        with pytest.raises(RequestError, match="logprobs_mode='processed' .*whole vocabulary.*return_support"):
            rollout(policy, [teacher], processed)
    with pytest.raises(RequestError, match="logprobs_mode='processed'"):
        policy.collect(PROMPTS, processed, num_samples=2, groups_per_batch=1, teachers=[big])
    tempered = rollout(policy, [Teacher(policy)], processed.clone(logprobs_mode="tempered"))
    assert torch.equal(tempered["teacher", "teacher", "log_probs"], tempered["log_probs", "full"])
    policy.score(tempered, 0.7)
    assert "whole vocabulary" not in caplog.text
    batch = rollout(policy, [], processed)
    for _ in range(2):
        policy.score(batch, 0.7)
    assert caplog.text.count("renormalised over batch['support'], and scores are of the whole vocabulary") == 1


def test_arguments_that_do_not_fit_are_refused(policy, big):
    for teachers, options, words in (
        ([big, Teacher(policy, name="big")], {}, "teachers=.* of different names"),
        (["big"], {}, r"teachers\[0\]='big'.*a Teacher"),
        ([], {"teacher_top_k": 3}, "teacher_top_k=3 .* absent without teachers"),
        ([big], {"teacher_top_k": 0}, "teacher_top_k=0"),
        ([big], {"teacher_top_k": "all"}, "teacher_top_k='all'"),
    ):
        with pytest.raises(RequestError, match=words):
            rollout(policy, teachers, **options)
    assert repr(big) == "Teacher(name='big')"
    mixed = [PARAMS, PARAMS.clone(temperature=1.0)]
    with pytest.raises(RequestError, match="temperature of teacher 'big'=None"):
        rollout(policy, [big], mixed)
    for options, words in (
        (dict(name="no name"), "name='no name'"),
        (dict(temperature=0), "temperature=0"),
        (dict(on_failure="ignore"), "on_failure='ignore'"),
        (dict(prompt=5), "prompt=5"),
        (dict(dtype="float32"), "dtype= is an option of a new engine; this is an engine that runs"),
        (dict(api_key="x"), "api_key= and same_tokenizer= are options of a server"),
    ):
        with pytest.raises(ConfigError, match=words):
            Teacher(policy, **options)
    with pytest.raises(ConfigError, match="must be a path, a running engine or policy, or http"):
        Teacher(5)
    with pytest.raises(ConfigError, match=r"127.0.0.1:8000.*give Teacher\('http://127.0.0.1:8000'\)"):
        Teacher("127.0.0.1:8000")
    for source in ("http://127.0.0.1:8000", "a/path"):
        with pytest.raises(ConfigError, match=r"Teacher.lagged\('.*must be a policy or engine of this process"):
            Teacher.lagged(source)
    with pytest.raises(ConfigError, match="every=0"):
        Teacher.lagged(policy, every=0)


@pytest.mark.slow
def test_a_teacher_in_a_process_of_its_own_dies_with_it(policy, larger, scorer):
    with RolloutPolicy(AsyncLLM(larger, **SIZES)) as far:
        teacher = Teacher(far, name="far")
        batch = rollout(policy, [teacher], teacher_top_k=2)
        assert torch.equal(batch["teacher", "far", "log_probs"], scorer.score(batch, 0.7))
        with pytest.raises(ConfigError, match="Teacher.lagged copies the weights of a policy that is in this process"):
            Teacher.lagged(far)
        far.sleep()
        with pytest.raises(TeacherError, match="Teacher 'far' failed: .*ASLEEP"):
            rollout(policy, [teacher])
        far.wake_up()
    with pytest.raises(TeacherError, match="Teacher 'far' failed"):
        rollout(policy, [teacher])


def test_a_teacher_that_sleeps_is_one_that_fails(policy, larger):
    with LLM(larger, **SIZES) as engine:
        engine.sleep(level=1)
        with pytest.raises(TeacherError) as raised:
            rollout(policy, [Teacher(engine)])
        assert isinstance(raised.value.__cause__, LifecycleError)
