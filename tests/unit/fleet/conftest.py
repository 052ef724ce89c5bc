"""Halves of a module's fixture `made`, a service and its provider."""

import pytest


@pytest.fixture
def service(made):
    return made[0]


@pytest.fixture
def provider(made):
    return made[1]
