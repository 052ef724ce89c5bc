"""The place of a request that runs in its session's forest."""

import msgspec

from rollout_engine.base.pictures import PlacedPicture
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.sessions.forest import Turn
from rollout_engine.sessions.messages import Key, Messages
from rollout_engine.sessions.prompts import ChatPrompts, OwnIds


class Place(msgspec.Struct, eq=False):
    """The prompt of one request, and the turn that it continues."""

    prompt_token_ids: list[int]
    own: OwnIds
    prompts: ChatPrompts
    messages: Messages
    keys: list[Key]
    sizes: list[int]
    parent: Turn | None
    origin: Turn | None
    began: str
    pictures: list[PlacedPicture] = []
    """At positions in the prompt."""
    number: int = 0
    """The number of the request in its session."""
    max_tokens: int | None = None
    """Most tokens of each sample by the session's budget; None: no bound."""
    reserved: int = 0
    """Tokens of the budget that it may take."""
    num_bytes: int = 0
    """Memory that is counted for it as long as it runs."""
    params: SamplingParams | None = None
    adapter: str | None = None

    def is_beside(self, other: "Place") -> bool:
        """Whether another request that runs continues the same turn, or asks after the same conversation."""
        if self.parent is not None or other.parent is not None:
            return self.parent is other.parent
        return self.prompts.key == other.prompts.key and self.keys == other.keys
