"""Log-probability faults. Each differs from the exact operator in the one way its name says."""

import torch


def _logprobs(logits):
    return torch.log_softmax(logits, dim=-1, dtype=torch.float32)


def temperature(logits):
    return _logprobs(logits.float() / 0.7)


def top_p_renormalised(logits):
    """What is left after top-p 0.9 is normalised again; the rest is impossible."""
    values = _logprobs(logits)
    order = values.argsort(-1, descending=True)
    mass = values.gather(-1, order).exp().cumsum(-1)
    drop = torch.zeros_like(values, dtype=torch.bool).scatter(-1, order, torch.cat((torch.zeros_like(mass[..., :1]), mass[..., :-1]), -1) > 0.9)
    return _logprobs(logits.float().masked_fill(drop, -torch.inf))


def one_position_late(logits):
    return _logprobs(logits).roll(1, 0)


def by_logsumexp(logits):
    wide = logits.float()
    return wide - wide.logsumexp(-1, keepdim=True)


def rounded_result(logits):
    return torch.log_softmax(logits, dim=-1).float()
