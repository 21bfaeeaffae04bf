"""Log-probability rows as the arrays of the job protocol."""

from __future__ import annotations

import torch


def arrays(rows: list[tuple[int, int, int, float]]) -> dict[str, torch.Tensor]:
    """(request, position, token, log-probability) rows as the job protocol's arrays. Python floats carry fp32 exactly."""
    request, position, token, logprob = zip(*rows, strict=True) if rows else ((), (), (), ())
    return {"request": torch.tensor(request, dtype=torch.int32), "position": torch.tensor(position, dtype=torch.int32),
            "token": torch.tensor(token, dtype=torch.int64), "logprob": torch.tensor(logprob, dtype=torch.float64).to(torch.float32)}
