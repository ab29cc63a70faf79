"""What a picture may do to the process that decodes it."""

from __future__ import annotations

import os
import signal


class Endless:
    def decode(self, _data: bytes, _most: int) -> None:
        while True:
            pass


class Hungry:
    def decode(self, _data: bytes, _most: int) -> None:
        bytearray(1 << 30)


class Ended:
    def decode(self, _data: bytes, _most: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)
