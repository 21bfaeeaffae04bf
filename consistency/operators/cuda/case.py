"""How an operator describes itself to the survey, the benchmark and the tests: once, at its true shapes."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

SWEEP = (1, 2, 3, 4, 5, 7, 8, 9, 10, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300, 511, 512, 513, 1024)
"""Row counts around every border at which a known kernel changes its launch: 4, 8, 9/10, 16, 32, 64, 128, 256, 512."""

Tensors = tuple[torch.Tensor, ...]
Function = Callable[..., torch.Tensor]


def columns(*tensors: torch.Tensor) -> torch.Tensor:
    """Several outputs as one fp32 tensor [rows, ...]. bf16, FP8 and fp32 values keep their bits."""
    return torch.cat([t.reshape(t.shape[0], -1).float() for t in tensors], 1)


@dataclass(frozen=True)
class Inputs:
    """Inputs of one call. The first `m` entries of every `rows` tensor are the inputs of a batch of `m` rows."""

    rows: Tensors
    shared: Tensors

    def take(self, count: int) -> Tensors:
        """Arguments of a call on the first `count` rows."""
        return tuple(t[:count] for t in self.rows) + self.shared

    def row(self, index: int) -> Tensors:
        """Arguments of a call on one row alone."""
        return tuple(t[index : index + 1] for t in self.rows) + self.shared


@dataclass(frozen=True)
class Case:
    """One operator at one shape of one or more model families."""

    operator: str
    shape: str
    families: tuple[str, ...]
    inputs: Callable[[int, torch.Generator], Inputs]
    """Draws the inputs of a batch: the number of rows and a seeded generator."""
    exact: Function | None
    """The implementation under contract; returns a tensor whose first dimension is the row. None where only stock is surveyed."""
    reference: Function | None
    """The same formula in fp64 on the rounded inputs; None where an error says nothing, as for the order of indices."""
    stock: Function | None = None
    """What the engine calls untouched; may raise ImportError where the engine is not installed."""
    stock_timed: Function | None = None
    """The stock call as the engine issues it (in place, for example) where `stock` had to copy."""
    exact_timed: Function | None = None
    prepare: Callable[..., None] | None = None
    """Called with the arguments before timing: what an engine does once at start-up for each captured batch size."""
    configurations: dict[str, Function] = field(default_factory=dict)
    """Other launch settings or other routes that must give the bits of `exact`."""
    phases: Callable[[], dict[str, tuple[int, int]]] | None = None
    """Prefill against decode: for each comparison the number of equal elements and of all elements."""
    gradients: Callable[[], dict[str, float]] | None = None
    """Relative error of each gradient against fp64; raises if two runs differ in a bit."""
    counts: tuple[int, ...] = SWEEP
    """Row counts of the M sweep."""
    causal: bool = False
    """Rows are the positions of one sequence: a row cannot be computed alone, only after its prefix."""
    most_rows: int = SWEEP[-1]
    """Rows of the M sweep, fewer where a row is large."""
    decode: tuple[int, ...] = (8, 32, 256)
    prefill: tuple[int, ...] = (2048, 8192)

    def __post_init__(self):
        if self.exact is None and self.stock is None:
            raise ValueError(f"case '{self.name}' has neither an exact implementation nor a stock one")

    @property
    def name(self) -> str:
        """Operator and shape, as printed in tables."""
        return f"{self.operator} {self.shape}"

    @property
    def subject(self) -> Function:
        """What the survey asks about: the implementation under contract, stock where there is none."""
        function = self.exact or self.stock
        assert function is not None
        return function


def with_settings(settings: dict, changed: dict, function: Function, *arguments: torch.Tensor) -> torch.Tensor:
    """`function(*arguments)` while the launch settings in `settings` are `changed`."""
    before = dict(settings)
    settings.update(changed)
    try:
        return function(*arguments)
    finally:
        settings.update(before)


def normal(shape: tuple[int, ...], generator: torch.Generator, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Normal values of standard deviation `scale`, drawn in fp32 on the generator's device and rounded once."""
    return torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32).mul_(scale).to(dtype)


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of the reference, in fp64."""
    reference = reference.double()
    return ((value.double() - reference).norm() / reference.norm().clamp_min(1e-300)).item()


def equal_elements(left: torch.Tensor, right: torch.Tensor) -> tuple[int, int]:
    """Number of elements of the same bits, and of all elements."""
    assert left.shape == right.shape and left.dtype == right.dtype
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[left.element_size()]
    same = left.contiguous().view(bits) == right.contiguous().view(bits)
    return int(same.sum()), same.numel()


def check_gradients(function: Function, reference: Function, inputs: dict[str, torch.Tensor], constants: Tensors = ()) -> dict[str, float]:
    """Relative error of every gradient of `function(*inputs, *constants)` against `reference` in fp64.

    The loss is the product with one fixed random tensor. Raises AssertionError if a second run gives other bits.
    """
    generator = torch.Generator(device=next(iter(inputs.values())).device).manual_seed(7)

    def gradients(f: Function, cast: Callable[[torch.Tensor], torch.Tensor], weight: torch.Tensor | None) -> tuple[Tensors, torch.Tensor]:
        leaves = [cast(t.detach()).clone().requires_grad_() for t in inputs.values()]
        out = f(*leaves, *constants)
        if weight is None:
            weight = normal(tuple(out.shape), generator, dtype=out.dtype)
        return torch.autograd.grad(out, leaves, weight.to(out.dtype)), weight

    first, weight = gradients(function, lambda t: t, None)
    second, _ = gradients(function, lambda t: t, weight)
    for name, a, b in zip(inputs, first, second, strict=True):
        assert torch.equal(a, b), f"gradient of {name} differs between two runs"
    exact, _ = gradients(reference, lambda t: t.double(), weight)
    return {name: relative_error(a, b) for name, a, b in zip(inputs, first, exact, strict=True)}
