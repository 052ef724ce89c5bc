"""Teachers: models that score the tokens of a policy's rollouts, for distillation and for KL penalties.

    big = Teacher("path/to/larger", name="big")
    batch = policy.rollout(prompts, params, num_samples=8, teachers=[big, Teacher(policy, name="reference")])
    advantage = advantages.reverse_kl(
        batch["log_probs", "full"], batch["teacher", "big", "log_probs"], batch["masks", "all_assistant_mask"]
    )

`rollout_engine.batches.rollout_batch` lists the columns that they add.
"""

import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self

import msgspec
import numpy as np
from tensordict import TensorDict, TensorDictBase

from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import ConfigError, RequestError, RolloutEngineError, TeacherError
from rollout_engine.base.lora_request import LoRALike, as_lora_request
from rollout_engine.base.provenance import rollout_note
from rollout_engine.base.sampling_params import MAX_PROMPT_LOGPROBS, SamplingParams
from rollout_engine.base.token_scores import TokenScores
from rollout_engine.batches.layout import FILL_OF_TEACHER, TEACHER
from rollout_engine.faces.frontend import Frontend
from rollout_engine.faces.llm_engine import LLMEngine
from rollout_engine.faces.verb_methods import Face
from rollout_engine.rollouts.groups import AnyGroup
from rollout_engine.rollouts.plan import GroupTask
from rollout_engine.rollouts.run import Group
from rollout_engine.rollouts.scored_batch import ScoredBatch
from rollout_engine.rollouts.teacher_engines import LaggedEngine, TeacherEngine, TeacherSource
from rollout_engine.rollouts.teacher_prompts import check_room, make_prompt
from rollout_engine.rollouts.teacher_servers import TeacherServer
from rollout_engine.text.conversations import CHAT_KEYS

logger = logging.getLogger("rollout_engine")

TopK = int | Literal["student"] | None
TeacherPrompt = str | Callable[..., Any]
OnFailure = Literal["raise", "nan"]
_SERVERS = ("http://", "https://")
_ADDRESS = re.compile(r"[\w.-]+:\d+(/.*)?")
"""HOST:PORT without http://."""


class Teacher:
    """A model that scores the tokens of a policy's rollouts: `policy.rollout(..., teachers=[teacher])`."""

    def __init__(
        self,
        source: str | os.PathLike[str] | Face,
        *,
        name: str = "teacher",
        prompt: TeacherPrompt | None = None,
        lora: LoRALike | None = None,
        temperature: float | None = None,
        on_failure: OnFailure = "raise",
        timeout: float | None = None,
        api_key: str | None = None,
        same_tokenizer: bool = False,
        **engine_kwargs: Any,
    ) -> None:
        """Make a teacher; of a path it starts an engine in this process, which `shutdown` ends.

        Args:
            source: a checkpoint directory or hub id, for a new engine with `engine_kwargs` (`EngineConfig`); an engine
                or policy that runs, such as the rollout's own; or the URL of a server (`rollout-engine serve`, or
                vLLM), "http://HOST:PORT".
            name: part of its columns, ("teacher", NAME, ...): letters, digits and underscores.
            prompt: another prompt, that the teacher alone sees (privileged information): a function of the rollout's
                prompt and of those columns that it names (or all, with `**kwargs`), which returns a prompt of
                any kind; or the name of the column that holds it. The sampled tokens are then scored behind that
                prompt. None: the rollout's own.
            lora: the adapter that scores, if the source is an engine; its name, or a model's, if it is a server. None:
                the base model alone, so a policy that trains an adapter is its own reference.
            temperature: of its log-probs; None: that of the rollout's.
            on_failure: if it dies, does not answer, or does not take the samples: "raise" a `TeacherError` in
                place of the rollout; or return the rollout with NaN in its columns ("nan"), and log a warning.
            timeout: seconds that a score may take; None: no limit of an engine, ten minutes for a request to a server.
            api_key: of a server.
            same_tokenizer: do not compare the tokenizer of a server with the policy's: they are the same.
        """
        self.name, self.temperature = _checked_name(name), _checked_temperature(temperature)
        self.prompt, self.on_failure = prompt, on_failure
        if prompt is not None and not (isinstance(prompt, str) or callable(prompt)):
            raise ConfigError(f"Teacher(prompt={prompt!r:.80}): must be a function, or the name of a column.")
        if on_failure not in ("raise", "nan"):
            raise ConfigError(f"Teacher(on_failure={on_failure!r:.80}): must be 'raise' or 'nan'.")
        is_path = isinstance(source, str | os.PathLike)
        is_server = isinstance(source, str) and source.startswith(_SERVERS)
        if engine_kwargs and (is_server or not is_path):
            kind = "a server" if is_server else "an engine that runs"
            raise ConfigError(f"Teacher: {sorted(engine_kwargs)[0]}= is an option of a new engine; this is {kind}.")
        self.source: TeacherSource = self._find(source, lora, timeout, api_key, same_tokenizer, engine_kwargs)

    @staticmethod
    def _find(
        source: Any,
        lora: LoRALike | None,
        timeout: float | None,
        api_key: str | None,
        same_tokenizer: bool,
        engine_kwargs: dict[str, Any],
    ) -> TeacherSource:
        if isinstance(source, str) and source.startswith(_SERVERS):
            model = None if lora is None else as_lora_request(lora).name
            return TeacherServer(source, api_key=api_key, model=model, timeout=timeout, same_tokenizer=same_tokenizer)
        if api_key is not None or same_tokenizer:
            raise ConfigError("Teacher: api_key= and same_tokenizer= are options of a server, http://HOST:PORT.")
        if isinstance(source, str) and _ADDRESS.fullmatch(source) and not os.path.exists(source):
            raise ConfigError(f"Teacher({source!r}) looks like a server's address: give Teacher('http://{source}').")
        if isinstance(source, str | os.PathLike):
            config = EngineConfig(model=source, **engine_kwargs)  # type: ignore[arg-type]  # it converts paths
            return TeacherEngine(LLMEngine.from_config(config), lora, timeout=timeout, is_owned=True)
        if isinstance(source, Face):
            return TeacherEngine(source, lora, timeout=timeout)
        raise ConfigError(f"Teacher({source!r:.80}): must be a path, a running engine or policy, or http://HOST:PORT.")

    @classmethod
    def lagged(
        cls,
        policy: Face,
        *,
        every: int = 10,
        name: str = "lagged",
        prompt: TeacherPrompt | None = None,
        temperature: float | None = None,
        on_failure: OnFailure = "raise",
        **engine_kwargs: Any,
    ) -> Self:
        """A copy of a policy that lags behind it: an engine with its weights as they were up to `every` updates ago.

        It begins with the live ones. A rollout that finds it `every` or more versions behind takes the live ones first.
        The policy is in this process; `engine_kwargs` change its `EngineConfig` for the copy. Adapters are not copied.
        """
        if not isinstance(policy, Face):
            hint = "a policy or engine of this process. Teacher(source) takes paths and servers."
            raise ConfigError(f"Teacher.lagged({policy!r:.80}): must be {hint}")
        if type(every) is not int or every < 1:
            raise ConfigError(f"Teacher.lagged(every={every!r:.80}): must be an int of at least 1.")
        teacher = cls(policy, name=name, prompt=prompt, temperature=temperature, on_failure=on_failure)
        teacher.source = LaggedEngine(policy, every, engine_kwargs)
        return teacher

    def __repr__(self) -> str:
        return f"Teacher(name={self.name!r})"

    def shutdown(self) -> None:
        """End the engine that was started for it. Calling it again is a no-op."""
        self.source.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


class TeacherColumns(NamedTuple):
    """The teachers of a rollout, and the columns that they add."""

    frontend: Frontend
    teachers: Sequence[Teacher]
    top_k: TopK
    chat: Mapping[str, Any]
    """Options of the chat template, for prompts that a teacher alone sees."""
    prompt_ids: dict[tuple[str, int], list[int]]
    """(name of a teacher, index of a prompt) -> ids of the prompt that the teacher sees in its place, until it has."""

    @classmethod
    def of(cls, frontend: Frontend, teachers: Any, top_k: Any, options: Mapping[str, Any]) -> "TeacherColumns | None":
        """Check the arguments `teachers` and `teacher_top_k` of a rollout; None: there are no teachers."""
        listed = [teachers] if isinstance(teachers, Teacher) else list(teachers or ())
        for index, teacher in enumerate(listed):
            if not isinstance(teacher, Teacher):
                hint = "Teacher(path), Teacher(policy) and Teacher(url) make one."
                raise RequestError.for_field(f"teachers[{index}]", teacher, "a Teacher", hint)
        names = [teacher.name for teacher in listed]
        if len(set(names)) < len(names):
            raise RequestError.for_field("teachers", names, "teachers of different names", "Give Teacher(name=...).")
        if top_k is not None and not listed:
            raise RequestError.for_field("teacher_top_k", top_k, "absent without teachers")
        is_count = type(top_k) is int and 1 <= top_k <= MAX_PROMPT_LOGPROBS
        if not (top_k is None or top_k == "student" or is_count):
            bound = f"None, 'student' or an int in [1, {MAX_PROMPT_LOGPROBS}]"
            raise RequestError.for_field("teacher_top_k", top_k, bound)
        chat = {name: value for name, value in options.items() if name in CHAT_KEYS}
        return cls(frontend, listed, top_k, chat, {}) if listed else None

    def check(self, params: Sequence[SamplingParams], columns: Mapping[str, Any] | None) -> None:
        """Raise before anything is sampled if a teacher does not fit the rollout.

        `columns`: by name, those of prompts, None if they are not known yet. `ConfigError` for another tokenizer,
        `RequestError` for sampling parameters and columns, and the error of a teacher that cannot be asked.
        """
        if any(each.logprobs_mode == "processed" for each in params):
            why = (
                "A teacher's log-probs are of the whole vocabulary, and 'processed' ones of the tokens that were left."
            )
            hint = f"{why} Keep the default, under which return_support works too."
            raise RequestError.for_field("logprobs_mode", "processed", "'tempered' or 'raw' with teachers", hint)
        is_mixed = len({each.temperature if each.logprobs_mode == "tempered" else 1.0 for each in params}) > 1
        for teacher in self.teachers:
            if is_mixed and teacher.temperature is None:
                hint = "Give Teacher(temperature=...): the rollout's log-probs are not all of one temperature."
                raise RequestError.for_field(f"temperature of teacher '{teacher.name}'", None, "a number", hint)
            if isinstance(teacher.prompt, str) and columns is not None and teacher.prompt not in columns:
                known = f"one of the columns {sorted(columns)}"
                raise RequestError.for_field(f"prompt of teacher '{teacher.name}'", teacher.prompt, known)
            try:
                teacher.source.check(self.frontend)
                self._check_vocabulary(teacher)
            except ConfigError as problem:
                raise ConfigError(f"Teacher '{teacher.name}': {problem}") from None
            except RequestError as problem:
                raise _refusal(teacher, problem) from problem
            except RolloutEngineError as problem:
                if teacher.on_failure == "raise":
                    raise _failure(teacher, problem) from problem
        if self.top_k == "student":
            widths = {each.logprobs for each in params}
            if len(widths) > 1 or not all(width and width > 0 for width in widths):
                bound = "the same k of at least 1 for all prompts, with teacher_top_k='student'"
                hint = "Give SamplingParams(logprobs=k)."
                raise RequestError.for_field("logprobs", sorted(map(str, widths)), bound, hint)

    def _check_vocabulary(self, teacher: Teacher) -> None:
        """Raise `RequestError` if top k tokens may be outside the vocabulary of the policy, or of the teacher."""
        own, info = self.frontend.client.info.vocab_size, teacher.source.info
        if info is None or self.top_k is None or info.vocab_size == own:
            return
        if self.top_k == "student" and info.vocab_size < own:
            bound = f"None or an int: it has {info.vocab_size} ids, the policy {own}"
            raise RequestError.for_field("teacher_top_k", self.top_k, bound)
        if self.top_k != "student" and info.vocab_size > own:
            bound = f"None or 'student': its {info.vocab_size} ids are more than the policy's {own}"
            raise RequestError.for_field("teacher_top_k", self.top_k, bound)

    def prepare_prompts(self, tasks: Sequence[GroupTask]) -> None:
        """Make the prompts that teachers see in place of those of `tasks`. Raises `RequestError` for wrong ones.

        A wrong one is also one that leaves less room than `max_tokens`, unless the teacher may fail.
        """
        for teacher in self.teachers:
            if teacher.prompt is not None:
                for task in tasks:
                    made = self._make_prompt(teacher, task)
                    if teacher.on_failure == "raise":
                        check_room(teacher.name, teacher.source.info, task, len(made))

    def refuse_prompts(self, reason: str) -> None:
        """Raise `RequestError` if a teacher is to see a prompt of its own."""
        for teacher in self.teachers:
            if teacher.prompt is not None:
                raise RequestError.for_field(f"prompt of teacher '{teacher.name}'", teacher.prompt, "None", reason)

    def add_to(self, batch: TensorDictBase, groups: Sequence[AnyGroup]) -> None:
        """Score a rollout, made of these groups in order, and add the columns of all teachers."""
        scored = ScoredBatch(batch)
        note = rollout_note(batch["tokens", "full"])
        own = (note.temperature if note is not None else None) or 1.0
        student_ids = batch["top_k", "ids"] if self.top_k == "student" else None
        candidates = None if student_ids is None else scored.take(student_ids).numpy()
        for teacher in self.teachers:
            prompts = self._prompts(teacher, scored, groups, batch["num_prompt_tokens"].tolist())
            found = self._score(teacher, scored, prompts, candidates, own)
            for part, values in _columns(found, candidates).items():
                batch[TEACHER, teacher.name, part] = scored.spread(values, FILL_OF_TEACHER[part])

    def _score(
        self,
        teacher: Teacher,
        scored: ScoredBatch,
        prompts: Sequence[list[int]] | None,
        candidates: np.ndarray | None,
        temperature: float,
    ) -> TokenScores:
        """The teacher's scores; of one that failed and may, NaN."""
        top_k = self.top_k if type(self.top_k) is int else 0
        asked = None if candidates is None else np.where(candidates < 0, 0, candidates)  # padding, replaced below
        temperature = temperature if teacher.temperature is None else teacher.temperature
        try:
            found = teacher.source.score(scored, prompts, asked, top_k, temperature)
            own = self.frontend.client.info.vocab_size
            if found.top_ids is not None and (found.top_ids >= own).any():
                raise TeacherError(f"a most likely token, {found.top_ids.max()}, is outside the policy's {own} ids.")
        except RolloutEngineError as problem:  # also of rows that it does not take: they have been sampled
            if teacher.on_failure == "raise":
                raise _failure(teacher, problem) from problem
            logger.warning("Teacher '%s' failed, and its columns are NaN: %s", teacher.name, problem)
            return _no_scores(scored, candidates, top_k)
        if candidates is None or found.candidates is None:
            return found
        values = np.where(candidates < 0, np.float32(-np.inf), found.candidates)
        return msgspec.structs.replace(found, candidates=values)

    def _prompts(
        self, teacher: Teacher, scored: ScoredBatch, groups: Sequence[AnyGroup], num_prompt: Sequence[int]
    ) -> list[list[int]] | None:
        """Ids of the prompts that the teacher alone sees, for each row to score; None: it sees the rows' own.

        `num_prompt`: tokens of the rows' own prompts. Those that stand behind them, before the first sampled one, stay.
        """
        if teacher.prompt is None:
            return None
        if scored.pictures is not None and any(scored.pictures):
            hint = "Its prompts are texts, conversations without pictures, or ids."
            raise RequestError.for_field(f"prompt of teacher '{teacher.name}'", "given", "None with pictures", hint)
        tasks = [group.task for group in groups if isinstance(group, Group)]
        for task in tasks:
            if (teacher.name, task.index) not in self.prompt_ids:
                self._make_prompt(teacher, task)
        of_groups = [self.prompt_ids.pop((teacher.name, group.index)) for group in groups]
        by_row = [ids for ids, group in zip(of_groups, groups, strict=True) for _ in group.samples]
        return [by_row[row.index] + row.prompt[num_prompt[row.index] :] for row in scored.rows]

    def _make_prompt(self, teacher: Teacher, task: GroupTask) -> list[int]:
        made = make_prompt(self.frontend.inputs, teacher.name, teacher.prompt, task, self.chat)
        self.prompt_ids[teacher.name, task.index] = made
        return made


def with_teachers(teachers: TeacherColumns | None, batch: TensorDict, groups: Sequence[AnyGroup]) -> TensorDict:
    """The batch of these groups, with the teachers' columns if there are teachers."""
    if teachers is not None:
        teachers.add_to(batch, groups)
    return batch


def _columns(found: TokenScores, candidates: np.ndarray | None) -> dict[str, np.ndarray]:
    """The columns of one teacher, end to end."""
    columns = {"log_probs": found.logprobs}
    if candidates is not None and found.candidates is not None:
        columns |= {"top_ids": candidates.astype(np.int64), "top_log_probs": found.candidates}
    elif found.top_ids is not None and found.top_logprobs is not None:
        columns |= {"top_ids": found.top_ids.astype(np.int64), "top_log_probs": found.top_logprobs}
    return columns


def _no_scores(scored: ScoredBatch, candidates: np.ndarray | None, top_k: int) -> TokenScores:
    num = sum(len(row.completion) for row in scored.rows)
    nan = np.full((num, top_k), np.nan, np.float32)
    return TokenScores(
        np.full(num, np.nan, np.float32),
        None if candidates is None else np.full(candidates.shape, np.nan, np.float32),
        np.full((num, top_k), -1, np.int32) if top_k else None,
        nan if top_k else None,
    )


def _refusal(teacher: Teacher, problem: RequestError) -> RequestError:
    """The error of a rollout that does not fit a teacher."""
    return RequestError(f"Teacher '{teacher.name}': {problem}", field="teachers", value=teacher.name)


def _failure(teacher: Teacher, problem: RolloutEngineError) -> TeacherError:
    """The error of a rollout whose teacher failed."""
    advice = "Teacher(on_failure='nan') returns such rollouts, with NaN in its columns"
    behind = "" if teacher.prompt is None else " behind the prompt that it alone sees"
    return TeacherError(f"Teacher '{teacher.name}' failed{behind}: {problem} ({advice}.)")


def _checked_name(name: Any) -> str:
    if not isinstance(name, str) or not name.isidentifier() or len(name) > 64:
        raise ConfigError(f"Teacher(name={name!r:.80}): must be a name of letters, digits and underscores, 64 at most.")
    return name


def _checked_temperature(value: Any) -> float | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < np.inf):
        raise ConfigError(f"Teacher(temperature={value!r:.80}): must be a finite number above 0, or None.")
    return value
