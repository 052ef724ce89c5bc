"""The engine for synchronous stepping: add requests, step, collect results."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Self

from rollout_engine.base.config import EngineConfig
from rollout_engine.base.lora_request import LoRALike
from rollout_engine.base.metrics import StatLogger
from rollout_engine.base.outputs import RequestOutput
from rollout_engine.base.version_pin import with_versions
from rollout_engine.engine.client import EngineClient
from rollout_engine.engine.interrupts import held
from rollout_engine.engine.local_client import LocalClient
from rollout_engine.faces.frontend import Frontend
from rollout_engine.faces.reader import Reader
from rollout_engine.faces.verb_methods import BlockingVerbs
from rollout_engine.fleet.placements import fleet_starter
from rollout_engine.results.request_ids import as_request_ids
from rollout_engine.telemetry.spans import TraceHeaders
from rollout_engine.text.input_processor import Params
from rollout_engine.text.prompts import Prompt, with_lora


class LLMEngine(BlockingVerbs):
    """Synchronous stepping: every request added ends in exactly one finished `RequestOutput` of some `step()`.

    >>> engine = LLMEngine.from_config(EngineConfig(model="path/or/hub-id"))
    >>> engine.add_request("a", "Once upon a time", SamplingParams(max_tokens=16))
    >>> while engine.has_unfinished_requests():
    ...     for output in engine.step():
    ...         print(output.outputs[0].text)

    Any thread may call any method; a call waits for the step in progress.
    """

    def __init__(self, frontend: Frontend) -> None:
        self.frontend = frontend
        self._reader = Reader(frontend)

    @classmethod
    def from_config(cls, config: EngineConfig, *, stat_loggers: Sequence[StatLogger] = ()) -> Self:
        """Load model and tokenizer, in this process. Raises `ConfigError` when they cannot be served.

        With `data_parallel_size` the engines that divide its experts are processes of their own, one fleet.
        `stat_loggers` get the engine's metrics, in addition to the log line and the loggers that packages registered.
        """
        start = LocalClient.start if config.data_parallel_size == 1 else fleet_starter()
        return cls(Frontend.start(config, start, stat_loggers))

    @classmethod
    def from_client(cls, client: EngineClient) -> Self:
        """Wrap a client of any engine, in this process or another."""
        return cls(Frontend.over(client))

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: Params | None = None,
        *,
        priority: int = 0,
        session_id: str | None = None,
        lora_request: LoRALike | None = None,
        trace_headers: TraceHeaders | None = None,
        policy_version: int | None = None,
        min_policy_version: int | None = None,
    ) -> str:
        """Queue one request and return its id. Lower `priority` runs first. Raises `RequestError`, nothing queued.

        With `PoolingParams` it pools its prompt, and its only output has the result in `pooled`.

        `session_id`: over replicas, requests of one id, such as the turns of a conversation, go to the same replica,
        which has their prefix cached; once it is gone, to another. It changes no token. Without replicas it has no
        effect. `lora_request`: the adapter, and `policy_version`, `min_policy_version`, as in `LLM.generate`.
        `trace_headers` (W3C `traceparent`) make its span, if there is one, part of the caller's trace.
        """
        prompt = with_lora(prompt, lora_request)
        self.frontend.ensure_loras(lora_request)
        options = dict(priority=priority, session_id=session_id, trace_headers=trace_headers)
        params = with_versions(params, policy_version, min_policy_version)
        (added,) = self._add(lambda: [self._reader.add(prompt, params, request_id, **options)])
        return added

    def add_requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params | Sequence[Params] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        session_id: str | Sequence[str | None] | None = None,
        lora_request: LoRALike | Sequence[LoRALike | None] | None = None,
        trace_headers: TraceHeaders | None = None,
        policy_version: int | None = None,
        min_policy_version: int | None = None,
    ) -> list[str]:
        """Queue one prompt or a list of them, under new ids, which are returned in order.

        `params`, `priority`, `session_id`, `lora_request`: one for all or one each; `trace_headers`, `policy_version`,
        `min_policy_version`: of all. All are checked before any is queued: `RequestError` names the index.
        """
        prompts = with_lora(prompts, lora_request)
        self.frontend.ensure_loras(lora_request)
        options = dict(priority=priority, session_id=session_id, trace_headers=trace_headers)
        params = with_versions(params, policy_version, min_policy_version)
        return self._add(partial(self._reader.add_all, prompts, params, **options))

    def step(self) -> list[RequestOutput]:
        """Compute one step. Returns its outputs, by `output_kind`, and the results of aborts since the last.

        While paused or asleep it computes nothing. An engine in another process steps on its own: then this waits a
        moment for results. Raises `DirtyWeightsError` when requests cannot continue before a complete weight update.
        If it raises, even for an interrupt, the next `step()` returns the outputs of this one.
        """
        outputs: list[RequestOutput] = []
        try:
            with held():
                outputs = self._reader.read(always_step=True)
            return outputs
        except BaseException:  # an interrupt, raised at the end of `held`
            self._reader.put_back(outputs)
            raise

    def abort_request(self, request_ids: str | Iterable[str], *, discard: bool = False) -> None:
        """End requests; the next `step()` returns their tokens so far, with finish_reason "abort".

        `discard=True`: it returns nothing of them. An unknown or finished id is a no-op.
        """
        ids = as_request_ids(request_ids)
        with held():
            self.frontend.client.require_usable()
            if discard:
                self._reader.abort(ids)
            else:
                self.frontend.abort(ids)

    def has_unfinished_requests(self) -> bool:
        """Whether `step()` has more outputs to return."""
        self.frontend.require_own_process()
        return len(self._reader) > 0

    def has_unfinished_requests_dp(self, has_unfinished: bool = False) -> bool:
        """Whether any engine of `data_parallel_size` has a request that has not ended, or `step()` has more outputs.

        The engines that divide experts step together as long as one of them has requests, without turns: a loop over
        `step()` may end when this is False. `has_unfinished`: the caller's own answer, as vLLM takes it.
        """
        if has_unfinished or self.has_unfinished_requests():
            return True
        return bool(super().get_num_unfinished_requests())

    def get_num_unfinished_requests(self, *, timeout: float | None = None) -> int:
        """Requests of this client whose finished output has not been returned. It never waits for `timeout`."""
        return self.frontend.num_open() + self._reader.num_put_back

    def is_unfinished(self, request_id: str) -> bool:
        """Whether the finished output of `request_id` is still to be returned."""
        self.frontend.require_own_process()
        return request_id in self._reader

    def _add(self, add: Callable[[], list[str]]) -> list[str]:
        added: list[str] = []
        try:
            with held():
                added = add()
            return added
        except BaseException:  # an interrupt, raised at the end of `held`: no caller gets these ids
            self._reader.abort(added)
            raise
