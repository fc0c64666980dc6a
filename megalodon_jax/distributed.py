"""Several processes as one program: how they start, save and load together, and how they end.

Every process runs the same program on the same whole batch and holds its own shards. Checkpoints
are those of one device (`megalodon_jax.checkpoint`), written by the first process from whole
arrays, so any mesh loads what any other saved. Source: docs/sharding.md "Several processes".
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from megalodon_jax.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from megalodon_jax.inputs import as_integer
from megalodon_jax.sharding.placement import shard_model, shard_state

Tree = TypeVar("Tree")
_log = logging.getLogger(__name__)
_meetings = itertools.count()
"""Numbers the meetings of a program: a barrier's name is used once."""
_saves = itertools.count()
"""Numbers what the first process says of its checkpoints."""
_WRITTEN = "written"
_PATIENCE = 600


def start(address: str, processes: int, index: int, *, patience: int = 40) -> None:
    """Join the processes of a program; to be called before anything that asks JAX for a device.

    On CPUs the collectives are Gloo's, on GPUs NCCL's. A process that ends, or that is not heard of
    for `patience` seconds, ends all others, each with an error that says so: a collective cannot
    finish without it, and none is waited for longer than that.

    Args:
        address: host and port of the first process, such as "10.0.0.1:9911".
        processes: how many there are.
        index: which this one is, from 0.
        patience: seconds.

    Raises:
        ValueError: `index` is not below `processes`, or a number is too small.
    """
    processes = as_integer("distributed.start: processes", processes, 1)
    index = as_integer("distributed.start: index", index, 0)
    patience = as_integer("distributed.start: patience", patience, 1)
    if index >= processes:
        raise ValueError(
            f"distributed.start: index={index} must be below processes={processes}; processes "
            "count from 0."
        )
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        address,
        num_processes=processes,
        process_id=index,
        heartbeat_timeout_seconds=patience,
        shutdown_timeout_seconds=patience,
    )


def compiled(function: Any, *arguments: Any) -> Any:
    """Return a jitted function, compiled for these arguments in all processes before any runs it.

    Gloo waits 30 seconds for the others when a group of devices first meets. One process that finds
    its program in a cache while another compiles would give up.

    Args:
        function: of `jax.jit` or `eqx.filter_jit`; what is returned takes the same arguments.
        arguments: as they will be, arrays on their mesh.
    """
    program = function.lower(*arguments).compile()
    meet("compiled")
    return program


def meet(name: str, *, patience: int = _PATIENCE) -> None:
    """Wait until every process is here, for `patience` seconds at most; without a collective.

    Raises:
        RuntimeError: a process did not come.
    """
    client = _client()
    if client is None:
        return
    try:
        client.wait_at_barrier(f"megalodon_jax {name} {next(_meetings)}", 1000 * patience)
    except jax.errors.JaxRuntimeError as error:
        raise RuntimeError(
            f"distributed.meet: not all {jax.process_count()} processes came to {name!r} within "
            f"{patience} s; look at their logs, and start all of them again."
        ) from error


def _client() -> Any:
    """Return what processes meet by; None where there is one alone."""
    if not jax.distributed.is_initialized():
        return None
    # JAX has no public name for it: nothing else here is to depend on where it is.
    from jax._src.distributed import global_state

    return global_state.client


def whole(tree: Tree) -> Tree:
    """Return a tree with every array whole in every process; all must call it."""
    leaves, structure = jax.tree.flatten(tree)
    arrays = ((i, x) for i, x in enumerate(leaves) if isinstance(x, jax.Array))
    split = [i for i, x in arrays if not x.is_fully_addressable]
    if split:
        parts = [leaves[i] for i in split]
        everywhere = [NamedSharding(x.sharding.mesh, PartitionSpec()) for x in parts]
        gather = compiled(jax.jit(lambda parts: parts, out_shardings=everywhere), parts)
        for i, leaf in zip(split, gather(parts), strict=True):
            leaves[i] = leaf.addressable_data(0)
    return jax.tree.unflatten(structure, leaves)


def save(folder: str | os.PathLike[str], model: Any, *, step: int, opt_state: Any = None) -> None:
    """Write a checkpoint from every process's shards, whole or not at all; all must call it.

    Arguments and errors as for `checkpoint.save_checkpoint`. The first process writes; no process
    goes on before it is done, so that after a return every one may count on the file.

    Raises:
        RuntimeError: in the other processes, where the first did not write; the message says why.
    """
    # A step that is none is refused before processes part.
    step = as_integer("distributed.save: step", step, 0)
    mesh = _mesh_sizes(model)
    complete, state = whole((model, opt_state))
    client, place = _client(), f"megalodon_jax save {next(_saves)}"
    failure: Exception | None = None
    if jax.process_index() == 0:
        try:
            save_checkpoint(folder, complete, step=step, opt_state=state, mesh=mesh)
        except Exception as error:
            # The others wait at the meeting: it is raised after that.
            failure = error
        if client is not None:
            told = _WRITTEN if failure is None else f"{type(failure).__name__}: {failure}"
            client.key_value_set(place, told)
    meet(f"save of step {step}")
    if failure is not None:
        raise failure
    told = _WRITTEN if client is None else client.blocking_key_value_get(place, 1000 * _PATIENCE)
    if told != _WRITTEN:
        raise RuntimeError(
            f"distributed.save: the first process did not write step {step} to {folder}: {told}"
        )


def load(folder: str | os.PathLike[str], mesh: Mesh, *, opt_state_like: Any = None) -> Checkpoint:
    """Read a checkpoint and lay it out on a mesh, whichever it was saved on; every process reads.

    Where the meshes differ, the log says so: parameters are the same bits, but sums are added in
    another order from here on.

    Arguments and errors as for `checkpoint.load_checkpoint`; `mesh` is where to.
    """
    found = load_checkpoint(folder, opt_state_like=opt_state_like)
    here = {name: int(size) for name, size in mesh.shape.items()}
    if (found.mesh or {}) != here:
        _log.warning(
            "%s was saved on %s and is loaded on %s: the same bits, summed in another order.",
            folder,
            _written(found.mesh),
            _written(here),
        )
    model = shard_model(found.model, mesh)
    state = found.opt_state
    if state is not None:
        state = shard_state(state, model, mesh)
    return dataclasses.replace(found, model=model, opt_state=state)


def _mesh_sizes(model: Any) -> dict[str, int] | None:
    for leaf in jax.tree.leaves(model):
        if isinstance(leaf, jax.Array) and isinstance(leaf.sharding, NamedSharding):
            return {name: int(size) for name, size in leaf.sharding.mesh.shape.items()}
    return None


def _written(sizes: dict[str, int] | None) -> str:
    if not sizes or np.prod(list(sizes.values())) == 1:
        return "one device"
    return "a mesh of " + " x ".join(f"{name}={size}" for name, size in sizes.items())
