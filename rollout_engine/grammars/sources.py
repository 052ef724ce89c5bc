"""Turns structured outputs into the grammars that llguidance reads: JSON with a text in Lark."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from rollout_engine.base.structured_outputs import trigger_of

FREE_TOKENS = '%llguidance {"no_forcing": true}'
"""Lets forced text be drawn in any tokens: a mask has all tokens with which the output can still match the grammar."""
_ANY_TEXT = r"/(.|\n)*/"


class AddedToken(NamedTuple):
    """A token that a tokenizer cuts out of the text before it divides the rest."""

    token_id: int
    is_special: bool
    """Whether texts leave it out with `skip_special_tokens`."""


def source_of(given: Mapping[str, Any], added: Mapping[str, AddedToken]) -> str:
    """The grammar of structured outputs that `check_structured_outputs` let pass; `added`: the tokenizer's, by text."""
    kind, value = next(iter(given.items()))
    if kind == "json":
        schema = json.loads(value) if isinstance(value, str) else value
        lark = f"start: %json {json.dumps(schema)}"
    elif kind == "choice":
        lark = f"start: {' | '.join(map(_quote, value))}"
    elif kind == "regex":
        lark = f"start: /{_escape(value)}/"
    elif kind == "structural_tag":
        lark = _tags(value, added)
    else:
        lark = _translate(value) if "::=" in value else value
    return json.dumps({"grammars": [{"lark_grammar": f"{lark}\n{FREE_TOKENS}"}]})


def _translate(grammar: str) -> str:
    """A grammar in EBNF, as GBNF writes it, in Lark. Raises `ValueError` for a grammar that cannot be translated."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(any_to_lark(grammar))
    except Exception as problem:
        raise ValueError(f"this EBNF cannot be translated ({problem}); give the grammar in Lark") from problem


def _tags(value: dict[str, Any], added: Mapping[str, AddedToken]) -> str:
    """Any text, in which a tag's beginning is followed by JSON of its schema and its end, wherever a trigger occurs.

    With "at_least_one" the text begins with a tag; with "stop_after_first" nothing follows a tag.
    """
    structures: list[dict[str, Any]] = value["structures"]
    triggers: list[str] = value["triggers"]
    if value.get("at_least_one") and value.get("stop_after_first"):
        return f"start: {_whole_tags(structures, added)}"
    rules: list[str] = []
    options: list[str] = []
    for trigger in dict.fromkeys(trigger_of(tag["begin"], triggers) or "" for tag in structures):
        bodies = [
            f"{_text(tag['begin'][len(trigger) :], added)} %json {_schema(tag['schema'])} {_text(tag['end'], added)}"
            for tag in structures
            if trigger_of(tag["begin"], triggers) == trigger
        ]
        name = f"tag_{len(options)}"
        if trigger in added:
            head = f"TEXT <[{added[trigger].token_id}]>"
        else:
            head = f"{name}_head"
            rules.append(f"{head}[lazy]: TEXT {_quote(trigger)}")
        rules.append(f"{name}: {head} ({' | '.join(bodies)})")
        options.append(name)
    others = [str(token.token_id) for text, token in added.items() if not token.is_special and text not in triggers]
    if others:  # such as <think>: text to the user, one token to the model
        rules.append(f"other: TEXT <[{','.join(others)}]>")
        options.append("other")
    if value.get("stop_after_first"):
        tags = [name for name in options if name != "other"]
        text = "other* " if others else ""
        start = f"{text}(last | {' | '.join(tags)})"
    else:
        first = f"({_whole_tags(structures, added)}) " if value.get("at_least_one") else ""
        start = f"{first}({' | '.join(options)})* last"
    return "\n".join([f"start: {start}", "last: TEXT", f"TEXT: {_ANY_TEXT}", *rules])


def _whole_tags(structures: list[dict[str, Any]], added: Mapping[str, AddedToken]) -> str:
    """One of the tags, from its beginning to its end."""
    return " | ".join(
        f"{_text(tag['begin'], added)} %json {_schema(tag['schema'])} {_text(tag['end'], added)}" for tag in structures
    )


def _schema(schema: Any) -> str:
    return schema if isinstance(schema, str) else json.dumps(schema)


def _text(text: str, added: Mapping[str, AddedToken]) -> str:
    """Text as Lark, in which each added token is that token."""
    parts: list[str] = []
    while text:
        found = [(at, -len(name), name) for name in added if name and (at := text.find(name)) >= 0]
        at, _, name = min(found, default=(len(text), 0, ""))
        parts += [_quote(text[:at])] if at else []
        parts += [f"<[{added[name].token_id}]>"] if name else []
        text = text[at + len(name) :]
    return " ".join(parts)


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escape(pattern: str) -> str:
    """A pattern between Lark's slashes: a slash in it that is not escaped yet gets a backslash, a line end its name."""
    out, is_escaped = [], False
    for char in pattern:
        if char == "\n":
            out.append("n" if is_escaped else r"\n")
        else:
            out.append(rf"\{char}" if char == "/" and not is_escaped else char)
        is_escaped = char == "\\" and not is_escaped
    return "".join(out)
