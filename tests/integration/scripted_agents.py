"""Agents that do by a seed what real ones do: append, edit, go back, compact, delegate, ask in parallel, retry.

Each asks for ids and log-probs of its answers, so that the rows of its session can be compared with them.
"""

import asyncio
import json
import random

SYSTEMS = ["Be brief.", "You are a sub-agent.", "You judge."]
CALL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "maximum": 9}, "b": {"type": "boolean"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }} by <tool_call>{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<eos>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
MOST_MESSAGES = 11


class ScriptedAgent:
    """One agent; `play` sends `num_steps` requests or bundles of them, and collects what was `answered`."""

    def __init__(self, post, seed):
        """`post`: sends a body, and returns the JSON of the answer, streamed or whole, as one of a whole answer."""
        self._post, self._draw = post, random.Random(seed)
        self.answered = {}
        """By the id of each response and the index of its choice: the choice."""
        self.steps = []
        self._conversations = []

    async def play(self, num_steps):
        await self.start()
        for _ in range(num_steps):
            step = self._draw.choice(STEPS)
            self.steps.append(step.__name__)
            await step(self)

    async def start(self, system=None):
        """A new conversation, as of a sub-agent."""
        self._conversations.append([{"role": "system", "content": system or self._draw.choice(SYSTEMS)}, self._user()])
        self._conversations[-1] = await self._ask(self._conversations[-1])

    async def append(self):
        """The next question."""
        index = self._pick()
        self._conversations[index] = await self._ask([*self._conversations[index], self._user()])

    async def use_tool(self):
        """A call, whose arguments come back written differently, and its result."""
        index = self._pick()
        past = [*self._conversations[index], self._user()]
        forced = {"tools": [CALL], "tool_choice": {"type": "function", "function": {"name": "add"}}, "max_tokens": 90}
        past = await self._ask(past, **forced)
        for call in past[-1].get("tool_calls", ()):
            arguments = json.loads(call["function"]["arguments"])
            call["function"]["arguments"] = json.dumps(dict(reversed(arguments.items())), separators=(",", ":"))
            past = [*past, {"role": "tool", "tool_call_id": call["id"], "content": "3"}]
        self._conversations[index] = await self._ask([*past, self._user()], tools=[CALL])

    async def go_back(self):
        """Another question after an earlier answer."""
        index = self._pick()
        past = self._conversations[index]
        ends = [place + 1 for place, message in enumerate(past) if message["role"] == "assistant"]
        self._conversations[index] = await self._ask([*past[: self._draw.choice(ends)], self._user()])

    async def edit(self):
        """One message changed, whichever."""
        index = self._pick()
        past = [dict(message) for message in self._conversations[index]]
        changed = self._draw.choice(past)
        changed["content"] = f"{changed['content']}!"
        self._conversations[index] = await self._ask([*past, self._user()])

    async def trim(self):
        """The last answer with other spaces around it."""
        index = self._pick()
        past = [*self._conversations[index]]
        past[-1] = {**past[-1], "content": f" {(past[-1]['content'] or '').strip()}\n"}
        self._conversations[index] = await self._ask([*past, self._user()])

    async def compact(self):
        """A summary in place of the conversation."""
        index = self._pick()
        summary = {"role": "user", "content": f"So far: {self._draw.randrange(100)}."}
        self._conversations[index] = await self._ask([self._conversations[index][0], summary])

    async def delegate(self):
        """Two sub-agents at once, each with some turns, while the first conversation waits."""
        await asyncio.gather(*(self.start(system) for system in SYSTEMS[1:]))
        await asyncio.gather(*(self._append_to(len(self._conversations) - 1 - place) for place in range(2)))

    async def ask_at_once(self):
        """Two questions after the same answer at the same time."""
        index = self._pick()
        past = self._conversations[index]
        both = await asyncio.gather(*(self._ask([*past, self._user()]) for _ in range(2)))
        self._conversations[index] = self._draw.choice(both)

    async def retry(self):
        """The same request several times, at once and later, in another order of keys."""
        index = self._pick()
        body = self._body([*self._conversations[index], self._user()])
        copies = await asyncio.gather(*(self._post(each) for each in (body, dict(reversed(body.items())))))
        copies.append(await self._post(body))
        assert len({json.dumps(copy, sort_keys=True) for copy in copies}) == 1
        self._conversations[index] = self._note(body, copies[0])

    async def sample(self):
        """Two samples of an answer, of which one is kept."""
        index = self._pick()
        self._conversations[index] = await self._ask([*self._conversations[index], self._user()], n=2)

    def _pick(self):
        """A conversation; one that is long goes back first."""
        index = self._draw.randrange(len(self._conversations))
        if len(self._conversations[index]) > MOST_MESSAGES:
            end = max(place for place in range(4) if self._conversations[index][place]["role"] == "assistant")
            self._conversations[index] = self._conversations[index][: end + 1]
        return index

    async def _append_to(self, index):
        self._conversations[index] = await self._ask([*self._conversations[index], self._user()])

    def _user(self):
        return {"role": "user", "content": f"q{self._draw.randrange(10**6)}"}

    def _body(self, messages, **more):
        return {
            "messages": messages,
            "max_tokens": self._draw.randint(1, 8),
            "seed": self._draw.randrange(2**32),
            "stream": self._draw.random() < 0.3,
            "logprobs": True,
            "return_token_ids": True,
            **more,
        }

    async def _ask(self, messages, **more):
        body = self._body(messages, **more)
        return self._note(body, await self._post(body))

    def _note(self, body, answer):
        for choice in answer["choices"]:
            self.answered[answer["id"], choice["index"]] = choice
        return [*body["messages"], dict(self._draw.choice(answer["choices"])["message"])]


STEPS = [
    *(ScriptedAgent.append, ScriptedAgent.append, ScriptedAgent.append, ScriptedAgent.use_tool, ScriptedAgent.go_back),
    *(ScriptedAgent.edit, ScriptedAgent.trim, ScriptedAgent.compact, ScriptedAgent.delegate, ScriptedAgent.ask_at_once),
    *(ScriptedAgent.retry, ScriptedAgent.sample),
]


def whole_answer(text):
    """The body of a whole answer that a stream's events add up to."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    events = [json.loads(line) for line in lines]
    choices = {}
    for event in events:
        for part in event["choices"]:
            whole = choices.setdefault(part["index"], {"index": part["index"], "token_ids": [], "logprobs": []})
            message = whole.setdefault("message", {"role": "assistant", "content": ""})
            whole.setdefault("prompt_token_ids", part["prompt_token_ids"])
            whole["token_ids"] += part["token_ids"]
            whole["logprobs"] += part["logprobs"]["content"]
            message["content"] += part["delta"].get("content") or ""
            if part["delta"].get("tool_calls"):
                calls = [
                    {name: call[name] for name in ("id", "type", "function")} for call in part["delta"]["tool_calls"]
                ]
                message["tool_calls"] = calls
    for whole in choices.values():
        whole["logprobs"] = {"content": whole["logprobs"]}
    return {"id": events[0]["id"], "choices": [choices[index] for index in sorted(choices)]}
