"""Questions of reasoning-gym: "reasoning_gym:spell_backward", or any other of its datasets.

    make_env("reasoning_gym:countdown", min_numbers=3, system_prompt="default")

One question, one answer, and the dataset's own score of it. A name, its configuration and the episode's seed determine
the question: item `seed % size` of the dataset.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

from envs_adapters.base import Action, Messages, Observation, load
from envs_adapters.generators import OwnGenerators
from envs_adapters.rows import check_function
from rollout_engine.base.errors import ConfigError, StepDeadlineError, refused, unknown_name

TRAITS: dict[str, Any] = {"is_single_turn": True}

_SIZE = 10_000
"""Items if `size` is not given: some datasets make all of them at once."""
_DRAW_GLOBALLY = frozenset({"list_functions", "pool_matrix"})
"""Datasets that draw from, or seed, the global random generators."""
_ORDER_BY_HASH = frozenset({"isomorphic_strings", "polynomial_multiplication", "ransom_note"})
"""Datasets whose items depend on the order of sets of texts, so on the seed of `hash`, which worker processes share."""


def make(
    name: str,
    *,
    size: int = _SIZE,
    seed: int = 0,
    system_prompt: str | None = None,
    extract: Callable[[str], str | None] | str | None = None,
    question: Callable[[Mapping[str, Any]], Messages] | str | None = None,
    **config: Any,
) -> "ReasoningGymEnv":
    """One question.

    Args:
        size, seed: of the dataset; another seed has other questions.
        system_prompt: one of reasoning-gym's ("default", "simple", "direct", "DeepSeekZero", "chain_of_draft"), or a
            text.
        extract: finds the answer in the policy's text; a function, or "module:function". None: the content of the
            last <answer> tag if `system_prompt` is one of reasoning-gym's, which ask for it, else all of it without
            surrounding space. The score of no answer is the dataset's own.
        question: the messages of an item, from its dict with "question", "answer" and "metadata"; a function, or
            "module:function". None: the question as the user's message.
        config: of the dataset, for example max_word_len=5; of "composite" datasets=[{"name": ..., "weight": 1,
            "config": {}}, ...].
    """
    source = _source(name, size, seed, json.dumps(config, sort_keys=True))
    return ReasoningGymEnv(source, system_prompt, extract, question)


def check(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Raise `ConfigError` unless the dataset exists, takes the configuration, and scores its first item.

    Datasets whose items depend on more than their seed run in processes, which fix that too.
    """
    own = ("size", "seed", "system_prompt", "extract", "question")
    config = {option: value for option, value in options.items() if option not in own}
    for option, least in (("size", 1), ("seed", 0)):
        value = options.get(option, least)
        if type(value) is not int or value < least:
            raise ConfigError(refused(option, value, f"an int of at least {least}"))
    for option in ("extract", "question"):
        if options.get(option) is not None:
            check_function(option, options[option])
    used = _check_config(name, config, own)
    try:
        env = make(name, **options)
        env.reset(0)
        env.score_own_answer()
    except Exception as problem:
        text = f"reasoning_gym:{name} refuses {dict(options)}: {type(problem).__name__}: {problem}"
        raise ConfigError(text) from problem
    return {"placement": "processes"} if used & (_DRAW_GLOBALLY | _ORDER_BY_HASH) else {}


class ReasoningGymEnv:
    """An episode of one question.

    The `info` of its end has "entry", the item, and "answer", the scored text. An answer that the dataset's scorer
    cannot read, so that it raises, has the score of no answer; "problem" is the reason.
    """

    def __init__(
        self,
        source: "_Source",
        system_prompt: str | None,
        extract: Callable[[str], str | None] | str | None,
        question: Callable[[Mapping[str, Any]], Messages] | str | None,
    ) -> None:
        from reasoning_gym.utils import SYSTEM_PROMPTS, extract_answer

        self._source, self._dataset = source, source.dataset
        self._system_prompt = SYSTEM_PROMPTS.get(system_prompt, system_prompt)
        plain = extract_answer if system_prompt in SYSTEM_PROMPTS else str.strip
        self._extract: Callable[[str], str | None] = plain if extract is None else load(extract)
        self._question = None if question is None else load(question)
        self._entry: dict[str, Any] = {}

    def reset(self, seed: int) -> Messages:
        """Ask the question."""
        self._entry = self._source.item(seed % len(self._dataset))
        asked: Messages = self._entry["question"] if self._question is None else self._question(self._entry)
        if self._system_prompt is None:
            return asked
        said = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
        return [{"role": "system", "content": self._system_prompt}, *said]

    def step(self, action: Action) -> Observation:
        """Score the answer."""
        answer = self._extract(action.text)
        info = {"entry": self._entry, "answer": answer}
        try:
            score = self._dataset.score_answer(answer, self._entry)
        except StepDeadlineError:
            raise
        except Exception as problem:
            info["problem"] = f"{type(problem).__name__}: {problem}"
            score = self._dataset.score_answer(None, self._entry)
        return Observation(reward=float(score), terminated=True, info=info)

    def score_own_answer(self) -> float:
        """The score of the item's own answer, or of no answer if it has none."""
        return float(self._dataset.score_answer(self._entry["answer"], self._entry))


def _check_config(name: str, config: Mapping[str, Any], others: tuple[str, ...] = ("size", "seed")) -> set[str]:
    """Raise `ConfigError` unless a dataset has this name and these options. Returns the datasets that it consists of.

    `others`: options that are not the dataset's own.
    """
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise ConfigError(unknown_name("dataset of reasoning_gym", name, DATASETS))
    known = {*DATASETS[name][1].__dataclass_fields__, *others}
    for option in config:
        if option not in known:
            raise ConfigError(f"reasoning_gym:{name}: {unknown_name('option', option, known)}")
    if name != "composite":
        return {name}
    parts, form = config.get("datasets"), 'a list of {"name": ..., "weight": 1, "config": {}}'
    if not isinstance(parts, list | tuple) or not parts:
        raise ConfigError(refused("datasets", parts, form))
    used: set[str] = set()
    for part in parts:
        if not isinstance(part, Mapping) or "name" not in part or part.keys() - {"name", "weight", "config"}:
            raise ConfigError(refused("datasets", part, form))
        if part["name"] == "composite":
            raise ConfigError(refused("datasets", part, "datasets that are no composites themselves"))
        used |= _check_config(part["name"], part.get("config", {}))
    return used


class _Source(NamedTuple):
    dataset: Any
    draws_globally: bool

    def item(self, index: int) -> dict[str, Any]:
        """An item, determined by dataset and index alone; the global random generators are left as they are."""
        with OwnGenerators(self.dataset.seed + index) if self.draws_globally else nullcontext():
            return dict(self.dataset[index])


@lru_cache(maxsize=32)
def _source(name: str, size: int, seed: int, config: str) -> _Source:
    import reasoning_gym
    from reasoning_gym.composite import DatasetSpec

    options = json.loads(config)
    used = {name}
    if name == "composite":
        used = {part["name"] for part in options["datasets"]}
        options["datasets"] = [DatasetSpec(**{"weight": 1, "config": {}, **part}) for part in options["datasets"]]
    return _Source(reasoning_gym.create_dataset(name, size=size, seed=seed, **options), bool(used & _DRAW_GLOBALLY))
