"""Conversations to batches of token ids: sorted by length, padded a little, cut to a budget."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mlxserve.mini.conversation import Conversation
from mlxserve.mini.tokenizer import ChatEncoder


@dataclass(frozen=True, slots=True)
class Batch:
    """Conversations side by side. Padding comes last, so a causal network needs no mask for it."""

    tokens: Tensor  # (rows, tokens) ids
    taught: Tensor  # (rows, tokens) booleans: the assistant has to produce this token

    @property
    def num_tokens(self) -> int:
        return int(self.tokens.numel())

    @property
    def num_taught(self) -> int:
        return int(self.taught[:, 1:].sum())


def encoded(
    conversations: Iterator[Conversation], encoder: ChatEncoder, num_tokens: int, max_tokens: int
) -> list[list[int]]:
    """Token ids of as many conversations as make `num_tokens`, none above `max_tokens`."""
    rows: list[list[int]] = []
    total = 0
    while total < num_tokens:
        made = next(conversations)
        ids = encoder.encode(encoder.render(made.messages, made.tools, open_turn=False))
        if len(ids) <= max_tokens:
            rows.append(ids)
            total += len(ids)
    return rows


def batched(rows: list[list[int]], encoder: ChatEncoder, num_tokens: int) -> list[Batch]:
    """`rows` in batches of at most `num_tokens` tokens with padding, shortest rows first."""
    batches: list[Batch] = []
    pending: list[list[int]] = []
    for row in sorted(rows, key=len):
        if pending and (len(pending) + 1) * len(row) > num_tokens:
            batches.append(_padded(pending, encoder))
            pending = []
        pending.append(row)
    return [*batches, _padded(pending, encoder)]


def _padded(rows: list[list[int]], encoder: ChatEncoder) -> Batch:
    width = max(map(len, rows))
    tokens = torch.zeros(len(rows), width, dtype=torch.long)  # id 0 is <|endoftext|>
    taught = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = torch.tensor(row)
        taught[i, : len(row)] = torch.tensor(encoder.taught(row))
    return Batch(tokens, taught)
