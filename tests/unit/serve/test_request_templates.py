"""Chat templates that requests bring: programs of strangers."""

import threading

import pytest

from rollout_engine.base.errors import RequestError
from rollout_engine.serve.app import App
from rollout_engine.text.request_templates import RequestTemplates

from .conftest import Client

HELLO = [{"role": "user", "content": "hello"}]
SIMPLE = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
ROUTES = {
    "/v1/chat/completions": {"messages": HELLO},
    "/tokenize": {"messages": HELLO},
    "/v1/embeddings": {"messages": HELLO},
    "/pooling": {"messages": HELLO},
    "/classify": {"messages": HELLO},
}


@pytest.mark.parametrize("route", ROUTES)
def test_a_server_that_does_not_trust_them_runs_no_template_of_a_request(policy, route):
    client = Client(App(policy))
    problem = client.problem(route, ROUTES[route] | {"chat_template": LOOPS})
    assert "--trust-request-chat-template" in problem["message"] and problem["param"] == "chat_template"
    hidden = client.problem(route, ROUTES[route] | {"chat_template_kwargs": {"chat_template": LOOPS}})
    assert hidden["param"] == "chat_template_kwargs"


@pytest.fixture(scope="module")
def templates():
    made = RequestTemplates()
    yield made
    made.close()


def test_a_trusted_template_gives_the_text_that_the_tokenizer_would(client, policy):
    body = {"messages": HELLO, "chat_template": SIMPLE, "add_generation_prompt": False}
    text = policy.get_tokenizer().apply_chat_template(HELLO, chat_template=SIMPLE, tokenize=False)
    assert client.post("/tokenize", body)["tokens"] == client.app.served.codec.encode(text, add_special_tokens=False)
    answer = client.post("/v1/chat/completions", body | {"max_tokens": 1, "return_token_ids": True})
    assert answer["prompt_token_ids"] == client.post("/tokenize", body)["tokens"]


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "template, said",
    [
        (LOOPS, "more than 1 s"),
        ('{{ "a" * 6000000000 }}', "MemoryError"),
        ("{{ messages[0].content * 8000000 }}", "at most"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ raise_exception('no') }}", "no"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_a_template_that_takes_too_much_is_refused_and_the_next_one_is_rendered(templates, template, said):
    with pytest.raises(RequestError, match=said) as raised:
        templates.render(template, HELLO, {}, {})
    assert raised.value.field == "chat_template"
    assert templates.render(SIMPLE, HELLO, {}, {"bos_token": "B"}) == "B<user>hello"


def test_other_routes_answer_while_a_template_computes(client):
    ended = threading.Event()

    def ask():
        client.problem("/v1/chat/completions", {"messages": HELLO, "chat_template": LOOPS})
        ended.set()

    thread = threading.Thread(target=ask)
    thread.start()
    num_answered = 0
    while not ended.is_set():
        assert client.send("GET", "/health").status_code == 200
        num_answered += not ended.is_set()
    thread.join()
    assert num_answered


def test_a_template_of_a_request_does_not_continue_what_was_sampled(client):
    messages = [*HELLO, {"role": "assistant", "content": "x"}, *HELLO]
    body = {"messages": messages, "required_prefix_token_ids": [5, 6], "chat_template": SIMPLE}
    assert client.problem("/v1/chat/completions", body)["param"] == "chat_template"


def test_names_of_variables_without_end_fill_no_memory(client, monkeypatch):
    codec = client.app.served.codec
    monkeypatch.setattr(codec, "_warned", set())
    for number in range(300):
        client.post("/tokenize", {"messages": HELLO, "chat_template_kwargs": {f"unread_{number}": 1}})
    assert len(codec._warned) <= 256
