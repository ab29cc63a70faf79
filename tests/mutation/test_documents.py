"""Rules of documents in prompts: without each a test fails."""

from __future__ import annotations

import pytest

from mlxserve.chat.document_prompts import DocumentPrompts
from mlxserve.chat.part_scores import PartScores
from mlxserve.text.documents import folder as folders
from mlxserve.text.documents import placement
from mlxserve.text.documents.read_worker import ReadWorker
from mlxserve.text.documents.reader import DocumentReader
from tests.api import test_documents as test_api_documents
from tests.api.conftest import client as client
from tests.api.test_documents import chat as chat
from tests.chat import test_part_scores
from tests.chat.test_part_scores import model as model
from tests.mutation.bug import Bug
from tests.text.documents import test_folder, test_placement, test_read_worker, test_reader
from tests.text.documents.test_folder import folder as folder
from tests.text.documents.test_reader import documents as documents

pytestmark = pytest.mark.mutation

FOUND: dict[str, Bug] = {
    "put a document after the system prompt": Bug(
        test_placement,
        "with_documents",
        "opening[0] = opening[0].after(before)",
        "opening[0] = before.after(opening[0])",
        test_placement.test_a_document_stands_before_the_system_prompt_and_the_question,
    ),
    "move a document of a later question to the front": Bug(
        test_placement,
        "with_documents",
        "each.role != ASSISTANT",
        "True",
        test_placement.test_a_document_of_a_later_question_stays_with_it,
    ),
    "write a file's name before its text": Bug(
        placement,
        "_text_of",
        'return PARAGRAPH.join([*texts, f"{titles} {_ABOUT}"])',
        'return PARAGRAPH.join([f"{titles} {_ABOUT}", *texts])',
        test_placement.test_other_questions_names_and_system_prompts_have_the_same_beginning,
    ),
    "leave chosen parts in the order of their scores": Bug(
        test_placement,
        "chosen_parts",
        "return sorted(chosen)",
        "return chosen",
        test_placement.test_parts_are_chosen_by_the_words_of_the_question_in_the_documents_order,
    ),
    "find the text of another key's document": Bug(
        DocumentReader,
        "read",
        "self._kept.get(owner, key)",
        'self._kept.get("", key)',
        test_reader.test_a_document_of_another_key_is_read_as_if_it_were_new,
    ),
    "follow links out of a folder": Bug(
        folders,
        "_files",
        "or entry.is_symlink()",
        "",
        test_folder.test_a_folder_is_a_tree_and_the_files_that_are_not_ignored,
    ),
    "take the first rule for a file that two rules name": Bug(
        folders,
        "_is_ignored",
        "reversed(rules)",
        "rules[:1]",
        test_folder.test_a_folder_is_a_tree_and_the_files_that_are_not_ignored,
    ),
    "fill the context of a model with documents": Bug(
        DocumentPrompts,
        "_budget",
        "if each * limit <= room",
        "if True",
        test_api_documents.test_a_document_leaves_room_for_a_long_question,
    ),
    "take the images of every page of a scan": Bug(
        ReadWorker,
        "page_images",
        "pages[:MAX_SCANS]",
        "pages",
        test_read_worker.test_of_a_long_scan_the_first_pages_are_read,
    ),
    "keep vectors of parts for all keys together": Bug(
        PartScores,
        "compare",
        "self._kept.get(owner, key)",
        'self._kept.get("good", key)',
        test_part_scores.test_parts_are_embedded_once_for_each_key,
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_rule_of_documents_that_is_broken_is_found(
    name: str, request: pytest.FixtureRequest
) -> None:
    FOUND[name].check_found(request, (AssertionError,))
