"""Features of images on several ranks: rank 0 encodes images, and each step's graph sends its rows to all.

    rank 0   image encoder ──▶ features, kept by picture ──▶ rows of the step ──┬──▶ embedding, first layers
    others                                      zeros ─────── all_gather ──────┴──▶ the same

Only rows of the step are sent, so that the other ranks keep nothing, and a request that was preempted or whose
features were dropped needs no message of its own. By heads a layer sums two arrays of that size in each step, and by
layers a stage sends one: once more is little. An encoder on each rank would take its memory there, and every image
would have to be sent as pixels. All ranks get them, also those without the first layers: features that are added
after a layer may belong to another stage, and Gemma 4 reads embeddings in each layer.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import mlx.core as mx

from mlxserve.model.bidirectional import Bidirectional
from mlxserve.model.picture_rows import PictureRows
from mlxserve.model.rank_group import RankGroup
from mlxserve.model.shown_pictures import Features, ShownPictures


class SharedFeatures:
    """Sends the features of a step's rows from rank 0 to all ranks, which know their shape and dtype."""

    def __init__(self, group: RankGroup, hidden: int, dtype: mx.Dtype, num_deep: int) -> None:
        """num_deep: layers after which features are added."""
        self._group = group
        self._hidden = hidden
        self._dtype = dtype
        self._num_arrays = 1 + num_deep

    def nbytes(self, num_rows: int) -> int:
        """Return the bytes of a step's features on this rank: its own ones, and those gathered of all ranks."""
        row_nbytes = self._num_arrays * self._hidden * self._dtype.size
        return (1 + self._group.size) * num_rows * row_nbytes

    def share(self, features: Features | None, num_rows: int) -> Features:
        """Return rank 0's features of a step's rows; other ranks pass None.

        Evaluated before the forward, whose collectives do not depend on them on every rank.
        """
        if features is None:
            own = mx.zeros((self._num_arrays, num_rows, self._hidden), self._dtype)
        else:
            own = mx.stack([features.rows, *features.deep]).astype(self._dtype)
        shared = self._group.share(own)
        mx.async_eval(shared)  # type: ignore[no-untyped-call]
        return Features(shared[0], tuple(shared[1:]))


class RemoteVision:
    """The vision of a rank that has no image encoder. Lives on the thread that computes."""

    # A model with such a text part is not divided among ranks.
    is_told_positions = False
    nbytes = 0  # of weights

    def __init__(
        self,
        shown: ShownPictures,
        shared: SharedFeatures,
        bidirectional: Bidirectional | None,
        longest_block: int,
    ) -> None:
        """bidirectional, longest_block: as in `Vision`."""
        self.bidirectional = bidirectional
        self.longest_block = longest_block
        self._shown = shown
        self._shared = shared

    def planned_nbytes(self, num_rows: int) -> int:
        """Return the bytes that a step of so many rows needs for features."""
        return self._shared.nbytes(num_rows)

    def showing(self, pictures: PictureRows) -> AbstractContextManager[None]:
        """Show rank 0's features while the text model is called for a step."""
        positions = None
        if pictures.positions is not None and pictures.parts:
            positions = mx.array(pictures.positions)
        features = self._shared.share(None, pictures.num_rows) if pictures.parts else None
        return self._shown.showing(features, positions)
