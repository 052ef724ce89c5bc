"""The engine behind a server, and the server's own state."""

import time
from collections.abc import Iterable, Sequence
from functools import cached_property

from rollout_engine.base.lora_training import LoraTrainer
from rollout_engine.base.outputs import TokenTexts
from rollout_engine.faces.async_llm import AsyncLLM
from rollout_engine.serve.media.reader import MediaReader
from rollout_engine.serve.options import ServeOptions
from rollout_engine.serve.pending_update import PendingUpdate
from rollout_engine.serve.problems import HttpProblem
from rollout_engine.serve.route import Route
from rollout_engine.serve.sampling import SettingsReader
from rollout_engine.serve.sessions.served_sessions import ServedSessions
from rollout_engine.serve.tinker.service import TinkerService
from rollout_engine.serve.version_names import VersionNames
from rollout_engine.text.formats.answer import AnswerFormat
from rollout_engine.text.formats.choose import answer_format
from rollout_engine.text.formats.taught_format import taught_format
from rollout_engine.text.formats.tool_calls import ToolFormat
from rollout_engine.text.request_templates import RequestTemplates
from rollout_engine.text.tokenizer import TextCodec


class Served:
    """One engine and its server's state; everything here is used on the event loop alone."""

    def __init__(
        self,
        engine: AsyncLLM,
        options: ServeOptions,
        routes: Sequence[Route] = (),
        trainer: LoraTrainer | None = None,
    ) -> None:
        self.engine, self.options, self.routes = engine, options, routes
        self.model = options.served_model_name or engine.frontend.client.info.config.model
        self.model_path = engine.frontend.client.info.config.model
        """The checkpoint from which the weights were last read, as clients of SGLang ask for it."""
        self.started = int(time.time())
        self.is_paused = False
        """Whether a client has paused the engine, or put it to sleep; /health shows it without asking the engine."""
        self.released: frozenset[str] = frozenset()
        """Memory that clients have had released by its tag: "kv_cache", "weights"."""
        self.is_ending = False
        """Whether the server has received the signal to stop."""
        self.settings = SettingsReader(options.logprobs_mode)
        self.templates = RequestTemplates()
        inputs = engine.frontend.inputs
        most = engine.frontend.client.info.config.max_prompt_pictures if inputs.pictures.are_served else 0
        self.media = MediaReader(options, inputs.read_image, most)
        self.updates = PendingUpdate(engine)
        self.sessions = ServedSessions(options)
        self.tinker = TinkerService(options, trainer)
        self.versions = VersionNames(lambda: self.weight_version)
        """Texts that clients have given versions."""
        self.known_digests: dict[str, str] | None = None
        """Of the weights, when a client last asked to remember them."""
        self._token_texts: TokenTexts | None = None
        self._open: dict[str, set[str]] = {}

    @property
    def weight_version(self) -> int:
        """Version of the live weights."""
        return self.engine.policy_version

    @property
    def version_text(self) -> str:
        """The same as clients of SGLang read it: the text that a client gave it, or its number."""
        return self.versions.text_of(self.weight_version)

    @property
    def max_model_len(self) -> int:
        """Most tokens of a sequence, prompt included."""
        return self.engine.frontend.client.info.max_model_len

    @property
    def codec(self) -> TextCodec:
        """The tokenizer. Raises `HttpProblem` 400 if the engine has none."""
        codec = self.engine.frontend.inputs.codec
        if codec is None:
            raise HttpProblem(400, "This engine has no tokenizer (skip_tokenizer_init=True): use token ids.")
        return codec

    def names_token_ids(self, asked: bool | None) -> bool:
        """Whether log-probs name tokens by their ids. None: the server's own way."""
        return self.options.return_tokens_as_token_ids if asked is None else asked

    @property
    def num_open(self) -> int:
        """Requests of clients that have not ended."""
        return len(self._open)

    @property
    def token_texts(self) -> TokenTexts:
        """Texts of tokens by their ids; None for each without a tokenizer."""
        if self._token_texts is None:
            codec = self.engine.frontend.inputs.codec
            self._token_texts = TokenTexts(None if codec is None else codec.hf)
        return self._token_texts

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """The form of tool calls that the tokenizer's chat template teaches. Raises `RequestError` if there is none."""
        return taught_format(self.codec, None)

    @cached_property
    def answer_format(self) -> AnswerFormat | None:
        """The format of answers under the tokenizer's chat template; None if it teaches neither thinking nor calls."""
        return answer_format(self.codec)

    def check_model(self, name: str | None) -> None:
        """Raise `HttpProblem` 404 for a model that is not served here. None and "" mean the one that is."""
        if name and name != self.model and name != "default":
            what = f"The model '{name:.200}' does not exist: this server has '{self.model}'"
            raise HttpProblem(404, f"{what}.", field="model")

    async def adapter_of(self, name: str | None, field: str = "model") -> str | None:
        """The adapter that a field of a request names; None for the model itself. Raises `HttpProblem` 404."""
        if not name or name in (self.model, "default"):
            return None
        names = [adapter.name for adapter in await self.engine.list_loras()]
        if name not in names:
            known = f"'{self.model}'" + "".join(f", the adapter '{each}'" for each in names)
            kind = "model" if field == "model" else "adapter"
            what = f"The {kind} '{name:.200}' does not exist: this server has {known}"
            advice = f"Give one of these, or leave {field} out; POST /v1/load_lora_adapter adds an adapter"
            raise HttpProblem(404, f"{what}. {advice}.", field=field)
        return name

    def check_open(self) -> None:
        """Raise `HttpProblem` 503 once the server is stopping. While it is paused, requests are accepted and wait."""
        if self.is_ending:
            raise HttpProblem(503, "The server is stopping: send the request elsewhere.")

    def begin(self, name: str, request_id: str) -> None:
        """Remember the engine's id of a client's request; several may have the same name."""
        self._open.setdefault(name, set()).add(request_id)

    def end(self, name: str, request_id: str) -> None:
        """Forget it."""
        left = self._open.get(name, set())
        left.discard(request_id)
        if not left:
            self._open.pop(name, None)

    def ids_of(self, names: Iterable[str] | None = None) -> list[str]:
        """The engine's ids of clients' open requests; of all without `names`."""
        chosen = list(self._open) if names is None else names
        return [each for name in chosen for each in self._open.get(name, ())]

    def ids_that_begin(self, prefix: str) -> list[str]:
        """The same of requests whose names begin so."""
        return self.ids_of([name for name in self._open if name.startswith(prefix)])
