"""SideWork: an engine's work beside its steps: vectors and scores of texts, features of images."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.nn as nn

from mlxserve.engine.step_time_model import (
    MAX_METAL_PIECE,
    MAX_PIECE,
    EmbeddingTimeModel,
    StepTimer,
)
from mlxserve.images.picture import PictureReader
from mlxserve.model.dense_text import Result, TextWork
from mlxserve.model.embedding import Embedding
from mlxserve.model.runner import ModelRunner
from mlxserve.model.scoring import Scoring
from mlxserve.model.vision import ImageEncoding
from mlxserve.request import Pooling, Request
from mlxserve.scheduler.scheduler import Scheduler
from mlxserve.system import machine
from mlxserve.system.suspend_clock import RUNNING


class SideWork:
    """Creates work items and advances them in pieces between steps, on the engine's thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        timer: StepTimer,
        target: float | None,
        clock: Callable[[], float],
    ) -> None:
        """target: as in StepTimeModel."""
        self._scheduler = scheduler
        self._runner = runner
        self._timer = timer
        self._pace = EmbeddingTimeModel(
            target, MAX_METAL_PIECE if machine.is_metal() else MAX_PIECE
        )
        self._clock = clock

    def embedding(
        self,
        token_ids: Sequence[int],
        pooling: Pooling,
        dimensions: int | None,
        adapter: int | None = None,
    ) -> Embedding:
        """Create a work item that embeds a text. Raises the errors of `ModelRunner.embedding`."""
        return self._runner.embedding(token_ids, pooling, dimensions, adapter)

    def scoring(
        self, token_ids: Sequence[int], num_top: int, adapter: int | None = None
    ) -> Scoring:
        """Create a work item that scores a text. Raises the errors of `ModelRunner.scoring`."""
        return self._runner.scoring(token_ids, num_top, adapter)

    @property
    def model(self) -> nn.Module:
        """The model, for other work on texts. Its arrays belong to this thread."""
        return self._runner.model

    @property
    def picture_reader(self) -> PictureReader | None:
        """Reads images into pictures for the model; None if it reads text only."""
        return None if self._runner.vision is None else self._runner.vision.reader

    @property
    def no_vision_reason(self) -> str:
        """The reason of `ModelRunner.no_vision_reason`."""
        return self._runner.no_vision_reason

    def image_encoding(self, request: Request) -> ImageEncoding | None:
        """Create the work that encodes a request's images, or None if there is nothing to encode.

        It skips images with cached features, and those whose rows are all cached.
        """
        vision = self._runner.vision
        assert vision is not None, "the model reads text only"
        pace, scheduler = self._pace, self._scheduler
        num_found = scheduler.planner.admission.num_found(request)
        wanted = {
            placed.picture.key: placed.picture
            for placed in request.pictures
            if placed.end > num_found
        }
        pictures = [placed for key, placed in wanted.items() if not vision.keeps(key)]
        if not pictures:
            return None
        return ImageEncoding(
            vision, pictures, lambda: pace.seconds(is_busy=scheduler.has_work), self._clock
        )

    def advance(self, text: TextWork[Result]) -> Result | None:
        """Compute one piece, and return the result after the last one.

        Pieces are short while answers wait for their next token.
        """
        began, before = self._clock(), text.num_done
        pace = self._pace
        result = text.advance(pace.size(is_busy=self._scheduler.has_work))
        seconds = self._clock() - began
        if text.num_done > before and not RUNNING.was_paused(seconds):
            pace.observe(text.num_done - before, seconds)
        self._timer.disturb()
        return result
