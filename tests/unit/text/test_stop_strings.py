from hypothesis import given
from hypothesis import strategies as st

from rollout_engine.text.stop_strings import StopAutomaton, stop_automaton

words = st.text("ab", min_size=1, max_size=4)


def matches(stops, text):
    """[(end, longest stop that ends there)] and the state at the end."""
    automaton, state, found = StopAutomaton(stops), 0, []
    for end, char in enumerate(text, start=1):
        state = automaton.step(state, char)
        if automaton.match[state] is not None:
            found.append((end, automaton.match[state]))
    return found, automaton.num_held[state]


@given(stops=st.lists(words, min_size=1, max_size=5).map(tuple), text=st.text("abc", max_size=20))
def test_every_match_is_found_where_it_ends(stops, text):
    expected = []
    for end in range(1, len(text) + 1):
        here = [stop for stop in stops if text[:end].endswith(stop)]
        if here:
            expected.append((end, max(here, key=len)))
    assert matches(stops, text)[0] == expected


@given(stops=st.lists(words, min_size=1, max_size=5).map(tuple), text=st.text("abc", max_size=20))
def test_held_is_the_longest_end_that_may_still_become_a_stop_string(stops, text):
    begins = {stop[:length] for stop in stops for length in range(1, len(stop))}
    assert matches(stops, text)[1] == max((len(begin) for begin in begins if text.endswith(begin)), default=0)


def test_requests_with_the_same_stop_strings_share_an_automaton():
    assert stop_automaton(("x", "yz")) is stop_automaton(("x", "yz"))
