"""What the contract tests read: every Python file of the repository, parsed once."""

import pytest

from tests.contract.sources import PACKAGES, Source, read_sources


@pytest.fixture(scope="session")
def sources() -> list[Source]:
    """Every Python file of the packages, the examples and the tests."""
    return read_sources((*PACKAGES, "examples", "tests"))


@pytest.fixture(scope="session")
def package_sources(sources: list[Source]) -> list[Source]:
    return [source for source in sources if source.in_package]
