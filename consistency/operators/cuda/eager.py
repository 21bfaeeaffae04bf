"""The eager route of a registered operator: the same kernels and the same gradient, without the dispatcher's share of the host time.

A registered operator with a gradient costs about as much host time as many of these kernels take on the device. A compiler needs it, since it
must not look inside; eager training does not.
"""

from collections.abc import Callable

import torch

REGISTERED = False
"""Go through the registered operators in eager mode too: for fake tensors, on which no kernel can run."""


def eager(operator: Callable, setup: Callable, backward: Callable) -> Callable:
    """`operator` with the same arguments and results; `setup` and `backward` are those it was registered with."""
    kernel = operator._init_fn

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(*arguments):
            out = kernel(*arguments)
            return tuple(out) if isinstance(out, list) else out

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.set_materialize_grads(False)
            setup(ctx, inputs, output)

        @staticmethod
        def backward(ctx, *grads):
            return backward(ctx, *grads)

    def call(*arguments):
        if torch.compiler.is_compiling() or REGISTERED:
            return operator(*arguments)
        return Eager.apply(*arguments) if torch.is_grad_enabled() else kernel(*arguments)

    return call
