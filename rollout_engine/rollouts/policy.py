"""The policy as a trainer sees it: it rolls out, scores, and takes new weights."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any, Self, Unpack

from tensordict import TensorDict
from torch import Tensor

from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import ConfigError, RequestError
from rollout_engine.base.lora_request import LoRALike, as_lora_request
from rollout_engine.base.metrics import StatLogger
from rollout_engine.base.outputs import TokenTexts
from rollout_engine.base.provenance import attach
from rollout_engine.base.sampling_params import MAX_N, SamplingLike
from rollout_engine.base.seeds import MAX_SEED
from rollout_engine.base.threads import no_thread, run_in_thread
from rollout_engine.batches.reward_functions import RewardFunctions
from rollout_engine.batches.rollout_batch import Layout
from rollout_engine.faces.async_llm import AsyncLLM
from rollout_engine.faces.llm import LLM
from rollout_engine.faces.llm_engine import LLMEngine
from rollout_engine.faces.replica_methods import ReplicaMethods
from rollout_engine.faces.rollout_service import RolloutService
from rollout_engine.faces.verb_methods import BlockingVerbs, Face
from rollout_engine.rollouts.agents.plan import CollectOptions
from rollout_engine.rollouts.any_run import begin_run, check_for_collect, run_to_end, tell_once
from rollout_engine.rollouts.collector import RolloutCollector, open_collector, staleness_control
from rollout_engine.rollouts.distributions import DistributionMethods
from rollout_engine.rollouts.episodes.kept_workers import KeptWorkers
from rollout_engine.rollouts.episodes.plan import RolloutOptions
from rollout_engine.rollouts.evaluation.evaluator import Evaluator
from rollout_engine.rollouts.evaluation.ledger import Ledger
from rollout_engine.rollouts.evaluation.report import EvalReport
from rollout_engine.rollouts.evaluation.sweep import Sweep, as_sweep
from rollout_engine.rollouts.evaluation.tasks import prepare_tasks
from rollout_engine.rollouts.gateway import GatewayMethods
from rollout_engine.rollouts.groups import GroupBatcher, GroupListeners, OnGroup, log_rollout
from rollout_engine.rollouts.journal.journal import JournalOptions
from rollout_engine.rollouts.log import RolloutLog
from rollout_engine.rollouts.picture_features import PictureFeatureMethods
from rollout_engine.rollouts.plan import Columns, RolloutArguments, as_int
from rollout_engine.rollouts.scores import score_rollout
from rollout_engine.rollouts.teachers import Teacher, TeacherColumns, TopK, with_teachers

_ALONE = (1, "processes", None)
"""`num_replicas`, `placement` and `ray_address` of an engine in this process."""


class RolloutPolicy(GatewayMethods, PictureFeatureMethods, ReplicaMethods, DistributionMethods, BlockingVerbs):
    """A language model that produces rollouts and follows a trainer's weights.

        policy = RolloutPolicy.from_pretrained(path)
        trainer = exact.enable(AutoModelForCausalLM.from_pretrained(path))
        for step in range(100):
            batch = policy.rollout(prompts, SamplingParams(max_tokens=64), num_samples=8, reward_fn=reward)
            advantage = advantages.grpo(batch["next", "reward"], batch["group_id"])
            logprobs = exact.token_logprobs(trainer, batch["tokens", "full"], batch["masks", "all_attention_mask"])
            ratio = (logprobs - batch["log_probs", "full"][:, 1:]).exp()
            loss = -(ratio * advantage)[batch["masks", "all_assistant_mask"][:, 1:]].mean()
            loss.backward(), optimizer.step(), optimizer.zero_grad()
            policy.update_weights(trainer)

    Several rollouts may run at once, from several threads or tasks, concurrently with other requests of the engine.
    """

    def __init__(self, engine: LLMEngine | LLM | AsyncLLM | RolloutService) -> None:
        """A policy over an engine in this process or another; `shutdown` ends the engine too."""
        if not isinstance(engine, Face):
            given = f"the path {str(engine)!r}" if isinstance(engine, str | os.PathLike) else f"{engine!r:.80}"
            raise ConfigError(
                f"RolloutPolicy takes an engine (LLM, LLMEngine, AsyncLLM or RolloutService), not {given}: "
                "RolloutPolicy.from_pretrained(path) makes both."
            )
        self.engine, self.frontend = engine, engine.frontend
        self._batcher = GroupBatcher(self.frontend)
        self._kept_workers = KeptWorkers()

    @classmethod
    def from_pretrained(
        cls,
        model: str | os.PathLike[str],
        *,
        num_replicas: int = 1,
        placement: str = "processes",
        ray_address: str | None = None,
        stat_loggers: Sequence[StatLogger] = (),
        **engine_kwargs: Any,
    ) -> Self:
        """A policy over a new engine for a checkpoint directory or hub id; options as in `EngineConfig`.

        `num_replicas`: with 2 or more, as many engines in own processes; `placement` and `ray_address` as for
        `AsyncLLM`.
        """
        if (num_replicas, placement, ray_address) != _ALONE:
            engine = AsyncLLM(
                model,
                num_replicas=num_replicas,
                placement=placement,
                ray_address=ray_address,
                stat_loggers=stat_loggers,
                **engine_kwargs,
            )
            return cls(engine)
        config = EngineConfig(model=model, **engine_kwargs)  # type: ignore[arg-type]  # it converts paths
        return cls(LLMEngine.from_config(config, stat_loggers=stat_loggers))

    def rollout(
        self,
        prompts: Any,
        sampling_params: SamplingLike | Sequence[SamplingLike] | None = None,
        *,
        num_samples: int | None = None,
        columns: Columns | None = None,
        reward_fn: RewardFunctions | None = None,
        reward_weights: Sequence[float] | None = None,
        seed: int | None = None,
        layout: Layout = "padded",
        oversample: int | None = None,
        session_id: str | Sequence[str | None] | None = None,
        lora_request: LoRALike | None = None,
        policy_version: int | None = None,
        min_policy_version: int | None = None,
        on_group: OnGroup | None = None,
        log_to: str | os.PathLike[str] | None = None,
        teachers: Sequence[Teacher] = (),
        teacher_top_k: TopK = None,
        use_tqdm: bool = True,
        **options: Unpack[RolloutOptions],
    ) -> TensorDict:
        """Sample every prompt and return all sequences, group-major, with the keys of `batches.rollout_batch`.

        Args:
            prompts: one or a list, of any kind that the engine takes: text, token ids, conversations; of agents, tasks.
            num_samples, layout: samples per prompt, in place of `n`; "padded" or "packed". use_tqdm: show progress.
            sampling_params: one for all, or one per prompt; a dict of their fields will do. Log-probs are always on.
            columns: name -> one value per prompt. They reach the result and, repeated per sample, the reward function.
            reward_fn: `reward_fn(prompts, completions, completion_ids, **columns)` gives one number per completion, or
                None; called per group as it finishes, with the arguments that it names (`batches.reward_functions`).
                May be async. Completions are texts, or lists of one message if the prompt was a list of messages. A
                list of functions gives the sum, weighted by `reward_weights` or 1.0, and ("rewards", NAME) for each.
            seed: sample i of prompt p is drawn with sequence seed child_seed(mix(seed, p), i), both functions of
                `rollout_engine.base.seeds`; None leaves seeds to the sampling params and the engine.
            oversample: samples to start per prompt; the first `num_samples` to end are kept: biased to short answers.
            session_id, lora_request, policy_version, min_policy_version: as in `LLM.generate`.
            on_group, log_to: a function of each group's TensorDict once it is complete, and a file of all for `replay`.
            teachers, teacher_top_k: models that score the sampled tokens once all are there, and their k most likely
                tokens or the policy's ("student"): columns `TeacherColumns`. `on_group` and `log_to` get none.
            options: `ChatOptions` of conversations, `EpisodeOptions` of episodes (`rollout(None, params, env=...)`).

        Works inside a running event loop too, and blocks it. Whatever is raised, its requests are aborted first and the
        engine lives on: `RequestError` before anything is sampled, `EngineGenerateError` as soon as one sequence fails,
        `RewardError` naming the prompt. `LifecycleError` while paused or asleep; if another thread pauses later, it
        waits for the resume, or raises `RetryableError` if that (sleep, update) aborts a group: none is cut short.
        """
        given = (prompts, sampling_params, num_samples, columns, reward_fn, reward_weights, seed, layout, oversample)
        self.frontend.require_running("rollout")
        start, listeners = time.perf_counter(), self._listeners(on_group, log_to, lora_request)
        columns_of = TeacherColumns.of(self.frontend, teachers, teacher_top_k, options)
        more = session_id, lora_request, options, columns_of, policy_version, min_policy_version
        arguments = RolloutArguments(*given, *more)
        run = begin_run(arguments, self.frontend, self._kept_workers, self.rollout, gateway=self.gateway)
        groups = run_to_end(run, lambda group: self._batcher.tell(listeners, group, layout), shown=use_tqdm)
        log_rollout(groups, time.perf_counter() - start, self.policy_version)
        self._batcher.count_staleness(groups)
        return with_teachers(columns_of, self._batcher.batch(groups, layout), groups)

    async def arollout(
        self,
        prompts: Any,
        sampling_params: SamplingLike | Sequence[SamplingLike] | None = None,
        *,
        num_samples: int | None = None,
        columns: Columns | None = None,
        reward_fn: RewardFunctions | None = None,
        reward_weights: Sequence[float] | None = None,
        seed: int | None = None,
        layout: Layout = "padded",
        oversample: int | None = None,
        session_id: str | Sequence[str | None] | None = None,
        lora_request: LoRALike | None = None,
        policy_version: int | None = None,
        min_policy_version: int | None = None,
        log_to: str | os.PathLike[str] | None = None,
        teachers: Sequence[Teacher] = (),
        teacher_top_k: TopK = None,
        **options: Unpack[RolloutOptions],
    ) -> AsyncIterator[TensorDict]:
        """Yield the result of `rollout`, one TensorDict per group, in completion order; "group_id" names its prompt.

        The engine steps in a worker thread, so the loop stays free; async rewards run on the caller's loop. Leaving the
        iteration early aborts unfinished groups. Nothing is queued before the first group is asked for. While paused or
        asleep it waits for another task to resume, or is turned away, by `EngineConfig.admission`. A group that an
        abort cuts short is not yielded: `RetryableError` is raised.
        """
        given = (prompts, sampling_params, num_samples, columns, reward_fn, reward_weights, seed, layout, oversample)
        loop = asyncio.get_running_loop()
        step: asyncio.Future[Sequence[Any]] | None = None
        if lora_request is not None:
            await run_in_thread(self.frontend.ensure_loras, lora_request)
        listeners = await run_in_thread(self._listeners, None, log_to, lora_request)
        columns_of = TeacherColumns.of(self.frontend, teachers, teacher_top_k, options)
        more = session_id, lora_request, options, columns_of, policy_version, min_policy_version
        arguments = RolloutArguments(*given, *more)
        run = begin_run(arguments, self.frontend, self._kept_workers, self.arollout, loop, gateway=self.gateway)
        try:
            while run.unfinished:
                self.frontend.require_own_process()  # the loop's threads are not in a forked child
                try:
                    step = loop.run_in_executor(None, run.advance)
                except RuntimeError as problem:
                    raise no_thread("rollout", problem) from problem
                for group in await asyncio.shield(step):
                    if any(listeners):
                        tell = partial(self._batcher.tell, listeners, layout=layout)
                        await run_in_thread(tell_once, run, group, tell)
                    self._batcher.count_staleness([group])
                    batch = self._batcher.batch([group], layout)
                    yield await run_in_thread(with_teachers, columns_of, batch, [group]) if teachers else batch
        finally:
            if step is not None and not step.done():  # cancelled in mid-step: let that step end
                run.stop_waiting()
                await asyncio.wait([step])
                step.exception()
            run.close()

    def collect(
        self,
        dataset: Iterable[Any],
        sampling_params: SamplingLike | None = None,
        *,
        num_samples: int | None = None,
        groups_per_batch: int = 32,
        max_staleness: int | None = 1,
        max_in_flight: int | None = None,
        oversample: int | None = None,
        reward_fn: RewardFunctions | None = None,
        reward_weights: Sequence[float] | None = None,
        seed: int | None = None,
        lora_request: LoRALike | None = None,
        on_group: OnGroup | None = None,
        log_to: str | os.PathLike[str] | None = None,
        teachers: Sequence[Teacher] = (),
        teacher_top_k: TopK = None,
        layout: Layout = "padded",
        journal: str | os.PathLike[str] | JournalOptions | None = None,
        **options: Unpack[CollectOptions],
    ) -> RolloutCollector:
        """Return an iterator over batches of finished groups, which keeps unfinished ones in flight between batches.

            with policy.collect(dataset, params, num_samples=8, reward_fn=reward) as collector:
                for batch in collector:
                    train(batch), policy.update_weights(trainer)

        A batch is ready when enough groups are complete. The others are carried over: they continue while the trainer
        works (if the engine has a process of its own) and over its weight update (`mode="keep"`), and are part of a
        later batch, their versions recorded per token. Nothing is dropped for its length, so nothing is biased towards
        short answers. Without an update in between, a group equals that of `rollout` with the same `seed`.

        Args:
            dataset: prompts as for `rollout`, or rows: dictionaries with a prompt (`prompt`, `prompt_token_ids` or
                `messages`) whose other keys are columns. Any iterable, read one row at a time as groups start;
                `itertools.cycle` repeats one. "group_id" is the number of the row.
            groups_per_batch: groups in every batch; fewer in the last one.
            max_staleness: no sampled token of a batch is more versions behind the live weights than this, when the
                batch is returned. Push the weights before asking for the next batch, once per batch; then a prompt
                starts only if its batch is sure to be in time, and a batch waits for a group that no later one could
                take. A group that is too old nevertheless, after several updates at once, is aborted and started again
                with the same seeds (`stats.num_regenerated`). 0: every token is of the live weights, and nothing runs
                while the trainer works. None: no bound.
            max_in_flight: groups that run at once; None: all that may start, without a bound 2 * `groups_per_batch`.
            on_group, log_to, teachers, teacher_top_k: as in `rollout`; rewards and teachers are awaited by `next`.
            journal: a directory that keeps the run: the same call continues it in another process (docs/durable.md).
            options: `ChatOptions`, or `CollectOptions` of agents, whose tasks the dataset has (docs/agents.md).
        The other arguments are those of `rollout`. Raises `RequestError` for arguments that do not fit; `next` raises
        the errors of `rollout`, except that groups cut short by an abort are started again.
        """
        check_for_collect(self.collect, layout, options)
        self.frontend.ensure_loras(lora_request)
        given = (dataset, sampling_params, num_samples, None, reward_fn, reward_weights, seed, layout, oversample)
        columns_of = TeacherColumns.of(self.frontend, teachers, teacher_top_k, options)
        arguments = RolloutArguments(*given, None, lora_request, options, columns_of)
        control = staleness_control(groups_per_batch, max_staleness, max_in_flight)
        more = self._listeners(on_group, log_to, lora_request), journal, columns_of, self.gateway
        return open_collector(self.frontend, self._batcher, arguments, control, *more)

    def evaluate(
        self,
        tasks: Any,
        *,
        sweep: Sweep | Mapping[str, Any] | None = None,
        num_samples: int = 1,
        k: int | Sequence[int] = (1,),
        out: str | os.PathLike[str] | None = None,
        resume: bool = True,
        seed: int = 0,
        use_tqdm: bool = True,
    ) -> EvalReport:
        """Sample every task under every setting by every checkpoint, and compute the statistics (docs/evaluation.md).

        Args:
            tasks: one or a list of `EvalTask`s, or its equivalent: a dict of its fields, or the name of an
                environment; or a dict from names to these.
            sweep: a `Sweep` or a dict of its fields: sampling settings, and checkpoints to load one after another.
                None: the default settings, and the live weights. Those may change meanwhile: each sample has the
                versions that sampled it, and the report those of all samples.
            num_samples: of each prompt under each setting by each checkpoint.
            k: of pass@k and maj@k; at most `num_samples`.
            out: a directory that keeps each sample as soon as its group has ended. Samples in it are not drawn
                again, and are part of the report: samples of an evaluation that was killed, and other checkpoints, such
                as earlier versions of the live weights. None: in memory.
            resume: False: start over in `out`; its samples are deleted.
            seed: with task, setting, prompt and index it determines every draw; checkpoints share theirs.
            use_tqdm: show progress, by rich if that is installed; or print nothing.

        The policy keeps the weights of the last checkpoint that was loaded. Raises as `rollout` does, naming
        task and setting first; `RequestError` also if `out` holds another evaluation.
        """
        self.frontend.require_running("evaluate")
        num_samples = as_int("num_samples", num_samples, 1, MAX_N) or 1
        ks = [k] if isinstance(k, int) else list(k)
        if not ks or not all(type(each) is int and 1 <= each <= num_samples for each in ks):
            raise RequestError.for_field("k", k, f"ints from 1 to num_samples={num_samples}")
        evaluator = Evaluator(
            self,
            self._batcher,
            self._kept_workers,
            prepare_tasks(tasks),
            as_sweep(sweep),
            num_samples=num_samples,
            k=ks,
            seed=as_int("seed", seed, 0, MAX_SEED) or 0,
            gateway=self.gateway,
        )
        with closing(Ledger(out, evaluator.plan, resume=resume)) as ledger:
            evaluator.run(ledger, shown=use_tqdm)
            codec = self.frontend.inputs.codec
            texts = TokenTexts(None if codec is None else codec.hf)
            return EvalReport(ledger.plan, ledger.samples, texts.__getitem__)

    def score(  # type: ignore[override]
        self,
        batch: TensorDict,
        temperature: float = 1.0,
        *,
        candidate_ids: Tensor | None = None,
        lora: LoRALike | None = None,
        replay_routing: bool = False,
        timeout: float | None = None,
    ) -> Tensor:
        """Log-probs of a rollout's sampled tokens under the live weights: shape and mask of ("log_probs", "full").

        float32, 0 of tokens that were neither sampled nor forced by a budget. Equal to ("log_probs", "full") bit for
        bit at the temperature that sampled, if the weights are the same and the engine is deterministic.
        `provenance.rollout_note(result)` describes them: with `quantization`, they are those of rounded weights.
        `candidate_ids`: integers [B, T, K], or [1, N, K] of a packed batch; the result has this shape then, and holds
        the log-probs of these tokens in place of the sampled ones, from the same log-softmax. `lora`: the adapter that
        scores; None: the base model alone. `replay_routing`: send tokens to the experts of batch["routed_experts"],
        which `return_routed_experts` gives. Scores are of the whole vocabulary: of a rollout with
        `logprobs_mode="processed"` they are not its log-probs, of which a warning is logged. Raises
        `CallTimeoutError` after `timeout` seconds, and `RequestError` for anything but a rollout, and for other ids.
        """
        options = dict(temperature=temperature, lora=lora, timeout=timeout)
        logprobs = score_rollout(self, batch, candidate_ids, replay_routing=replay_routing, **options)
        adapter = None if lora is None else as_lora_request(lora).name
        note = self._batcher.note(temperature or 1.0, [adapter], is_packed="cu_seqlens" in batch.keys())
        attach(logprobs, note)
        return logprobs

    def _listeners(
        self, on_group: OnGroup | None, log_to: str | os.PathLike[str] | None, lora: LoRALike | None
    ) -> GroupListeners:
        return GroupListeners(on_group, None if log_to is None else RolloutLog(self, log_to, lora))

    def shutdown(self) -> None:
        """End the engine as `Face.shutdown` does, and worker processes kept for environments. May be called again."""
        self._kept_workers.close()
        super().shutdown()

    @property
    def tokenizer(self) -> Any:
        """The engine's Hugging Face tokenizer. Raises `LifecycleError` with `skip_tokenizer_init=True`."""
        return self.frontend.get_tokenizer()
