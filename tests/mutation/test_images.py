"""Features of other images, positions of none and pages of two: each is found when the model is loaded, or by a test."""

from __future__ import annotations

import pytest

from metal_kernels.x86 import written_out
from mlxserve import LLM
from mlxserve.core.errors import MlxServeError
from mlxserve.engine.side_work import SideWork
from mlxserve.images.picture import Picture
from mlxserve.model import batch, picture_rows
from mlxserve.model.forward import Rows
from mlxserve.model.picture_batch import PictureBatch
from mlxserve.model.picture_rows import PictureRows
from mlxserve.model.shown_pictures import ShownPictures
from mlxserve.model.vision import Vision
from tests import test_images
from tests.images import test_picture
from tests.model import test_image_probe, test_picture_rows, test_shown_pictures
from tests.model.small_vision import write_vision_model
from tests.model.test_image_probe import in_16_bits as in_16_bits
from tests.mutation.bug import Bug
from tests.test_images import Model, Serve
from tests.test_images import serve as serve

pytestmark = pytest.mark.mutation

_ANSWERS = test_images.test_images_alone_together_and_cached
_CHUNKS = test_images.test_images_in_chunks_preempted_and_beside_drafts
_HALF = test_image_probe.test_a_model_in_16_bits_sees
_BOTH_WAYS = test_images.test_rows_of_an_image_see_all_of_it_where_windows_have_pages_of_their_own
FOUND: dict[str, Bug] = {
    "show the features of another image": Bug(
        Vision,
        "see",
        "return self._features[picture.key]",
        "return next(iter(self._features.values()))",
        _ANSWERS,
    ),
    "begin each chunk with an image's first rows": Bug(
        picture_rows,
        "_parts",
        "int(rows[first]), int(rows[last])",
        "0, int(rows[last] - rows[first])",
        _CHUNKS,
    ),
    "number the rows of each image from the first": Bug(
        PictureRows,
        "from_chunks",
        "num_rows += count",
        "num_rows = 0",
        test_picture_rows.test_rows_of_all_chunks_are_numbered_in_their_order,
    ),
    "go on after an image as after its rows": Bug(
        picture_rows, "positions_of", "] += placed.picture.shift", "] += 0", _ANSWERS
    ),
    "turn an image's rows as text": Bug(
        picture_rows, "positions_of", "inside = np.indices", "inside = 0 * np.indices", _ANSWERS
    ),
    "add what the first layer adds after each": Bug(
        ShownPictures, "deepen", "self.features.deep[layer]", "self.features.deep[0]", _ANSWERS
    ),
    "in 16 bits, go on after an image as after its rows": Bug(
        picture_rows, "positions_of", "] += placed.picture.shift", "] += 0", _HALF
    ),
    "in 16 bits, turn an image's rows as text": Bug(
        picture_rows, "positions_of", "inside = np.indices", "inside = 0 * np.indices", _HALF
    ),
    **{
        f"in 16 bits, turn an image's rows of {kind} as text": Bug(
            picture_rows,
            "positions_of",
            "inside = np.indices",
            "inside = 0 * np.indices",
            test_image_probe.test_every_other_family_sees_in_16_bits,
            {"kind": kind},
        )
        for kind in ("qwen2_5_vl", "glm4v")
    },
    "in 16 bits, begin each chunk with an image's first rows": Bug(
        picture_rows,
        "_parts",
        "int(rows[first]), int(rows[last])",
        "0, int(rows[last] - rows[first])",
        _HALF,
    ),
    "in 16 bits, add what the first layer adds after each": Bug(
        ShownPictures, "deepen", "self.features.deep[layer]", "self.features.deep[0]", _HALF
    ),
    "multiply an image's features by what multiplies text": Bug(
        ShownPictures,
        "scale",
        "mx.array(1, self._dtype)",
        "mx.array(of_text, self._dtype)",
        test_shown_pictures.test_features_are_not_multiplied_and_their_rows_are_token_0_for_layers,
    ),
    "look at an image whose rows are cached": Bug(
        SideWork,
        "image_encoding",
        "if placed.end > num_found",
        "if True",
        test_images.test_an_image_whose_rows_are_cached_is_not_computed_again,
    ),
    "mix the features of images that are computed at once": Bug(
        PictureBatch,
        "rows",
        "indices + start",
        "indices",
        test_images.test_images_of_one_shape_that_wait_are_computed_at_once,
    ),
    "give up features that were just computed": Bug(
        Vision,
        "_give_up_one",
        "*others, _ = self._features",
        "others = [*reversed(self._features)]",
        test_images.test_features_that_were_given_up_are_computed_again,
    ),
    "end what the rows of an image see one row early": Bug(
        batch,
        "_ahead",
        "end - chunk.start] = end",
        "end - chunk.start - 1] = end - 1",
        test_picture_rows.test_rows_of_an_image_see_up_to_its_end,
    ),
    "end it one row early in a tile": Bug(
        written_out,
        "_seen_by",
        "ends[:, None] - 1",
        "ends[:, None] - 2",
        _BOTH_WAYS,
        {"kind": "gemma4_31b"},
    ),
    "see all of an image in other layers": Bug(
        Rows,
        "_with_images",
        "is Bidirectional.ALL_LAYERS",
        "is not Bidirectional.ALL_LAYERS",
        _BOTH_WAYS,
        {"kind": "gemma4_31b"},
    ),
    "see all of an image in the first pool only": Bug(
        Rows,
        "_with_images",
        "windows = replace(windows, chunks=batch.windows.ahead)",
        "pass",
        _BOTH_WAYS,
        {"kind": "gemma3"},
    ),
    "share a page of two images": Bug(
        test_picture,
        "extend_hashes",
        "for first, last, key in marks if",
        "for first, last, key in () if",
        test_picture.test_pages_of_different_images_never_have_the_same_hash,
    ),
    "know an image by its shape": Bug(
        Picture,
        "from_prompt",
        "_row_ids(key, num_rows)",
        '_row_ids(b"", num_rows)',
        test_picture.test_rows_have_ids_that_follow_from_what_the_tower_is_given,
    ),
    "share the beginning of an image by one row": Bug(
        test_picture,
        "num_distinct",
        "MIN_ROWS",
        "1",
        test_picture.test_few_rows_of_an_image_do_not_show_that_it_is_the_same,
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(write_vision_model(tmp_path_factory.mktemp("qwen3_vl"), "qwen3_vl"))


@pytest.fixture
def shared(serve: Serve) -> LLM:
    """Not with the next bug, which would find the pages that this one has written."""
    return serve()


@pytest.mark.parametrize("name", FOUND)
def test_the_load_or_a_test_finds_the_bug_of_images(
    name: str, request: pytest.FixtureRequest
) -> None:
    FOUND[name].check_found(request, (AssertionError, MlxServeError))
