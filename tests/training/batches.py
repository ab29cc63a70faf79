"""Batches of token ids from conversations: sorted by length, padded, limited to a budget."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.training.conversation import Example, Sheet
from tests.training.tokenizer import END, START, ChatEncoder


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """The tokens of one conversation or sheet, and which of them count in the loss."""

    tokens: list[int]
    taught: list[bool]

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """Rows of equal length. Padding is at the end, so a causal network needs no mask for it."""

    tokens: Tensor  # (rows, tokens) ids
    taught: Tensor  # (rows, tokens) booleans: the token is the assistant's and counts in the loss

    @property
    def num_tokens(self) -> int:
        return int(self.tokens.numel())

    @property
    def num_taught(self) -> int:
        return int(self.taught[:, 1:].sum())


def encoded(
    examples: Iterator[Example], encoder: ChatEncoder, num_tokens: int, max_tokens: int
) -> list[TrainingRow]:
    """Examples of at least `num_tokens` in total; longer ones than `max_tokens` are dropped."""
    rows: list[TrainingRow] = []
    total = 0
    while total < num_tokens:
        row = _row(next(examples), encoder)
        if len(row) <= max_tokens:
            rows.append(row)
            total += len(row)
    return rows


def batched(rows: list[TrainingRow], num_tokens: int) -> list[TrainingBatch]:
    """`rows` in batches of at most `num_tokens` tokens including padding, shortest rows first."""
    batches: list[TrainingBatch] = []
    pending: list[TrainingRow] = []
    for row in sorted(rows, key=len):
        if pending and (len(pending) + 1) * len(row) > num_tokens:
            batches.append(_padded(pending))
            pending = []
        pending.append(row)
    return [*batches, _padded(pending)]


def _row(example: Example, encoder: ChatEncoder) -> TrainingRow:
    if isinstance(example, Sheet):
        return _sheet_row(example, encoder)
    text = encoder.render(example.messages, example.tools, open_turn=False)
    tokens = encoder.encode(text)
    return TrainingRow(tokens, encoder.taught(tokens))


def _sheet_row(sheet: Sheet, encoder: ChatEncoder) -> TrainingRow:
    """One assistant turn with a problem per line; the last result ends the turn."""
    tokens = encoder.encode(f"{START}assistant\n")
    taught = [False] * len(tokens)
    for i, (problem, result) in enumerate(sheet.problems, 1):
        ending = END if i == len(sheet.problems) else "\n"
        for text, is_taught in ((problem, False), (result + ending, True)):
            part = encoder.encode(text)
            tokens += part
            taught += [is_taught] * len(part)
    return TrainingRow(tokens, taught)


def _padded(rows: list[TrainingRow]) -> TrainingBatch:
    width = max(map(len, rows))
    tokens = torch.zeros(len(rows), width, dtype=torch.long)  # id 0 is <|endoftext|>
    taught = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = torch.tensor(row.tokens)
        taught[i, : len(row)] = torch.tensor(row.taught)
    return TrainingBatch(tokens, taught)
