import pytest

from rollout_engine.grammars.tokenizer_file import serialize_tokenizer
from rollout_engine.grammars.vocabulary import Vocabulary
from rollout_engine.testing import byte_tokenizer


@pytest.fixture(scope="session")
def vocabulary():
    """The byte tokenizer's: character c is token 3 + its place in the alphabet, 2 ends."""
    return Vocabulary(serialize_tokenizer(byte_tokenizer()), 259, [2])
