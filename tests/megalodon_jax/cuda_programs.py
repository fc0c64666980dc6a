"""The programs of docs/many-machines.md "Programs", lowered for CUDA on a machine that has none.

Everything is traced from shapes: no array is made and nothing is compiled. What a program holds is
read from the StableHLO text of its export, whose operations say in which function they were made.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import export
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jaxlib.mlir import ir

import megalodon_jax
from megalodon_jax import MegalodonConfig, generate, init_cache
from megalodon_jax.checks import traced_checks
from megalodon_jax.inference import _decode
from megalodon_jax.optimiser import optimiser_update
from megalodon_jax.quantization.products import BACKENDS, gemm
from megalodon_jax.sharding import partition_specs
from megalodon_jax.weights import abstract_model, dotted
from tests.helpers import model_of, tiny

B, L = 3, 10
LONG = 131_072
CONFIG = tiny(cema_ndim=3, swiglu=True, output_size=19, chunk_size=5, hidden_dropout=0.1)
"""Two chunks a text, an untied head, and orders that are no power of two."""
NARROW = replace(CONFIG, compute_dtype="bfloat16")
SPREAD = tiny(
    model_dim=16,
    num_heads=4,
    z_dim=16,
    value_dim=24,
    ffn_hidden_dim=20,
    norm_num_groups=4,
    cema_ndim=3,
)
"""Divides by a mesh of 2 x 2 x 2 in all but its vocabulary, which the program fills up."""
OPTIMISER = optax.adamw(3e-3)
BLOCK_SCALED = "__op$block_scaled_dot"
"""What `jax.nn.scaled_matmul` becomes. JAX exports it only where the caller allows it by name."""


@dataclass(frozen=True)
class Program:
    """A function of shapes, and which of its arguments give their buffers away."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donated: tuple[int, ...] = ()
    capability: str = ""
    """The compute capability that it is traced for, where the program asks for one."""
    checks: bool = False
    """Whether it is traced with the checks on values."""

    @property
    def buffers(self) -> int:
        """How many arrays are given away."""
        return len(jax.tree.leaves([self.arguments[i] for i in self.donated]))


@dataclass(frozen=True)
class Contents:
    """What the text of a lowered program holds."""

    custom_calls: frozenset[str]
    library: frozenset[str]
    """Operations that are a library's on a GPU: transforms, sorts, collectives."""
    float64: frozenset[str]
    """Functions in which float64 is computed."""
    products: frozenset[str]
    """Element types of what matrix products multiply."""
    tf32: frozenset[str]
    """Functions with float32 products of default precision, which a GPU may round to TF32."""
    donated: int
    """Arguments whose buffer a result takes over."""


def shape(*sizes: int, dtype: Any = jnp.int32, sharding: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)


def is_shape(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct)


@cache
def parts(config: MegalodonConfig) -> tuple[Any, Any]:
    """Shapes of a model's arrays, and what is static in it."""
    return eqx.partition(abstract_model(config), is_shape)


def cache_shapes(config: MegalodonConfig, rows: int) -> Any:
    return jax.eval_shape(lambda: full_cache(config, rows))


def full_cache(config: MegalodonConfig, rows: int) -> Any:
    return init_cache(config, rows, allocate_kv=True, allocate_norm=True, allocate_ema=True)


def forward(config: MegalodonConfig, rows: int = B, length: int = L, **options: bool) -> Program:
    """Logits of texts with padding; with `return_cache=True` a prefill."""
    arrays, static = parts(config)

    def run(arrays: Any, ids: Any, mask: Any) -> Any:
        logits, after = eqx.combine(arrays, static)(ids, mask, **options)
        return (logits, after) if options else logits

    return Program(run, (arrays, shape(rows, length), shape(rows, length, dtype=bool)))


def loss(config: MegalodonConfig) -> Program:
    arrays, static = parts(config)

    def run(arrays: Any, ids: Any, mask: Any) -> Any:
        return eqx.combine(arrays, static).compute_loss(ids, ids, mask, loss_chunk=4)

    return Program(run, (arrays, shape(B, L), shape(B, L, dtype=bool)))


def training(config: MegalodonConfig, arrays: Any = None, batch: Any = None) -> Program:
    """Loss with dropout, gradients and AdamW; parameters and state of the optimiser are donated."""
    shapes, static = parts(config)
    arrays = shapes if arrays is None else arrays
    batch = (shape(B, L), shape(B, L, dtype=bool)) if batch is None else batch

    def run(arrays: Any, state: Any, ids: Any, mask: Any, seed: Any) -> Any:
        def of(arrays: Any) -> Any:
            options = {"deterministic": False, "key": jax.random.key(seed)}
            return eqx.combine(arrays, static).compute_loss(ids, ids, mask, **options)

        value, gradients = jax.value_and_grad(of)(arrays)
        updates, state = optimiser_update(OPTIMISER, gradients, state, arrays)
        return value, optax.apply_updates(arrays, updates), state

    return Program(run, (arrays, jax.eval_shape(OPTIMISER.init, arrays), *batch, shape()), (0, 1))


def decode(config: MegalodonConfig) -> Program:
    """The package's own step, with what the package donates."""
    arrays, static = parts(config)
    step: Any = _decode

    def run(arrays: Any, token: Any, held: Any) -> Any:
        return step.__wrapped__((eqx.combine(arrays, static), token), held)

    held = full_cache(config, B)
    info = step.lower((model_of(config), jnp.ones(B, jnp.int32)), held).lowered.args_info
    given = sum(x.donated for x in jax.tree.leaves(info))
    donated = (2,) if given == len(jax.tree.leaves(held)) else ()
    return Program(run, (arrays, shape(B), cache_shapes(config, B)), donated)


def generation(config: MegalodonConfig) -> Program:
    """A prompt and six tokens, drawn from the likeliest ones."""
    arrays, static = parts(config)

    def run(arrays: Any, ids: Any, seed: Any) -> Any:
        model, key = eqx.combine(arrays, static), jax.random.key(seed)
        return generate(model, ids, 6, key, temperature=0.7, top_k=5, top_p=0.9, eos_token_id=3)[0]

    return Program(run, (arrays, shape(B, L), shape()))


def products(capability: str) -> Program:
    """Product and both gradients of every backend, on the paths of a compute capability."""
    sizes = ((37, 50), (20, 50), (37, 20))

    def run(x: Any, weight: Any, dy: Any) -> Any:
        results = []
        for backend in BACKENDS:
            y, pull = jax.vjp(lambda x, w, backend=backend: gemm(x, w, backend), x, weight)
            results.append((y, *pull(dy)))
        return results

    given = tuple(shape(*size, dtype=jnp.float32) for size in sizes)
    return Program(run, given, capability=capability)


def sharded(config: MegalodonConfig) -> Program:
    """The training step on a mesh of 2 x 2 x 2 devices, which need not be there."""
    axes = ("data", "tensor", "sequence")
    mesh = AbstractMesh((2, 2, 2), axes, axis_types=(AxisType.Auto,) * 3)
    specs = partition_specs(abstract_model(config), mesh)

    def laid(path: Any, x: Any) -> Any:
        return shape(*x.shape, dtype=x.dtype, sharding=NamedSharding(mesh, specs[dotted(path)]))

    arrays = jax.tree_util.tree_map_with_path(laid, parts(config)[0])
    rows = NamedSharding(mesh, PartitionSpec("data", "sequence"))
    batch = shape(4, 16, sharding=rows), shape(4, 16, dtype=bool, sharding=rows)
    return training(config, arrays, batch)


STACKED = replace(CONFIG, use_checkpoint=True, scan_layers=True)
UNROLLED = replace(NARROW, use_checkpoint=False, scan_layers=False)
LOW_PRECISION = replace(CONFIG, num_layers=1, gemm_backend="mxfp8-nvfp4")
PROGRAMS: dict[str, Callable[[], Program]] = {
    "forward": lambda: forward(CONFIG),
    "forward, bfloat16": lambda: forward(NARROW),
    "forward, 131,072 tokens": lambda: forward(NARROW, 1, LONG),
    "loss": lambda: loss(CONFIG),
    "training step": lambda: training(UNROLLED),
    "training step, looped and rematerialised": lambda: training(STACKED),
    "training step, MXFP8 and NVFP4 on 9.0": lambda: replace(
        training(LOW_PRECISION), capability="9.0"
    ),
    "training step on 2 x 2 x 2": lambda: sharded(SPREAD),
    "forward, with checks on values": lambda: replace(forward(CONFIG), checks=True),
    "prefill": lambda: forward(CONFIG, return_cache=True),
    "decode": lambda: decode(CONFIG),
    "decode, bfloat16": lambda: decode(NARROW),
    "generate": lambda: generation(CONFIG),
    "products on 9.0": lambda: products("9.0"),
    "products on 10.0": lambda: products("10.0"),
}
"""By the names of the table."""


@contextmanager
def device_of(capability: str) -> Iterator[None]:
    """What asks for the default device while it is traced is told a GPU."""
    if not capability:
        yield
        return
    kind = {"platform": "gpu", "compute_capability": capability}
    device = type("Device", (), kind)()
    with mock.patch.object(jax, "devices", lambda: [device]):
        yield


def lowered(program: Program, platform: str = "cuda") -> str:
    """The StableHLO text of a program for one platform, with locations.

    A check on values is a call of this process, which `jax.export` refuses, and for which JAX asks
    the client of the platform: there it is lowered alone, and the client is left out.
    """
    jitted = jax.jit(program.function, donate_argnums=program.donated)
    allowed = [export.DisabledSafetyCheck.custom_call(BLOCK_SCALED)]
    with traced_checks(program.checks), device_of(program.capability):
        if not program.checks:
            run = export.export(jitted, platforms=(platform,), disabled_checks=allowed)
            return run(*program.arguments).mlir_module()
        with mock.patch.object(mlir.ModuleContext, "get_backend", lambda *_, **__: None):
            traced = jitted.trace(*program.arguments)
            return traced.lower(lowering_platforms=(platform,)).as_text(debug_info=True)


@cache
def text_of(name: str, platform: str = "cuda") -> str:
    return lowered(PROGRAMS[name](), platform)


_FRAME = re.compile(r'"([^"]+)"\("([^"]+)":\d+')
_LIBRARY = {
    f"{dialect}.{name}"
    for dialect, names in {
        "stablehlo": "fft sort all_gather all_reduce all_to_all reduce_scatter collective_permute",
        "chlo": "top_k",
    }.items()
    for name in names.split()
}
PACKAGE = str(Path(str(megalodon_jax.__file__)).parent)
_SAME = {"ComplexEMA._powers": "pole_powers"}
"""A derivative is placed where the function it is of was called."""


@dataclass(frozen=True)
class Operation:
    """One operation of a module, as plain text: MLIR's own objects live no longer than it."""

    name: str
    target: str
    """What a call calls: the target of a custom call, a composite, or a function."""
    wide: bool
    """Whether it computes with float64."""
    product: str
    """Of a matrix product the element type of what it multiplies."""
    exact: bool
    """Whether it asks for the highest precision."""
    location: str

    @property
    def matters(self) -> bool:
        """Whether it is asked which function made it."""
        return self.wide or self.product == "f32"


def contents(text: str, declared: frozenset[str]) -> Contents:
    """What a lowered program holds.

    Args:
        text: its StableHLO, with locations.
        declared: functions that may compute in float64. What one of them calls is theirs; any other
            operation is named by the innermost function of ours that made it.
    """
    functions = functions_of(text)
    every = [op for inside in functions.values() for op in inside]
    names = {op.name for op in every} | {op.target for op in every}
    places = Places(functions, declared)
    made = [(op, places.of(op, f)) for f, ops in functions.items() for op in ops if op.matters]
    signature = re.search(r"func\.func public @main\(.*", text)
    assert signature is not None
    return Contents(
        custom_calls=frozenset(op.target for op in every if op.name == "stablehlo.custom_call"),
        library=frozenset(name.partition(".")[2] for name in _LIBRARY & names),
        float64=union(places for op, places in made if op.wide),
        products=frozenset(op.product for op in every if op.product),
        tf32=union(places for op, places in made if op.product == "f32" and not op.exact),
        donated=len(re.findall(r"tf\.aliasing_output|jax\.buffer_donor", signature[0])),
    )


def union(sets: Iterable[set[str]]) -> frozenset[str]:
    return frozenset().union(*sets)


def functions_of(text: str) -> dict[str, list[Operation]]:
    """The operations of every function of a module, in order."""
    functions: dict[str, list[Operation]] = {}
    with mlir.make_ir_context():
        module = ir.Module.parse(text)
        for function in module.body.operations:
            inside: list[Operation] = []

            def visit(op: Any, inside: list[Operation] = inside) -> Any:
                inside.append(described(op))
                return ir.WalkResult.ADVANCE

            function.operation.walk(visit)
            named = "sym_name" in function.attributes
            name = ir.StringAttr(function.attributes["sym_name"]).value if named else ""
            functions[name] = inside
    return functions


def described(op: Any) -> Operation:
    dot = op.name == "stablehlo.dot_general"
    product = str(op.operands[0].type).rstrip(">").rpartition("x")[2] if dot else ""
    exact = dot and "precision_config" in op.attributes
    exact = exact and str(op.attributes["precision_config"]).count("HIGHEST") == 2
    return Operation(op.name, target_of(op), is_wide(op), product, exact, str(op.location))


_TARGETS = {
    "stablehlo.custom_call": "call_target_name",
    "stablehlo.composite": "name",
    "func.call": "callee",
}


def target_of(op: Any) -> str:
    return str(op.attributes[_TARGETS[op.name]]).strip('@"') if op.name in _TARGETS else ""


def is_wide(op: Any) -> bool:
    """Whether an operation computes with float64.

    A constant is computed by nobody, and a loop or a barrier only hands values on: what reads them
    counts.
    """
    passes = ("constant", "return", "while", "optimization_barrier")
    if not op.name.startswith(("stablehlo.", "chlo.")) or op.name.endswith(passes):
        return False
    return any("f64" in str(value.type) for value in (*op.results, *op.operands))


@dataclass(frozen=True)
class Places:
    """Which function of ours made an operation of a module."""

    functions: dict[str, list[Operation]]
    declared: frozenset[str]

    def of(self, op: Operation, function: str) -> set[str]:
        """Return the nearest declared function, or else the innermost of ours.

        A helper of JAX that is lowered once for all, such as `round`, does not know who calls it:
        its operations belong to all callers.
        """
        frames = _FRAME.findall(op.location)
        ours = [_SAME.get(name, name) for name, file in frames if file.startswith(PACKAGE)]
        for name in ours:
            if name in self.declared:
                return {name}
        if ours:
            return {ours[0].partition(".<locals>")[0]}
        calls = [
            self.of(call, caller)
            for caller, inside in self.functions.items()
            for call in inside
            if call.name == "func.call" and call.target == function
        ]
        return set().union(*calls) if calls else {f"unknown: {op.name}"}


def kinds(text: str) -> Counter[str]:
    """How often each kind of operation occurs."""
    return Counter(re.findall(r"\b(?:stablehlo|chlo)\.[\w]+", text))
