"""Who may call which route, for every row of the table."""

from pathlib import Path

import pytest

from rollout_engine.serve.app import App
from rollout_engine.serve.options import ServeOptions
from rollout_engine.serve.route import Access
from rollout_engine.serve.routes import ROUTES, as_markdown

from .conftest import Client

KEYS = {"": "none", "wrong": "wrong", "the-api-key": "client", "the-admin-key": "admin"}
MAY = {
    Access.ANYONE: {"none", "wrong", "client", "admin"},
    Access.CLIENT: {"client", "admin"},
    Access.ADMIN: {"admin"},
}
ROWS = [pytest.param(row, method, id=f"{method} {row.path}") for row in ROUTES for method in row.methods]


@pytest.fixture(scope="module")
def guarded(policy):
    """An application with keys."""
    app = App(policy, ServeOptions(api_key="the-api-key", admin_key="the-admin-key", host="0.0.0.0"))
    return Client(app)


@pytest.mark.quick(17)
@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
@pytest.mark.parametrize("row, method", ROWS)
def test_a_route_opens_to_its_keys_alone(guarded, row, method, header):
    path = f"{row.path}?no_such_field=1"  # whoever may call is refused for this, and nothing happens
    for key, who in KEYS.items():
        headers = {header: f"Bearer {key}" if header == "authorization" else key} if key else {}
        response = guarded.send(method, path, headers=headers)
        if who in MAY[row.access]:
            assert response.status_code not in (401, 403), (who, response.text)
        else:
            assert response.status_code == 401, (who, response.text)
            assert "key" in response.json()["error"]["message"]


def test_without_an_admin_key_control_is_closed(policy):
    client = Client(App(policy, ServeOptions(api_key="the-api-key")))
    headers = {"authorization": "Bearer the-api-key"}
    assert client.send("GET", "/v1/models", headers=headers).status_code == 200
    problem = client.problem("/pause", status=403, headers=headers)
    assert "--admin-key" in problem["message"] and not policy.is_paused()


@pytest.mark.parametrize(
    "headers, said",
    [
        ({"origin": "https://evil.example"}, "https://evil.example"),
        ({"origin": "null"}, "'null'"),
        ({"sec-fetch-site": "cross-site"}, "cross-site"),
        ({"sec-fetch-site": "same-site"}, "same-site"),
        ({"host": "evil.example"}, "names another machine"),
        ({"host": "evil.example:8000"}, "names another machine"),
    ],
)
def test_pages_in_a_browser_may_not_call(client, policy, headers, said):
    assert said in client.problem("/pause", status=403, headers=headers)["message"]
    assert not policy.is_paused()


@pytest.mark.parametrize("method, path", sorted({("GET", row.path) for row in ROUTES if "GET" in row.methods}))
def test_an_image_of_another_page_reaches_no_route(client, method, path):
    headers = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"}
    assert client.send(method, path, headers=headers).status_code == 403


def test_an_address_that_the_user_opens_is_answered(client):
    for site in ("none", "same-origin"):
        assert client.send("GET", "/v1/models", headers={"sec-fetch-site": site}).status_code == 200


CHANGES = sorted({row.path for row in ROUTES if row.access is Access.ADMIN} - {"/get_weights_by_name"})


@pytest.mark.parametrize("path", CHANGES)
def test_no_get_changes_anything(client, path):
    if path == "/flush_cache":  # clients of SGLang wait by it until nothing is computed
        assert "flushes nothing" in client.send("GET", path).json()["message"]
        return
    response = client.send("GET", path)
    assert response.status_code == 405 and response.headers["allow"] == "POST"
    assert "send a POST" in response.json()["error"]["message"]


def test_pages_that_were_given_leave_may_call_and_read(policy):
    client = Client(App(policy, ServeOptions(allowed_origins=["https://mine.example"])))
    page = {"origin": "https://mine.example", "sec-fetch-site": "cross-site"}
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    allowed = client.send("OPTIONS", "/v1/completions", headers=page | asked)
    assert allowed.status_code == 200 and allowed.headers["access-control-allow-headers"] == "content-type"
    response = client.send("GET", "/v1/models", headers=page)
    assert response.status_code == 200 and response.headers["access-control-allow-origin"] == "https://mine.example"
    other = client.send("OPTIONS", "/v1/completions", headers=asked | {"origin": "https://evil.example"})
    assert other.status_code == 403 and "access-control-allow-origin" not in other.headers


def test_the_page_of_routes_is_the_table():
    page = (Path(__file__).parents[3] / "docs/server.md").read_text()
    assert as_markdown() in page, "write docs/server.md anew: python -m rollout_engine.serve.routes"


def test_every_row_is_one_route():
    calls = [(method, row.path) for row in ROUTES for method in row.methods]
    assert len(calls) == len(set(calls)) and all(row.help for row in ROUTES)
