"""Taking the terminal over from the first frame, without a blink and without losing a key."""

from __future__ import annotations

from textual.driver import Driver
from textual.drivers.linux_driver import LinuxDriver

from tui.opening import ENTER, FirstFrame


def driver_after(frame: FirstFrame) -> type[Driver]:
    """The driver of Textual, for a terminal that shows this frame already."""

    class AfterFirstFrame(LinuxDriver):
        """Entering the other screen again would clear it, until the app has drawn its own."""

        _is_drawn = True

        def start_application_mode(self) -> None:
            super().start_application_mode()  # type: ignore[no-untyped-call]
            if self._is_drawn:
                self._is_drawn = False
                # What is restored at the end, and for an editor, is what was before the frame.
                self.attrs_before = frame.modes
                frame.hand_over()

        def write(self, data: str) -> None:
            if not (self._is_drawn and data == ENTER):
                super().write(data)

    return AfterFirstFrame
