"""Runs a torch program in float64, optionally perturbing every result by float32's rounding error.

A dispatch mode intercepts each operation below autograd, including those of the backward pass.
Casts to float32 or a narrower dtype become casts to float64, so that nothing is computed in lower
precision.
Results are perturbed by random signs, as `parity.engine.programs.evaluation` does for a jaxpr.
Source: docs/your-own-port.md.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch._decomp import get_decompositions
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from parity.engine.measure.rounding_noise import UNIT_ROUNDOFF
from parity.engine.programs.domains import DOMAINS, inside
from parity.engine.programs.rounding_rules import ELEMENTARY_UNITS

WIDE = {
    **dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), torch.float64),
    torch.complex64: torch.complex128,
}
"""The float64 or complex128 dtype that replaces each narrower dtype."""
NARROW = {torch.float64: torch.float32, torch.complex128: torch.complex64}
"""Dtype that is reported for each wide dtype to a module that rejects float64."""
_DTYPE: Any = cast("Any", torch.Tensor.dtype).__get__
_EXACT = """
_to_copy clone copy copy_ cat stack slice_scatter select_scatter index index_select gather
embedding where masked_fill masked_fill_ fill fill_ zero_ zeros ones full arange empty empty_like
zeros_like ones_like full_like new_zeros new_ones new_full new_empty scalar_tensor neg abs relu
relu_ clamp clamp_min clamp_max maximum minimum max min amax amin argmax argmin sort topk tril
triu constant_pad_nd repeat roll flip sign floor ceil round threshold_backward
embedding_dense_backward native_dropout bernoulli rand randn uniform_ normal_ lift_fresh
lift_fresh_copy detach detach_ _local_scalar_dense bitwise_not isin eq ne lt le gt ge any all
repeat_interleave new_empty_strided empty_strided set_ resize_ max_pool2d_with_indices index_put
scatter scatter_
"""
EXACT = frozenset(_EXACT.split())
"""Operations that do not round; views need no entry."""
_ELEMENTARY = """
exp exp2 expm1 log log1p tanh erf erfc sigmoid sin cos tan pow rsqrt gelu silu gelu_backward
silu_backward mish softplus elu celu selu _softmax _safe_softmax _log_softmax logsumexp
"""
ELEMENTARY = frozenset(_ELEMENTARY.split())
"""Elementary functions, which have errors of `ELEMENTARY_UNITS` unit roundoffs."""
_FUSED = """
native_layer_norm native_group_norm native_batch_norm _softmax _safe_softmax _log_softmax gelu silu
softplus lerp addmm baddbmm
"""
FUSED = tuple(_FUSED.split())
"""Operations that torch computes in one kernel of several steps; a port may compute the steps as
separate operations."""


class Lift(TorchDispatchMode):
    """Dispatch mode that computes every operation in float64, and perturbs the results.

    Args:
        signs: generator of the perturbation's signs; None: no perturbation.
    """

    def __init__(self, signs: torch.Generator | None = None) -> None:
        super().__init__()
        self.signs = signs
        self.results: list[torch.Tensor] | None = None
        """Results of all operations; None: they are not collected."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one operation in float64."""
        name = func.overloadpacket.__name__
        if name == "linalg_vector_norm" and len(args) > 1 and math.isinf(args[1]):
            # A maximum norm returns an element unchanged. Its derivative searches for that element,
            # so the result must not be perturbed.
            name = "amax"
        args, named = tree_map(widen, args), tree_map(widen, kwargs or {})
        if self.signs is not None:
            args = self.summands(name, args)
        if self.results is not None:
            self._run_in_steps(func, args, named)
        result = func(*args, **named)
        if self.results is not None:
            leaves = (x for x in tree_leaves(result) if isinstance(x, torch.Tensor))
            # Copied: a later in-place operation would change it.
            self.results += [x.clone() for x in leaves if x.numel()]
        if self.signs is None or name in EXACT or func.is_view:
            return result
        units = ELEMENTARY_UNITS if name in ELEMENTARY else 1.0
        return tree_map(lambda x: self._rounded(x, units, name), result)

    def _run_in_steps(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Add the intermediate results of a fused operation to `results`, if its steps are known.

        Without these results a port's first step, such as the correct variance of a norm, would be
        reported as an operation that the original does not do, rather than the step that differs.
        """
        packet, overload = func.overloadpacket, func._overloadname
        # An in-place operation has the same steps as the one without the underscore.
        same = getattr(torch.ops.aten, packet.__name__.removesuffix("_"), packet)
        steps = _steps().get(getattr(same, overload, func))
        # The steps may not support these arguments. Then only the operation's result is compared;
        # steps only help to find the source line.
        with contextlib.suppress(NotImplementedError, RuntimeError, TypeError):
            if steps is not None:
                # Copied: the steps of a batch norm in training mode write its running statistics.
                args, named = tree_map(_copied, args), tree_map(_copied, named)
                with self:
                    steps(*args, **named)

    def moved(self, x: torch.Tensor, units: float) -> torch.Tensor:
        """Return a tensor times 1 +- `units` unit roundoffs of float32, with random signs."""
        moves = self._draw(x)
        if x.is_complex():
            # Each part of a complex product takes errors from both parts of the factors, so the
            # phase is perturbed too.
            moves = torch.complex(moves, self._draw(x))
        result = x * (1 + moves * (units * UNIT_ROUNDOFF))
        # The lowest finite number, used as a mask of scores, must not overflow to -inf.
        return torch.where(result.isfinite(), result, x)

    def _draw(self, x: torch.Tensor) -> torch.Tensor:
        signs = torch.randint(0, 2, x.shape, generator=self.signs, dtype=torch.int8).to(x.device)
        return 2.0 * signs.to(x.real.dtype) - 1

    def _rounded(self, x: Any, units: float, name: str) -> Any:
        if not isinstance(x, torch.Tensor) or x.dtype not in NARROW or not x.numel():
            return x
        if name.endswith("_"):  # in place: later operations read this same tensor
            return x.copy_(self.moved(x, units))
        return self.moved(x, units)

    def summands(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the operands of a perturbed operation.

        Operands that perturbation moved outside the operation's domain, such as below 0 for a
        square root, are reflected into it. If the operation sums, one factor of each term is
        perturbed, as by the rounding of partial sums.
        """
        args = _inside(name, args)
        which, terms = _terms(name, args)
        if which is None or args[which].dtype not in NARROW:
            return args
        changed = self.moved(args[which], math.sqrt(1 + terms / 11))
        return (*args[:which], changed, *args[which + 1 :])


def _inside(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the operands of a perturbed operation; those outside its domain, such as below 0 for a
    square root, are reflected into it.

    The operand of an in-place operation is left unchanged: it is also the result.
    """
    known = name in DOMAINS or name == "pow"
    if not known or not isinstance(args[0], torch.Tensor) or args[0].is_complex():
        return args
    return tuple(inside(name, args, torch.where))


def _copied(x: Any) -> Any:
    return x.clone() if isinstance(x, torch.Tensor) else x


@cache
def _steps() -> dict[Any, Any]:
    """Return, by torch operation, functions that compute fused operations in several steps."""
    known = [getattr(torch.ops.aten, name) for name in FUSED if hasattr(torch.ops.aten, name)]
    steps = dict(get_decompositions(known))
    # torch's own steps multiply by `value` (a learning rate) first, but optimisers compute the
    # quotient or product first.
    steps[torch.ops.aten.addcmul.default] = lambda x, a, b, value=1: x + value * (a * b)
    steps[torch.ops.aten.addcdiv.default] = lambda x, a, b, value=1: x + value * (a / b)
    for packet in (torch.ops.aten.var_mean, torch.ops.aten.var):
        steps |= {packet.correction: _squares, packet.dim: _squares_of}
    return steps


def _squares(x: torch.Tensor, dim: Any = None, *, keepdim: bool = False, **_: Any) -> torch.Tensor:
    """Return the sum of squared differences from the mean, the last step before a variance."""
    return (x - x.mean(dim, keepdim=True)).square().sum(dim, keepdim=keepdim)


def _squares_of(x: torch.Tensor, dim: Any, _: bool = True, keepdim: bool = False) -> torch.Tensor:
    return _squares(x, dim, keepdim=keepdim)


def _terms(name: str, args: Sequence[Any]) -> tuple[int | None, int]:
    """Return the index of the argument to perturb for a sum, and the number of terms per sum.

    (None, 1) for operations that do not sum.
    """
    if name in ("mm", "bmm", "mv", "dot"):
        return 1, args[0].shape[-1]
    if name in ("addmm", "baddbmm", "addmv"):
        return 2, args[1].shape[-1]
    if name == "convolution":
        weight, transposed, groups = args[1], args[6], args[8]
        if transposed:
            return 1, math.prod(weight.shape) // weight.shape[1] // groups
        return 1, math.prod(weight.shape[1:])
    if name in ("sum", "mean", "var_mean", "var", "std", "linalg_vector_norm", "prod"):
        dims = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple, int)) else None
        dims = (dims,) if isinstance(dims, int) else dims
        shape = args[0].shape
        return 0, math.prod(shape[d] for d in dims) if dims else max(1, args[0].numel())
    if name in ("_fft_r2c", "_fft_c2c", "_fft_c2r"):
        return 0, math.prod(args[0].shape[d] for d in args[1])
    if name in ("cumsum", "_softmax", "_safe_softmax", "_log_softmax"):
        dim = args[1]
        return 0, args[0].shape[dim] if args[0].ndim else 1
    if name in ("native_layer_norm", "native_batch_norm", "native_group_norm"):
        # Not all elements that are normalised together: each passes its own perturbation on, which
        # the root of their number would make far larger than what a norm rounds.
        return 0, args[0].shape[-1]
    return None, 1


class Unseen(TorchFunctionMode):
    """Function mode in which float64 tensors report float32, and complex128 ones complex64.

    Used for modules that reject float64. If such a module passes the reported dtype to an
    operation, `Lift` replaces that dtype by float64 again.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one torch function; if it reads the dtype of a wide tensor, return the narrow
        dtype."""
        result = func(*args, **(kwargs or {}))
        return NARROW.get(result, result) if func == _DTYPE else result


class Scores(TorchFunctionMode):
    """Function mode that adds unscaled attention scores, queries times keys, to `Lift.results`.

    torch's unfused attention multiplies queries and keys by the square root of the scale first, so
    it never computes the unscaled scores that many ports compute. Without this mode, the port's
    product of queries and keys rather than a wrong scale would be reported as the difference.
    """

    def __init__(self, lift: Lift) -> None:
        super().__init__()
        self.lift = lift

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one torch function; before attention, compute the scores, which the lift records."""
        if self.lift.results is not None and func is _ATTENTION:
            named = dict(zip(("query", "key"), args, strict=False)) | (kwargs or {})
            query, key = named["query"], named["key"]
            if query.ndim > 2 and query.shape[-3] != key.shape[-3]:
                # Groups of heads share a key.
                key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
            query @ key.mT
        return func(*args, **(kwargs or {}))


class Epsilon(TorchFunctionMode):
    """Function mode that passes float32's machine epsilon to `rms_norm` calls without an epsilon.

    torch's default is the machine epsilon of the input's dtype, so a float64 run would be another
    program.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one torch function, with an epsilon if it is an `rms_norm` without one."""
        named = dict(kwargs or {})
        is_norm = func in (torch.nn.functional.rms_norm, torch.rms_norm)
        if is_norm and len(args) < 4 and named.get("eps") is None:
            named["eps"] = torch.finfo(torch.float32).eps
        return func(*args, **named)


_ATTENTION = torch.nn.functional.scaled_dot_product_attention


def widen(x: Any) -> Any:
    """Return a tensor of a narrower dtype cast to its dtype in `WIDE`, a narrower dtype replaced by
    that in `WIDE`, and anything else unchanged."""
    if isinstance(x, torch.dtype):
        return WIDE.get(x, x)
    if isinstance(x, torch.Tensor) and x.dtype in WIDE:
        return x.to(WIDE[x.dtype])
    return x


@contextlib.contextmanager
def lifted(seed: int | None, unseen: bool = False) -> Iterator[Lift]:
    """Compute in float64 within this context; yield the dispatch mode that does so.

    Attention uses its unfused implementation, since the intermediate values of a fused kernel
    cannot be perturbed.

    Args:
        seed: seed of the perturbation's signs; None: no perturbation.
        unseen: whether tensors report float32 as their dtype (`Unseen`).
    """
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    mode = Lift(generator)
    asked = Unseen() if unseen else contextlib.nullcontext()
    try:
        with sdpa_kernel(SDPBackend.MATH), mode, asked, Scores(mode), Epsilon():
            yield mode
    finally:
        torch.set_default_dtype(default)
