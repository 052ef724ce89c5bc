"""Why a request of a session does not continue the row of an earlier one.

"start"             the session has no answers yet
"rollback"          it continues, or asks again after, an earlier conversation that has been answered meanwhile
"parallel"          the same, while another request that does so was running
"sample"            another of the n samples of one request
"trimmed"           an answer was returned with other spaces around it
"thinking_dropped"  an answer was returned without its thinking, which the template would show
"edited"            a message was changed
"compacted"         a conversation of several turns was replaced by a shorter one
"new_system"        another system prompt, as that of a sub-agent
"tools_changed"     other tools
"template"          the chat template writes earlier turns differently, or its options were changed
"""

from typing import Any, Literal, TypeAlias

from rollout_engine.sessions.forest import Forest, Found, Node, Turn
from rollout_engine.sessions.messages import Key, Messages, answer_parts, is_answer

Reason: TypeAlias = Literal[
    "start",
    "rollback",
    "parallel",
    "sample",
    "trimmed",
    "thinking_dropped",
    "edited",
    "compacted",
    "new_system",
    "tools_changed",
    "template",
]
_SYSTEM = ("system", "developer")
_MANY_TURNS = 2
"""Answers that a compaction replaces, at least; one message for another is an edit."""


def reason_of(
    forest: Forest, root: tuple[Key, Key], messages: Messages, keys: list[Key], found: Found
) -> tuple[Reason, Turn | None]:
    """(why the conversation would begin a row, a turn of the row that it branches from)."""
    if not forest.turns:
        return "start", None
    new = messages[found.depth :]
    if found.turn is not None and not any(map(is_answer, new)):
        return "rollback", found.turn
    if len(found.path) > len(messages):
        last = found.path[-1]
        return "rollback", last.asked[-1] if last.asked else last.latest
    if len(found.path) <= 1:
        return _reason_without_prefix(forest, root, messages, keys, found)
    reason, origin = _divergence(found.path[-1], messages)
    return reason, found.turn or origin


def _reason_without_prefix(
    forest: Forest, root: tuple[Key, Key], messages: Messages, keys: list[Key], found: Found
) -> tuple[Reason, Turn | None]:
    for other_root, _ in forest.others(root):
        other = forest.find(other_root, messages, keys)
        if len(other.path) > 1:
            return ("tools_changed" if other_root[0] != root[0] else "template"), other.turn or other.path[-1].latest
    roots = [*found.path, *(node for _, node in forest.others(root))]
    if messages[0].get("role") in _SYSTEM or any(_has_system(node) for node in roots):
        return "new_system", forest.turns[-1]
    return _divergence(roots[0], messages)


def _has_system(root: Node) -> bool:
    return any(child.message is not None and child.message.get("role") in _SYSTEM for child in root.children.values())


def _divergence(node: Node, messages: Messages) -> tuple[Reason, Turn | None]:
    """Why a conversation leaves the known ones behind `node`, which is its longest known prefix."""
    if node.depth < len(messages) and is_answer(messages[node.depth]) and node.asked:
        reasons = [(_change(turn, messages[node.depth]), turn) for turn in reversed(node.asked)]
        return next((each for each in reasons if each[0] != "edited"), reasons[0])
    num_answers = sum(1 for turn in (node.latest.chain() if node.latest else ()) if turn.answered.depth > node.depth)
    is_shorter = len(messages) < node.longest and num_answers >= _MANY_TURNS
    return ("compacted" if is_shorter else "edited"), node.latest


def _change(turn: Turn, message: dict[str, Any]) -> Reason:
    """How a returned answer was changed."""
    assert turn.answered.message is not None, "it has been answered"
    was, now = answer_parts(turn.answered.message), answer_parts(message)
    if was["calls"] != now["calls"] or not isinstance(was["content"], str) or not isinstance(now["content"], str):
        return "edited"
    if was["content"].strip() != now["content"].strip():
        return "edited"
    if was["thinking"] != now["thinking"]:
        is_trimmed = str(was["thinking"]).strip() == str(now["thinking"]).strip()
        return "trimmed" if is_trimmed else "edited" if now["thinking"] else "thinking_dropped"
    return "trimmed"
