"""The prefix forest of a session: conversations by their messages, and the answers that were sampled after them.

    root (tools and template options)
     └─ system ─ user ─ [answer of turn 0] ─ tool ─ [answer of turn 1] ─ user ...
                   │                            └── [another answer of turn 2]: a sibling, or sampled after a rollback
                   └─ [the same answer returned with changes] ─ user ... : a branch

A node is a conversation: its parent's and one more message. `Turn`s are the sampled answers; they form a forest of
their own, by token ids: a turn's prompt is its parent's ids, the parent's sampled ids, and ids of its own.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from rollout_engine.base.outputs import CompletionOutput
from rollout_engine.base.pictures import PlacedPicture
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.sessions.memory import BYTES_OF_NODE
from rollout_engine.sessions.messages import Key, Messages, is_answer, keys_of, without_thinking
from rollout_engine.sessions.pictures import place_after


class Node:
    """A conversation that a recorded turn has seen or made."""

    __slots__ = ("answers", "asked", "children", "depth", "latest", "longest", "message", "parent")

    def __init__(self, parent: "Node | None" = None, message: dict[str, Any] | None = None) -> None:
        self.parent, self.message = parent, message
        self.depth: int = 0 if parent is None else parent.depth + 1
        """Number of messages."""
        self.children: dict[Key, Node] = {}
        self.answers: list[Turn] = []
        """Turns whose answer is this conversation's last message."""
        self.asked: list[Turn] = []
        """Turns that were sampled after this conversation."""
        self.latest: Turn | None = None
        """The newest turn that was sampled here or further down."""
        self.longest = self.depth
        """Messages of the longest conversation here or further down."""

    def messages(self) -> Messages:
        """The conversation, as clients sent it and got its answers."""
        found: Messages = []
        node: Node | None = self
        while node is not None and node.message is not None:
            found.append(node.message)
            node = node.parent
        return found[::-1]


class Turn:
    """One sampled answer."""

    __slots__ = (
        *(
            "adapter",
            "answered",
            "began",
            "children",
            "is_shown_raw",
            "new_messages",
            "node",
            "number",
            "origin",
            "own_ids",
            "own_pictures",
            "params",
        ),
        *("parent", "said", "sample", "shown"),
    )

    def __init__(
        self,
        number: int,
        node: Node,
        parent: "Turn | None",
        origin: "Turn | None",
        began: str,
        own_ids: list[int],
        sample: CompletionOutput,
    ) -> None:
        self.number, self.node, self.sample, self.own_ids = number, node, sample, own_ids
        """`own_ids`: ids of the prompt behind the parent's; the whole prompt without a parent."""
        self.parent = parent
        """The turn whose ids its prompt continues."""
        self.origin, self.began = origin, began
        """Turn of the row that its row branches from, and why it would begin a row."""
        self.own_pictures: list[PlacedPicture] = []
        """Pictures at positions in `own_ids`."""
        self.children: list[Turn] = []
        """Turns that continue it, in the order of their ends: the first is in the same row."""
        self.new_messages: Messages = []
        """Messages of the prompt behind the parent's answer; all without a parent."""
        self.said = ""
        """Text of the sampled ids, special tokens included but for those at the end."""
        self.shown: str | None = None
        """The template's text of its prompt; None: to be rendered anew."""
        self.is_shown_raw: bool | None = None
        """`OwnIds.is_raw` of that text."""
        self.params: SamplingParams | None = None
        self.adapter: str | None = None
        self.answered: Node = node
        """The conversation with its answer."""

    @property
    def begins_row(self) -> bool:
        """Whether it is not the first to continue its parent."""
        return self.parent is None or self.parent.children[0] is not self

    def chain(self) -> "list[Turn]":
        """The turns whose ids this one's row has, the first one first, this one last."""
        found, turn = [self], self.parent
        while turn is not None:
            found.append(turn)
            turn = turn.parent
        return found[::-1]

    def prompt_token_ids(self) -> list[int]:
        """Token ids of its prompt."""
        ids: list[int] = []
        for turn in self.chain():
            ids += turn.own_ids
            ids += turn.sample.token_ids if turn is not self else ()
        return ids

    def prompt_pictures(self) -> list[PlacedPicture]:
        """The pictures of its prompt, at positions in this."""
        found, start = list[PlacedPicture](), 0
        for turn in self.chain():
            found = place_after(found, turn.own_pictures, start)
            start += len(turn.own_ids) + len(turn.sample.token_ids)
        return found

    def token_ids(self) -> list[int]:
        """Token ids of prompt and answer."""
        return self.prompt_token_ids() + list(self.sample.token_ids)


class Found(NamedTuple):
    """A request's conversation in the forest."""

    path: list[Node]
    """Its known prefixes: the root first, the longest last; empty if the root is unknown."""
    turn: Turn | None
    """The newest turn whose answer ends the longest prefix that ends with one and is followed by new messages."""
    is_loose: bool = False
    """Whether thinking of known answers is missing in the request."""

    @property
    def depth(self) -> int:
        """Number of messages up to the end of the turn's answer."""
        return 0 if self.turn is None else self.turn.answered.depth


class Forest:
    """All conversations and turns of one session."""

    def __init__(self) -> None:
        self.roots: dict[tuple[Key, Key], Node] = {}
        """By (digest of the tools, digest of the template's other options)."""
        self.turns: list[Turn] = []
        self.num_bytes = 0
        """Approximate memory of the messages."""

    def find(self, root: tuple[Key, Key], messages: Messages, keys: Sequence[Key], *, loose: bool = False) -> Found:
        """The longest known prefix of a conversation. `loose`: also if thinking of known answers is missing in it."""
        node = self.roots.get(root)
        path, turn, is_loose = [] if node is None else [node], None, False
        for index, key in enumerate(keys):
            if node is None:
                break
            after = node.children.get(key)
            if after is None and loose and is_answer(messages[index]):
                after = next((each.answered for each in reversed(node.asked) if _lacks_thinking(each, key)), None)
                is_loose = is_loose or after is not None
            node = after
            if node is not None:
                path.append(node)
                if node.answers and index + 1 < len(keys):
                    turn = node.answers[-1]
        return Found(path, turn, is_loose)

    def grow(self, root: tuple[Key, Key], messages: Messages, keys: Sequence[Key], sizes: Sequence[int]) -> Node:
        """The node of a conversation, made if it is new."""
        node = self.roots.setdefault(root, Node())
        for message, key, size in zip(messages, keys, sizes, strict=True):
            node = self.extend(node, message, key, size)
        return node

    def extend(self, node: Node, message: dict[str, Any], key: Key, size: int) -> Node:
        """The node of a conversation with one more message of `size` bytes, made if it is new."""
        found = node.children.get(key)
        if found is None:
            found = node.children[key] = Node(node, message)
            self.num_bytes += BYTES_OF_NODE + size
        return found

    def add(self, turn: Turn) -> None:
        """Add a turn whose `answered` is set."""
        self.turns.append(turn)
        turn.node.asked.append(turn)
        turn.answered.answers.append(turn)
        if turn.parent is not None:
            turn.parent.children.append(turn)
        node: Node | None = turn.answered
        while node is not None:
            node.latest, node.longest = turn, max(node.longest, turn.answered.depth)
            node = node.parent

    def others(self, root: tuple[Key, Key]) -> Iterator[tuple[tuple[Key, Key], Node]]:
        """The roots of conversations under other tools or options, the newest first."""
        return ((key, node) for key, node in reversed(self.roots.items()) if key != root)


def _lacks_thinking(turn: Turn, key: Key) -> bool:
    """Whether a message with this key is the turn's answer without its thinking."""
    message = turn.answered.message
    return message is not None and keys_of([without_thinking(message)])[0] == [key]
