r"""Stop strings, looked for in a text that arrives piece by piece.

The text ends before the stop string that *starts* first; of two that start together, the shorter ends it. That rule
depends on the text alone, not on how it was cut into tokens, so a stream and a whole answer end at the same character.
Two things follow:

    stops "abcd", "bc"    text so far  x a b c      "bc" is complete, but "abcd" may still start one earlier:
                                       ^ |-----|    "x" can go out, "abc" is held until the next character decides
    stop "\n\nUser"       text so far  yes \n \n      the longest end that may still become a stop is held back,
                                       ^^^ |---|    and nothing more

`StopStrings` is the automaton of Aho and Corasick (1975): one state per beginning of a stop string, and after each
character the state of the longest beginning that the text ends with. Its depth is what has to be held back.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple


class StopStrings:
    """A set of stop strings, prepared for matching. Immutable; shared by all answers that stop at them.

    Args:
        strings: Not empty, each at least one character.
    """

    __slots__ = ("_children", "_depth", "_fallback", "_match", "first_characters", "strings")

    def __init__(self, strings: Sequence[str]) -> None:
        assert strings and all(strings), "stop strings have at least one character"
        self.strings = tuple(strings)
        self.first_characters = frozenset(string[0] for string in strings)
        self._children: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._match = [""]
        for string in self.strings:
            self._add(string)
        self._fallback = [0] * len(self._depth)
        self._link()

    def step(self, state: int, character: str) -> int:
        """Return the state after one more character. State 0 is the start: nothing matches. O(1) amortised."""
        while True:
            following = self._children[state].get(character)
            if following is not None:
                return following
            if state == 0:
                return 0
            state = self._fallback[state]

    def depth(self, state: int) -> int:
        """Return how many characters of a stop string the text ends with."""
        return self._depth[state]

    def match(self, state: int) -> str:
        """Return the longest stop string that the text ends with; empty if none."""
        return self._match[state]

    def open_state(self, state: int) -> int:
        """Return the state of the longest end that can still grow into a stop string."""
        while state and not self._children[state]:
            state = self._fallback[state]
        return state

    def _add(self, string: str) -> None:
        state = 0
        for character in string:
            following = self._children[state].get(character)
            if following is None:
                following = len(self._depth)
                self._children[state][character] = following
                self._children.append({})
                self._depth.append(self._depth[state] + 1)
                self._match.append("")
            state = following
        self._match[state] = string

    def _link(self) -> None:
        """Find for each state the longest proper end of it that is a state too, level by level."""
        level = list(self._children[0].values())
        while level:
            deeper: list[int] = []
            for state in level:
                for character, child in self._children[state].items():
                    self._fallback[child] = self.step(self._fallback[state], character)
                    deeper.append(child)
                self._match[state] = self._match[state] or self._match[self._fallback[state]]
            level = deeper


@lru_cache(maxsize=32)
def prepare_stops(strings: tuple[str, ...]) -> StopStrings:
    """Return the automaton of some stop strings; requests with the same ones share it."""
    return StopStrings(strings)


class Released(NamedTuple):
    """Text that may go out, and the stop string that ends it, if one does."""

    text: str
    stopped_by: str | None = None


class StopMatcher:
    """Looks for stop strings in one text.

    Args:
        stops: The strings.
        include_stop: Leave the stop string at the end of the text.

    Mutates: itself, in `feed` and `finish`; after either has reported a stop nothing may be fed any more.
    """

    __slots__ = ("_found", "_held", "_include_stop", "_state", "_stops")

    def __init__(self, stops: StopStrings, *, include_stop: bool) -> None:
        self._stops = stops
        self._include_stop = include_stop
        self._state = 0
        self._held = ""
        # Start, within the held text, and string of the stop that ends the text unless an earlier one completes.
        self._found: tuple[int, str] | None = None

    def feed(self, text: str, *, may_stop: bool = True) -> Released:
        """Take more text; return what can no longer be part of a stop string.

        Args:
            may_stop: Off ignores a stop string that completes in this piece (before `min_tokens`).

        Cost: O(held and new characters), and next to nothing while no stop string has begun.
        """
        if self._state == 0 and self._stops.first_characters.isdisjoint(text):
            return Released(text)
        stops, state = self._stops, self._state
        whole = self._held + text
        for i, character in enumerate(text, start=len(self._held) + 1):
            state = stops.step(state, character)
            stop = stops.match(state)
            if stop and may_stop:
                start = i - len(stop)
                if self._found is None or start < self._found[0]:
                    self._found = (start, stop)
            elif stop:
                state = stops.open_state(state)
            if self._found is not None and i - stops.depth(state) >= self._found[0]:
                return self._cut(whole)
        self._state = state
        num_released = len(whole) - stops.depth(state)
        self._held = whole[num_released:]
        if self._found is not None:
            self._found = (self._found[0] - num_released, self._found[1])
        return Released(whole[:num_released])

    def finish(self) -> Released:
        """Return the held text at the end of the answer: no earlier stop string can complete any more."""
        if self._found is not None:
            return self._cut(self._held)
        held, self._held, self._state = self._held, "", 0
        return Released(held)

    def _cut(self, text: str) -> Released:
        assert self._found is not None
        start, stop = self._found
        self._held, self._state, self._found = "", 0, None
        return Released(text[: start + len(stop)] if self._include_stop else text[:start], stop)
