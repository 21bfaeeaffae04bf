"""Which rows of a flattened training batch belong to which sequence."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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

    def positions(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """int64 [rows]: position in its sequence; padding rows count on."""
        return self.kept("positions", device, lambda: self._positions().to(device))

    def _positions(self) -> torch.Tensor:
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

    # ---- for kernels over packed sequences --------------------------------------------------------------------------

    @functools.cached_property
    def _tables(self) -> dict[tuple[str, torch.device], Any]:
        return {}

    def kept(self, name: str, device: torch.device | str, make: Callable[[], Any]) -> Any:
        """What `make` returned the first time for this batch and device: tables that every layer needs are built once."""
        key = name, torch.device(device)
        if key not in self._tables:
            self._tables[key] = make()
        return self._tables[key]

    def cu_seqlens(self, device: torch.device | str) -> torch.Tensor:
        """int32 [sequences + 1]: where each sequence starts once padding is gone."""
        return self.kept("cu_seqlens", device, lambda: torch.tensor([0, *self.lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device))

    def _valid(self, device: torch.device) -> torch.Tensor:
        return self.kept("valid", device, lambda: torch.cat([torch.arange(a, b) for a, b in self.spans()]).to(device))

    def pack(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows, ...] -> the rows of sequences alone, one sequence after the other. Differentiable."""
        return rows if self.rows == sum(self.lengths) else rows.index_select(0, self._valid(rows.device))

    def unpack(self, rows: torch.Tensor) -> torch.Tensor:
        """Inverse of `pack`; padding rows are zero. Differentiable."""
        if self.rows == rows.shape[0]:
            return rows
        return rows.new_zeros(self.rows, *rows.shape[1:]).index_copy(0, self._valid(rows.device), rows)
