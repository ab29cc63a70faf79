"""QuestionQueue: the questions that wait for the running answer, shown above the composer."""

from __future__ import annotations

from mlxserve.history.messages import NewQuestion
from tui.chat.operations import Operation
from tui.widgets.window import ChatWindow


class QuestionQueue:
    """Questions in the order in which they were sent."""

    def __init__(self, window: ChatWindow) -> None:
        self._window = window
        self._waiting: list[NewQuestion] = []
        self.operation: Operation | None = (
            None  # runs before the questions, after the running answer
        )

    def add(self, question: NewQuestion) -> None:
        self._waiting.append(question)
        self._show()

    def add_first(self, question: NewQuestion) -> None:
        """Put a question that could not be asked before all others."""
        self._waiting.insert(0, question)
        self._show()

    def give_back(self, question: NewQuestion) -> None:
        """Put a question that was not asked into the composer, with those that wait."""
        self.add_first(question)
        self.return_to_composer()

    def take(self) -> NewQuestion | None:
        """Remove the first question and return it; None if none waits."""
        if not self._waiting:
            return None
        question = self._waiting.pop(0)
        self._show()
        return question

    def take_operation(self) -> Operation | None:
        """Remove the operation that runs before the questions and return it; None if there is none."""
        operation, self.operation = self.operation, None
        return operation

    def return_to_composer(self) -> None:
        """Move all questions back into the composer: after a failure the user decides."""
        if self._waiting:
            composer = self._window.composer
            # Images are read again from the files that the text mentions.
            returned = [each.typed if each.images else each.text for each in self._waiting]
            texts = [*returned, composer.text]
            self._waiting = []
            self._show()
            composer.write("\n\n".join(text for text in texts if text))

    def _show(self) -> None:
        self._window.show_queue([question.text for question in self._waiting])
