"""Where a text that comes piece by piece ends: at the first string to be complete of those that end it."""

from collections.abc import Callable, Sequence


class Stopping:
    """
    Attributes:
        text: what is known for sure: nothing in it may turn out to begin a stop string.
        stopped: a stop string came; the text ends before it.
    """

    def __init__(self, stop: Sequence[str], tell: Callable[[str], None] | None = None):
        """
        Args:
            stop: strings that end the text.
            tell: is told what `text` grows by.
        """
        self.text, self.stopped = "", False
        self._known, self._stop, self._tell = "", stop, tell

    def add(self, piece: str) -> None:
        """Takes what comes next, unless the text has ended."""
        if self.stopped:
            return
        self._known += piece
        found = [(at + len(stop), at) for stop in self._stop if (at := self._known.find(stop)) >= 0]
        if found:  # of several the one that a reader would have written first, whatever the pieces
            self.stopped = True
            self._show(min(found)[1])
        else:
            self._show(len(self._known) - self._held())

    def end(self) -> None:
        """Nothing comes any more: what might have begun a stop string is text."""
        if not self.stopped:
            self._show(len(self._known))

    def _held(self) -> int:
        """Characters at the end that a stop string begins with."""
        return max((n for stop in self._stop for n in range(1, len(stop)) if self._known.endswith(stop[:n])), default=0)

    def _show(self, length: int) -> None:
        new, self.text = self._known[len(self.text) : length], self._known[:length]
        if new and self._tell:
            self._tell(new)
