"""Functions are verbs, with an object if they need one: `reword_error`, not `_worded`."""

import ast
import re

import pytest

# Words that are no participle although they end in "ed".
BASE_FORMS = {"embed", "exceed", "feed", "heed", "need", "proceed", "seed", "shed", "speed", "succeed"}
# Participles of irregular verbs whose base form is another word.
IRREGULAR = {
    *(
        "begun",
        "bound",
        "broken",
        "brought",
        "built",
        "chosen",
        "done",
        "drawn",
        "fed",
        "found",
        "given",
        "gone",
        "held",
    ),
    *("hidden", "kept", "known", "laid", "left", "lost", "made", "met", "said", "sent", "shown", "spent", "struck"),
    *("taken", "thought", "thrown", "told", "torn", "understood", "won", "worn", "woken", "written"),
}
MOST = 60
"""Functions and methods left whose whole name is a participle. A change that renames some lowers the number."""


@pytest.mark.parametrize(
    ("name", "is_one"),
    {"_told": True, "checked": True, "_seed": False, "read": False, "reword_error": False, "__enter__": False}.items(),
)
def test_a_lone_participle_is_recognised(name, is_one):
    assert _is_participle(name) == is_one


def test_names_that_are_a_lone_participle_become_no_more(package_sources):
    found = [
        f"{source.where}:{function.lineno} {function.name}"
        for source in package_sources
        for function in source.functions()
        if _is_participle(function.name) and not any(map(_makes_property, function.decorator_list))
    ]
    assert len(found) <= MOST, f"name new ones by a verb, with its object (`reword_error`, not `_worded`): {found}"


def _is_participle(name: str) -> bool:
    word = name.strip("_")
    return word in IRREGULAR or (re.fullmatch(r"[a-z]+ed", word) is not None and word not in BASE_FORMS)


def _makes_property(decorator: ast.expr) -> bool:
    """Whether a function with this decorator is read as an attribute, for which a participle is right."""
    return "property" in ast.unparse(decorator) or ast.unparse(decorator).endswith(".setter")
