"""Sliding window over a stream of text: which text to check next and which text may be released.

Pure: no model, no clock. Tested invariant: a character is released only after a check passed whose text contains it and
the `hold_back` characters after it (fewer at the end of the text).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WindowSettings:
    """In characters. size: text of one check; hold_back: withheld after the last check; stride: new text per check."""

    size: int = 240
    hold_back: int = 80
    stride: int = 40

    def __post_init__(self) -> None:
        assert self.size >= self.hold_back + self.stride, "characters would leave without ever being in a window"


class HoldBackWindow:
    """`push` text, check `due()`, then `passed()` returns released text. After a failed check, do not call passed."""

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
        """The windows to check now, none if there is too little new text. They cover all text not yet checked."""
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
        """The released text, after every window of the last due() passed."""
        limit = self._num_checked if is_end else max(0, self._num_checked - self._settings.hold_back)
        released = self._text[self._num_released - self._num_dropped : max(0, limit - self._num_dropped)]
        self._num_released = max(self._num_released, limit)
        keep_from = max(0, min(self._num_released, self._num_checked - self._settings.size))
        if keep_from > self._num_dropped:
            self._text = self._text[keep_from - self._num_dropped :]
            self._num_dropped = keep_from
        return released
