"""Per-operator fingerprints and dumps, keyed by (request, token position, site).

A fingerprint is an integer checksum of a row's bits: the sum over columns of bits * odd constant(column), modulo 2^63. Integer addition has no
order, so it is the same however the row was computed, and it can be taken on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

ABSENT = -1
CHUNK = 1 << 24
"""elements fingerprinted at a time, whose bits are widened to 64"""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MASK = (1 << 62) - 1


def fingerprint(rows: torch.Tensor) -> torch.Tensor:
    """rows [T, ...] of any dtype -> int64 [T], never negative."""
    flat = rows.detach().flatten(1).contiguous() if rows.ndim > 1 else rows.detach()[:, None]
    if flat.numel() > CHUNK and len(flat) > 1:
        return torch.cat([fingerprint(part) for part in flat.split(max(1, CHUNK // flat.shape[1]))])
    bits = flat.view(_BITS[flat.element_size()]).to(torch.int64)
    columns = torch.arange(bits.shape[1], dtype=torch.int64, device=bits.device)
    odd = (columns * 0x2545F4914F6CDD1D + 0x1B873593) | 1
    return ((bits ^ (bits << 21)) * odd).sum(-1) & _MASK


def ignore(site: Site, rows: torch.Tensor) -> None:
    """The recorder of a forward that nobody watches."""


def plain(block, x: torch.Tensor, residual: torch.Tensor | None):
    """How a forward runs one layer when nothing is to be recomputed in the backward pass."""
    return block(x, residual)


@dataclass(frozen=True)
class Site:
    """The output of one operator at one place of the model."""

    key: str
    layer: int
    operator: str
    role: str


class Recorder:
    """Collects fingerprints (and, for chosen sites, whole rows) of one traced run.

    `rows` of an engine step are mapped to global rows first (`begin`), so an operator only says `record(site, tensor)`.
    """

    def __init__(self, lengths: list[int], dump: list[str] | None = None):
        """lengths: tokens per request; dump: site keys whose rows are kept whole."""
        self.offsets = [sum(lengths[:i]) for i in range(len(lengths))]
        self.total = sum(lengths)
        self.request = torch.cat([torch.full((n,), i, dtype=torch.int32) for i, n in enumerate(lengths)])
        self.position = torch.cat([torch.arange(n, dtype=torch.int32) for n in lengths])
        self.lengths = lengths
        self.dump_keys = set(dump or ())
        self.sites: dict[str, Site] = {}
        self.prints: dict[str, torch.Tensor] = {}
        self.dumps: dict[str, torch.Tensor] = {}
        self.index: torch.Tensor | None = None
        self.places: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def begin(self, requests: torch.Tensor, positions: torch.Tensor) -> None:
        """int64 [T] request and position of each row of the coming step; request -1 marks a row to ignore."""
        requests, positions = requests.cpu(), positions.cpu()
        offsets = torch.tensor([*self.offsets, 0])
        valid = (requests >= 0) & (positions < torch.tensor([*self.lengths, 0])[requests])
        self.index = torch.where(valid, offsets[requests] + positions, -1)
        self.place("row", self.index)

    def place(self, name: str, index: torch.Tensor) -> None:
        """Keeps in which call, and where in it, each row was computed last; `index` [T] are global rows, -1 for rows to ignore."""
        if name not in self.places:
            self.places[name] = tuple(torch.full((self.total,), ABSENT, dtype=torch.int32) for _ in range(2))
        step, slot = self.places[name]
        keep = index >= 0
        step[index[keep]] = step.max() + 1
        slot[index[keep]] = torch.arange(len(index), dtype=torch.int32)[keep]

    def record(self, site: Site, value: torch.Tensor, rows: slice | torch.Tensor | None = None) -> None:
        """value [T, ...]: the operator's rows of this step, or of the part `rows` of it."""
        index = self.index if rows is None else self.index[rows]
        index = index[:value.shape[0]]
        value = value[:index.shape[0]]
        keep = index >= 0
        if site.key not in self.sites:
            self.sites[site.key] = site
            self.prints[site.key] = torch.full((self.total,), ABSENT, dtype=torch.int64)
        # on a device all rows are hashed there and the hashes selected here
        self.prints[site.key][index[keep]] = fingerprint(value[keep]) if value.is_cpu else fingerprint(value).cpu()[keep]
        if site.key in self.dump_keys:
            if site.key not in self.dumps:
                self.dumps[site.key] = torch.zeros(self.total, *value.shape[1:], dtype=value.dtype)
            self.dumps[site.key][index[keep]] = value.detach()[keep.to(value.device)].cpu()

    def record_prints(self, site: Site, prints: torch.Tensor) -> None:
        """prints int64 [T]: fingerprints of the operator's rows of this step, taken on the device."""
        keep = self.index >= 0
        if site.key not in self.sites:
            self.sites[site.key] = site
            self.prints[site.key] = torch.full((self.total,), ABSENT, dtype=torch.int64)
        self.prints[site.key][self.index[keep]] = prints[keep]

    def arrays(self) -> dict[str, torch.Tensor]:
        return {"row_request": self.request, "row_position": self.position,
                **{f"{name}_{what}": v for name, place in self.places.items() for what, v in zip(("step", "slot"), place, strict=True)},
                **{f"fp/{k}": v for k, v in self.prints.items()},
                **{f"dump/{k}": v.reshape(self.total, -1).contiguous() for k, v in self.dumps.items()}}

    def site_list(self) -> list[dict]:
        return [vars(site) for site in sorted(self.sites.values(), key=site_order)]


def site_order(site: Site) -> tuple:
    """Execution order: embedding, layers in turn with their operators in the family's order, then the head."""
    from consistency.models.catalog import SITE_RANK

    return site.layer, SITE_RANK.get(site.role, 99)
