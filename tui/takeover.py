"""Takes the terminal over from the opening frame, without flicker and without losing a key."""

from __future__ import annotations

from textual.driver import Driver
from textual.drivers.linux_driver import LinuxDriver
from textual.events import Paste

from tui.opening import ENTER, FirstFrame


def driver_after(frame: FirstFrame) -> type[Driver]:
    """Textual's driver for a terminal that already shows this frame."""

    class AfterFirstFrame(LinuxDriver):
        """Does not enter the alternate screen again, which would clear the frame."""

        _has_frame = True

        def start_application_mode(self) -> None:
            super().start_application_mode()  # type: ignore[no-untyped-call]
            if self._has_frame:
                self._has_frame = False
                # At the end, and for an editor, the modes from before the frame are restored.
                self.attrs_before = frame.modes
                frame.hand_over()
                if frame.typed:
                    self.process_message(Paste(frame.typed.replace("\r", "\n")))

        def write(self, data: str) -> None:
            if not (self._has_frame and data == ENTER):
                super().write(data)

    return AfterFirstFrame
