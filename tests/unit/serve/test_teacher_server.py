"""Teachers that are servers: scores over a socket have the bits of the engine behind it."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import torch

from rollout_engine import RolloutPolicy, SamplingParams, Teacher
from rollout_engine.base.errors import ConfigError, RequestError, TeacherError
from rollout_engine.serve.options import ServeOptions
from rollout_engine.serve.server import HttpServer
from rollout_engine.testing import tiny_checkpoint

PARAMS = SamplingParams(max_tokens=6, temperature=0.7, logprobs=3, ignore_eos=True)
PROMPTS = ["a prompt", "b"]


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    with RolloutPolicy.from_pretrained(
        tiny_checkpoint(tmp_path_factory.mktemp("s"), seed=5), max_model_len=256
    ) as made:
        yield made


@pytest.fixture(scope="module")
def server(policy):
    with HttpServer(policy, ServeOptions(port=0)) as made:
        yield made


def rollout(student, teacher, params=PARAMS, **options):
    return student.rollout(PROMPTS, params, num_samples=2, seed=1, use_tqdm=False, teachers=[teacher], **options)


def test_a_server_scores_as_its_engine_does(student, server, policy):
    teacher = Teacher(server.url, name="far")
    near = Teacher(policy, name="far")
    for top_k in (None, 2, "student"):
        found, expected = (rollout(student, each, teacher_top_k=top_k)["teacher", "far"] for each in (teacher, near))
        assert set(found.keys()) == set(expected.keys())
        for part, values in expected.items():
            assert torch.equal(found[part], values), (top_k, part)


def test_a_server_that_does_not_answer_is_a_teacher_that_fails(student, server, policy):
    with HttpServer(policy, ServeOptions(port=0)) as ended:
        url = ended.url
        teacher, lenient = Teacher(url), Teacher(url, on_failure="nan")
        rollout(student, teacher)
    with pytest.raises(TeacherError, match="Teacher 'teacher' failed: http.*does not answer"):
        rollout(student, teacher)
    with pytest.raises(TeacherError, match="does not answer"):
        rollout(student, Teacher(url))
    batch = rollout(student, lenient)
    assert batch["teacher", "teacher", "log_probs"][batch["masks", "all_assistant_mask"]].isnan().all()


def test_what_a_server_refuses_is_refused_with_its_words(student, policy):
    with HttpServer(policy, ServeOptions(port=0, api_key="secret")) as server:
        with pytest.raises(RequestError, match="answered 401"):
            rollout(student, Teacher(server.url))
        assert rollout(student, Teacher(server.url, api_key="secret"))["teacher", "teacher", "log_probs"].any()
    with pytest.raises(ConfigError, match=r"must be http://HOST:PORT"):
        Teacher("http://")


class Other(BaseHTTPRequestHandler):
    """A server of another kind: it answers from `answers`."""

    answers: dict = {}

    def _answer(self):
        self.rfile.read(int(self.headers.get("content-length") or 0))
        found = self.answers.get(self.path)
        body = json.dumps(found if found is not None else {"error": "no such route"}).encode()
        self.send_response(404 if found is None else 200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = _answer

    def log_message(self, *_):
        pass


@pytest.fixture
def other():
    with HTTPServer(("127.0.0.1", 0), Other) as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{made.server_port}"
        made.shutdown()
        thread.join()


def test_other_servers_are_checked(student, other, monkeypatch):
    models = {"/v1/models": {"data": [{"id": "m", "owned_by": "vllm"}]}}
    monkeypatch.setattr(Other, "answers", models)
    with pytest.raises(ConfigError, match="does not tokenize .*same_tokenizer=True"):
        rollout(student, Teacher(other))
    monkeypatch.setattr(Other, "answers", models | {"/tokenize": {"tokens": [1, 2, 3]}})
    with pytest.raises(ConfigError, match="its tokenizer is not the policy's: of one text, token 0 has id"):
        rollout(student, Teacher(other))
    with pytest.raises(TeacherError, match="temperature=0.7 .* scores prompts at temperature 1"):
        rollout(student, Teacher(other, same_tokenizer=True))
    plain = PARAMS.clone(temperature=1.0)
    monkeypatch.setattr(Other, "answers", models | {"/inference/v1/generate": {"choices": []}})
    with pytest.raises(TeacherError, match="gave no prompt_token_id_logprobs"):
        rollout(student, Teacher(other, same_tokenizer=True), plain)
