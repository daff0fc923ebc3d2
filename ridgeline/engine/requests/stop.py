"""Stop strings over a stream: text is let through as soon as it can no longer be the start of one.

watcher = StopWatcher(("END",))
watcher.push("one E")   # -> "one "      ("E" may yet become "END")
watcher.push("ND two")  # -> ""          watcher.match == "END"
"""

from __future__ import annotations


class StopWatcher:
    def __init__(self, stops: tuple[str, ...]) -> None:
        self.stops = stops
        self.match: str | None = None  # the stop string that ended the text
        self._held = ""

    @property
    def stopped(self) -> bool:
        return self.match is not None

    def push(self, text: str) -> str:
        """Take new text and return what is safe to show; nothing after a stop string."""
        if not self.stops:
            return text
        if self.match is not None:
            return ""
        held = self._held + text
        matches = [
            (held.find(stop) + len(stop), held.find(stop), stop)
            for stop in self.stops
            if stop in held
        ]
        if matches:
            self._held = ""
            # The one that is complete first, however the text was cut.
            _, start, self.match = min(matches)
            return held[:start]
        keep = possible_start(held, self.stops)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def finish(self) -> str:
        """The stream has ended: what was held back is text after all."""
        held, self._held = self._held, ""
        return held


def possible_start(text: str, stops: tuple[str, ...]) -> int:
    """Length of the longest end of `text` with which one of these strings begins."""
    longest = max((len(stop) - 1 for stop in stops), default=0)
    for size in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stops):
            return size
    return 0
