"""Which rows of a flattened training batch belong to which sequence."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Layout:
    """A batch of sequences flattened to rows. Padded batches keep their padding rows, packed ones have none."""

    starts: tuple[int, ...]
    """first row of each sequence"""
    lengths: tuple[int, ...]
    """tokens of each sequence, padding not counted"""
    rows: int
    """rows in the flattened batch"""
    width: int | None
    """padded: tokens per batch row, so that rows = batch * width; None: packed"""

    @classmethod
    def padded(cls, lengths: list[int]) -> Layout:
        width = max(lengths)
        return cls(tuple(i * width for i in range(len(lengths))), tuple(lengths), width * len(lengths), width)

    @classmethod
    def packed(cls, lengths: list[int]) -> Layout:
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        return cls(tuple(starts), tuple(lengths), sum(lengths), None)

    def spans(self) -> list[tuple[int, int]]:
        """(first row, one past the last row) of each sequence."""
        return [(start, start + length) for start, length in zip(self.starts, self.lengths, strict=True)]

    def positions(self) -> torch.Tensor:
        """int64 [rows]: position in its sequence; padding rows count on."""
        if self.width is not None:
            return torch.arange(self.width).repeat(self.rows // self.width)
        return torch.cat([torch.arange(length) for length in self.lengths])

    def pad(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows, ...] -> [batch, width, ...], zeros behind short sequences of a packed batch."""
        if self.width is not None:
            return rows.view(-1, self.width, *rows.shape[1:])
        return torch.nn.utils.rnn.pad_sequence([rows[a:b] for a, b in self.spans()], batch_first=True)

    def flatten(self, batch: torch.Tensor) -> torch.Tensor:
        """Inverse of `pad`."""
        if self.width is not None:
            return batch.reshape(self.rows, *batch.shape[2:])
        return torch.cat([batch[i, :length] for i, length in enumerate(self.lengths)])
