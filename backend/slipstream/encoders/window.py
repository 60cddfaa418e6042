"""The sliding window over a stream of text: what to check next, and how much of it may leave.

Pure: no model, no clock. The rule that the tests hold it to: a character leaves only after a check passed whose text
held it, and `hold_back` characters after it too unless the text had ended.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WindowSettings:
    """All in characters. size: text of one check; hold_back: kept until more is known; stride: new text per check."""

    size: int = 240
    hold_back: int = 80
    stride: int = 40

    def __post_init__(self) -> None:
        assert self.size >= self.hold_back + self.stride, "characters would leave without ever being in a window"


class HoldBackWindow:
    """push text, check `due()`, then `passed()` gives what may leave. A failed check: never call passed again."""

    def __init__(self, settings: WindowSettings) -> None:
        self._settings = settings
        self._text = ""  # from the first character that a later window may need
        self._num_dropped = 0  # characters before _text
        self._num_released = 0
        self._num_checked = 0  # characters, from the start, that a check or due() has covered

    def push(self, text: str) -> None:
        self._text += text

    @property
    def num_received(self) -> int:
        return self._num_dropped + len(self._text)

    def due(self, is_end: bool = False) -> list[str]:
        """The windows to check now, none when too little is new. All text not yet checked is in one of them."""
        new = self.num_received - self._num_checked
        if new == 0 or (new < self._settings.stride and not is_end):
            return []
        windows, end = [], self.num_received
        step = self._settings.size - self._settings.hold_back
        while True:
            start = max(0, end - self._settings.size)
            windows.append(self._text[max(0, start - self._num_dropped) : end - self._num_dropped])
            # an older window is needed while unchecked text, or released text's context, lies before this one
            if start <= max(0, self._num_checked - self._settings.hold_back):
                break
            end -= step
        self._num_checked = self.num_received
        return windows[::-1]

    def passed(self, is_end: bool = False) -> str:
        """What may leave, now that every window of the last due() passed."""
        limit = self._num_checked if is_end else max(0, self._num_checked - self._settings.hold_back)
        released = self._text[self._num_released - self._num_dropped : max(0, limit - self._num_dropped)]
        self._num_released = max(self._num_released, limit)
        keep_from = max(0, min(self._num_released, self._num_checked - self._settings.size))
        if keep_from > self._num_dropped:
            self._text = self._text[keep_from - self._num_dropped :]
            self._num_dropped = keep_from
        return released
