"""What the emulator raises on purpose, apart from the faults of a running kernel (`faults.py`).

EmulatorError
├── CompilerNotFound     neither clang nor the ziglang wheel
├── CacheNotUsable       the folder for compiled kernels is not private, or not writable
├── MetalSourceError     the text is not Metal: what `xcrun metal` would refuse
├── LaunchError          the dispatch does not fit the kernel: bindings, shapes, sizes
└── KernelFault          the kernel broke a rule of the execution model while running
"""


class EmulatorError(Exception):
    """Base of every error of the emulator."""


class CompilerNotFound(EmulatorError):
    """There is nothing to compile kernels with; the message says what to install."""


class CacheNotUsable(EmulatorError):
    """The folder for compiled kernels cannot be trusted, or cannot be written."""


class MetalSourceError(EmulatorError):
    """The kernel's text is refused; the message carries `file:line` of the Metal source."""


class LaunchError(EmulatorError, ValueError):
    """The arguments of a dispatch do not fit the kernel."""
