"""RMSprop's epsilon below the root, as in TensorFlow, or beside it, as in torch.

Deep reinforcement learning uses large values, with which the two are different optimisers.
"""

import jax.numpy as jnp
import numpy as np
import torch

from parity import FunctionSide, Port, TorchSide

REPORT = "https://github.com/jax-ml/jax/pull/1427"
TRIED = "reading TensorFlow's kernel"
FOUND = "jnp.sqrt(square + EPSILON)"

RATE, DECAY, EPSILON, STEPS = 1e-2, 0.9, 1e-2, 3
torch.manual_seed(0)


class Original(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(12))

    def forward(self, gradients):
        weight = self.weight.detach().clone().requires_grad_()
        rmsprop = torch.optim.RMSprop([weight], lr=RATE, alpha=DECAY, eps=EPSILON)
        for step in range(STEPS):
            weight.grad = gradients[step]
            rmsprop.step()
        return weight.detach()


ORIGINAL = Original()
GRADIENTS = np.random.default_rng(0).normal(size=(STEPS, 12)).astype(np.float32)
PARAMS = {"weight": jnp.asarray(ORIGINAL.weight.detach().numpy())}


def compared(inside):
    def twin(params, gradients):
        weight, square = params["weight"], 0.0
        for gradient in gradients:
            square = DECAY * square + (1 - DECAY) * gradient**2
            below = jnp.sqrt(square + EPSILON) if inside else jnp.sqrt(square) + EPSILON
            weight = weight - RATE * gradient / below
        return weight

    sides = TorchSide(ORIGINAL, GRADIENTS), FunctionSide(twin, PARAMS, GRADIENTS)
    return Port("rms_epsilon", *sides, gradients=False, bfloat16=False)


def port():
    return compared(inside=True)


def mended():
    return compared(inside=False)
