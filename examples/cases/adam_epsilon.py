"""Adam with TensorFlow's epsilon: the same number, added before the bias correction.

In the first step it weighs thirty times as much, so a large epsilon is another optimiser.
"""

import jax.numpy as jnp
import numpy as np
import torch

from parity import FunctionSide, Port, TorchSide

REPORT = "https://github.com/google-deepmind/optax/issues/571"
TRIED = "agents of both libraries, then a derivation by hand"
FOUND = "(jnp.sqrt(second) + EPSILON)"

RATE, BETA1, BETA2, EPSILON, STEPS = 1e-2, 0.9, 0.999, 1e-3, 3
torch.manual_seed(0)


class Original(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(12))

    def forward(self, gradients):
        weight = self.weight.detach().clone().requires_grad_()
        adam = torch.optim.Adam([weight], lr=RATE, betas=(BETA1, BETA2), eps=EPSILON)
        for step in range(STEPS):
            weight.grad = gradients[step]
            adam.step()
        return weight.detach()


ORIGINAL = Original()
GRADIENTS = (0.01 * np.random.default_rng(0).normal(size=(STEPS, 12))).astype(np.float32)
PARAMS = {"weight": jnp.asarray(ORIGINAL.weight.detach().numpy())}


def compared(before):
    def twin(params, gradients):
        weight, first, second = params["weight"], 0.0, 0.0
        for step in range(1, STEPS + 1):
            gradient = gradients[step - 1]
            first = BETA1 * first + (1 - BETA1) * gradient
            second = BETA2 * second + (1 - BETA2) * gradient**2
            unbias1, unbias2 = 1 - BETA1**step, 1 - BETA2**step
            rate = RATE / unbias1
            if before:
                weight = weight - rate * unbias2**0.5 * first / (jnp.sqrt(second) + EPSILON)
            else:
                weight = weight - rate * first / (jnp.sqrt(second) / unbias2**0.5 + EPSILON)
        return weight

    sides = TorchSide(ORIGINAL, GRADIENTS), FunctionSide(twin, PARAMS, GRADIENTS)
    return Port("adam_epsilon", *sides, gradients=False, bfloat16=False)


def port():
    return compared(before=True)


def mended():
    return compared(before=False)
