"""Paths of Tinker's protocol that contain an id."""

import re

_PATTERNS = (
    (re.compile(r"/api/v1/samplers/([^/]+)/?"), "/api/v1/samplers/{id}"),
    (re.compile(r"/api/v1/sessions/([^/]+)/finish/?"), "/api/v1/sessions/{id}/finish"),
    (re.compile(r"/api/v1/training_runs/([^/]+)/?"), "/api/v1/training_runs/{id}"),
    (re.compile(r"/api/v1/training_runs/([^/]+)/checkpoints/?"), "/api/v1/training_runs/{id}/checkpoints"),
    (
        re.compile(r"/api/v1/training_runs/([^/]+)/checkpoints/([^/]+)/([^/]+)"),
        "/api/v1/training_runs/{id}/checkpoints/{kind}/{name}",
    ),
)


def read_tinker_path(path: str) -> tuple[str, str]:
    """The path in the route table, and the id, "MODEL/KIND/NAME" of a checkpoint; any other path itself and ""."""
    if path.startswith("/api/v1/"):
        for pattern, row in _PATTERNS:
            if (found := pattern.fullmatch(path)) is not None:
                return row, "/".join(found.groups())
    return path, ""
