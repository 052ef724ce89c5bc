"""Options of the HTTP server."""

import ipaddress
from typing import Annotated

import msgspec

from rollout_engine.base.errors import ConfigError
from rollout_engine.base.sampling_params import LogprobsMode
from rollout_engine.base.structs import UserStruct
from rollout_engine.serve.media.files import AllowedDirectories
from rollout_engine.serve.media.hosts import AllowedHosts

Positive = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]


class ServeOptions(UserStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):  # type: ignore[metaclass]
    """Options of one server. Unknown names, wrong types and broken bounds raise `ConfigError`.

    >>> ServeOptions(port=8000, api_key="...", admin_key="...")
    """

    error_class = ConfigError
    readings = {
        "logprobs_mode": lambda value: value.removesuffix("_logprobs") if isinstance(value, str) else value,
    }

    host: str = "127.0.0.1"
    """Address to listen on. Any but loopback needs both keys."""
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8000
    """0: any that is free."""
    api_key: str | None = None
    """Key of clients that generate ("Authorization: Bearer KEY")."""
    admin_key: str | None = None
    """Key for control: pauses, weight updates, sleep, profiles. Where only `api_key` is set, control is closed."""
    served_model_name: str | None = None
    """Name that clients give as "model"; None: the one that the engine was loaded by."""
    logprobs_mode: LogprobsMode = "tempered"
    """Of requests that name none (`SamplingParams.logprobs_mode`). Trainers that read vLLM's expect "processed", which
    is the same as long as nothing truncates or penalises the distribution."""
    return_tokens_as_token_ids: bool = False
    """Whether log-probs name tokens as "token_id:7" in requests that do not say. Clients that rebuild ids from
    log-probs want it, since texts of tokens are not unique."""
    separate_reasoning: bool = False
    """Whether chats give thinking as `reasoning_content`, apart from the content, unless a request has the field
    `separate_reasoning` itself. Responses and messages always have it apart."""
    max_body_bytes: Positive = 32 << 20
    """Longest body of a request, but for those that bring weights."""
    max_weight_bytes: Positive = 64 << 30
    """Longest body of a request that brings weights."""
    max_open_body_bytes: Positive = 1 << 30
    """Bytes of all bodies that are being received, weights excepted. A body that needs more is answered 503."""
    allow_media: list[str] = []
    """Hosts from which requests may have pictures downloaded: "images.example.org", "images.example.org:8443",
    "10.0.0.7". A name must lead to public addresses, or to addresses that are listed too, alone or as a network
    ("10.0.0.0/8"). Redirects are followed to listed hosts alone."""
    allow_media_dir: list[str] = []
    """Directories of whose files requests may name pictures ("file:///data/images/a.png"). Links are not followed."""
    max_picture_bytes: Positive = 20 << 20
    """Longest file of one picture, whether it is in the body, downloaded or read. A longer one is answered 413."""
    max_open_picture_bytes: Positive = 4 << 30
    """Bytes that pictures of open requests take together, as files and as arrays. Beyond, 503; 413 for one request."""
    picture_seconds: Seconds = 10.0
    """Within which a host must have sent a picture, redirects included; 504 otherwise."""
    body_seconds: Seconds = 60.0
    """Within which a client must have sent its request, a body with weights excepted."""
    max_connections: Positive = 65_536
    """Connections beyond these are answered 503."""
    drain_seconds: Seconds = 30.0
    """How long open requests may take to end once the server is told to stop."""
    trust_request_chat_template: bool = False
    """Whether requests may bring a `chat_template` of their own. A template is a program: it is rendered in a process
    apart, for at most a second of computing and 512 MiB. Names of the tokenizer's own templates are always taken."""
    allowed_origins: list[str] = []
    """Web pages whose scripts may call ("https://example.org"). Browsers' requests from any other are refused."""

    sessions: bool = False
    """Whether to keep sessions of agents, whose requests become training rows (docs/gateway.md)."""
    max_sessions: Positive = 4_096
    """Sessions at once. They are deleted when asked for, or `session_seconds` after they stopped to take requests."""
    session_seconds: Seconds = 3_600.0
    """How long a session takes requests."""
    session_tokens: Positive | None = None
    """Token ids of one session: its prompts, shared prefixes once, and its answers. None: no bound."""
    session_bytes: Positive = 256 << 20
    """Approximate memory of one session: messages, ids, columns of samples, pictures, the ids of all its rows, and
    answers that are kept for copies of requests. A request that needs more is answered 403."""
    all_sessions_bytes: Positive = 16 << 30
    """The same of all sessions together. A request that needs more, and a new session, is answered 503: there is room
    again once sessions are deleted."""
    session_turns: Positive = 4_096
    """Answers of one session."""
    session_retry_seconds: Seconds = 60.0
    """How long after its end an answer is given to further copies of its request."""

    tinker: str | None = None
    """Directory of the checkpoints of Tinker's clients (docs/tinker.md). None: the protocol is not spoken."""
    tinker_clients: Positive = 64
    """Sessions of Tinker's clients at once; each may train one adapter. Another one is answered 429, until one ends."""
    tinker_waiting: Positive = 4_096
    """Requests of one session whose results it has not retrieved. Another is answered 429: the SDK sends it again."""
    tinker_idle_seconds: Seconds = 900.0
    """After so long without a request or a heartbeat a session ends, and its adapter with it; checkpoints stay."""

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def check(self) -> None:
        AllowedHosts(self.allow_media)
        AllowedDirectories(self.allow_media_dir)
        for name in ("api_key", "admin_key"):
            key = getattr(self, name)
            if key is not None and (not key or not key.isascii() or key != key.strip()):
                raise ConfigError(f"{name} is not allowed: must be ASCII text without spaces around it, not empty.")
        missing = [f"--{name.replace('_', '-')}" for name in ("api_key", "admin_key") if getattr(self, name) is None]
        if missing and not self.is_loopback:
            what = f"host='{self.host}' can be reached from other machines, and there is no {' and no '.join(missing)}"
            raise ConfigError(f"{what}: give both keys, or listen on 127.0.0.1.")
        if self.api_key is not None and self.api_key == self.admin_key:
            raise ConfigError("api_key and admin_key are the same: clients could change the weights. Give two.")
