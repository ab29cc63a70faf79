"""Decides whether sliding-window layers get a pool of their own, and divides memory."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from mlxserve.cache.groups import Window, max_useful_pages, pages_in, split, window_of
from mlxserve.cache.pool_memory import max_page_counts
from mlxserve.core.config import EngineConfig
from mlxserve.core.errors import InvalidConfig
from mlxserve.model.load import LoadedModel
from mlxserve.model.rank_group import Split

log = logging.getLogger("mlxserve.sizing")


@dataclass(frozen=True, slots=True)
class WindowGroup:
    """The sliding-window layers of a model, and the sizes of pages.

    page_bytes: bytes of a window page; 0 if this rank has no such layers
    other_page_bytes: bytes of a page of the other layers; 0 if this rank has none
    is_shared: pages of both share memory; otherwise it is divided once
    """

    window: Window
    page_bytes: int
    other_page_bytes: int
    is_shared: bool = False

    @property
    def page_size(self) -> int:
        return self.window.page_size

    def configured(self, config: EngineConfig) -> int:
        """Window pages to go with the configured pages; 0 if a separate pool saves nothing.

        Raises InvalidConfig.
        """
        assert config.num_pages is not None
        if config.num_window_pages is not None:
            self._refuse_too_few(config.num_window_pages)
            return config.num_window_pages
        options = config.scheduler
        max_pages = max_useful_pages(self.window, options.max_num_seqs, options.step_budget)
        return max_pages if max_pages < config.num_pages else 0

    def fitted(self, config: EngineConfig, nbytes: int, longest: int) -> tuple[int, int]:
        """Divide `nbytes` into (pages of the other layers, pages for windows).

        Of shared memory these are maxima.

        Window pages are 0 if not even one request could run.

        longest: tokens of a context. Raises InvalidConfig.
        """
        options = config.scheduler
        if self.is_shared:
            return max_page_counts(
                nbytes,
                self.other_page_bytes,
                self.page_bytes,
                self.window,
                num_seqs=options.max_num_seqs,
                step_tokens=options.step_budget,
            )
        if config.num_window_pages is not None:
            self._refuse_too_few(config.num_window_pages)
            left = nbytes - config.num_window_pages * self.page_bytes
            num_pages = pages_in(max(0, left), self.other_page_bytes)
            return num_pages, config.num_window_pages
        num_pages, num_window_pages = split(
            nbytes,
            self.other_page_bytes,
            self.page_bytes,
            self.window,
            longest=longest,
            num_seqs=options.max_num_seqs,
            step_tokens=options.step_budget,
            is_promised=options.max_model_len is not None,
        )
        return max(0, num_pages), num_window_pages

    def log_division(self, num_pages: int, num_window_pages: int, max_num_seqs: int) -> None:
        """Log the tokens and the windows that share the cache.

        Warns if there are fewer windows than requests that may run.
        """
        num_windows = self.window.num_windows(num_window_pages)
        if self.is_shared:
            log.info(
                "The cache is shared by up to %d tokens in layers that keep all positions and up to %.1f windows of "
                "the last %d tokens in the others: each running request needs one, and each conversation to be "
                "continued",
                num_pages * self.page_size,
                num_windows,
                self.window.size,
            )
            return
        log.info(
            "The cache is divided into %d tokens in layers that keep all positions and %.1f windows of the last %d "
            "tokens in the others: one for each running request, or each conversation to be continued",
            num_pages * self.page_size,
            num_windows,
            self.window.size,
        )
        if num_windows < max_num_seqs:
            log.warning(
                "At most %d requests longer than %d tokens run at the same time instead of %d: memory is kept for "
                "%d windows, and each needs one. Lower max_model_len, or raise num_window_pages or "
                "gpu_memory_utilization.",
                num_windows,
                self.window.size,
                max_num_seqs,
                num_windows,
            )

    def _refuse_too_few(self, num_window_pages: int) -> None:
        """Raises InvalidConfig."""
        if num_window_pages < self.window.num_held:
            raise InvalidConfig(
                f"num_window_pages={num_window_pages}, but a request needs {self.window.num_held} pages of "
                f"{self.page_size} tokens for this model's window of {self.window.size}. Raise it, leave "
                "it out, or set it to 0: then layers with a window keep all positions.",
                option="num_window_pages",
            )


def window_group(config: EngineConfig, loaded: LoadedModel) -> WindowGroup | None:
    """Return the group of sliding-window layers; None if all layers share one pool (logged)."""
    size = _window_of(loaded)
    if size is None or config.num_window_pages == 0:
        return None
    reason = _why_not(config, loaded)
    if loaded.all_max(int(bool(reason))):
        log.info("Layers with a window of %d keep all positions: %s", size, reason)
        return None
    sizes = {True: 0, False: config.page_size * loaded.draft_bytes_per_token}
    for spec in loaded.layers:
        sizes[spec.window is not None] += config.page_size * spec.bytes_per_token()
    # What ranks can have depends on each one's layers: they divide it once.
    is_asked = config.num_pages is not None or config.num_window_pages is not None
    is_shared = not is_asked and loaded.group is None and all(sizes.values())
    longest_block = 0 if loaded.vision is None else loaded.vision.longest_block
    window = Window(size, config.page_size, longest_block)
    return WindowGroup(window, sizes[True], sizes[False], is_shared)


def _window_of(loaded: LoadedModel) -> int | None:
    """Apply `window_of` to all layers, also those of other ranks."""
    windows = [spec.window for spec in loaded.layers]
    if loaded.group is None or loaded.group.split is Split.HEADS:
        return window_of(windows)
    widest = max((window for window in windows if window is not None), default=0)
    ranks = loaded.group.all_of([widest, int(None in windows)])
    size, num_seeing_all = max(row[0] for row in ranks), sum(row[1] for row in ranks)
    return size if size and num_seeing_all else None


def _why_not(config: EngineConfig, loaded: LoadedModel) -> str:
    """Return the reason why all layers share one pool; empty if there is none."""
    if loaded.by_sequence:
        return "other layers of this model need whole sequences"
    if not config.scheduler.enable_chunked_prefill:
        return "enable_chunked_prefill is off, so that a whole prompt needs its pages at once"
    return ""
