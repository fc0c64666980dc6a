"""Several processes as one program: start, checkpoints, and termination.

Every process runs the same program on the same whole batch and holds its own shards. Checkpoints
have the single-device format (`megalodon_jax.checkpoint`): the first process writes them from
gathered arrays, so a checkpoint can be loaded on any mesh. Source: docs/sharding.md "Several
processes".
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
"""Counter of barriers, since each needs a unique name."""
_saves = itertools.count()
"""Counter of saves, for the key under which the first process publishes the outcome of each."""
_WRITTEN = "written"
_PATIENCE = 600


def start(address: str, processes: int, index: int, *, patience: int = 40) -> None:
    """Connect this process with the program's other processes; call it before using JAX devices.

    Collectives use Gloo on CPUs and NCCL on GPUs. If a process ends, or sends no heartbeat for
    `patience` seconds, all other processes end with an error that says so, since no collective can
    finish without the lost process.

    Args:
        address: host and port of the first process, such as "10.0.0.1:9911".
        processes: number of processes.
        index: index of this process, from 0.
        patience: seconds without a heartbeat after which a process counts as lost.

    Raises:
        ValueError: `index` is negative or not below `processes`, or `processes` or `patience` is
            not a positive integer.
    """
    processes = as_integer("distributed.start: processes", processes, 1)
    index = as_integer("distributed.start: index", index, 0)
    patience = as_integer("distributed.start: patience", patience, 1)
    if index >= processes:
        raise ValueError(
            f"distributed.start: index={index} must be below processes={processes}; number the "
            "processes from 0."
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
    """Compile a jitted function for `arguments`; return it once all processes have compiled it.

    When a group of devices first communicates, Gloo waits only 30 seconds for all processes. A
    process that finds its program in a cache while another process still compiles would time out.

    Args:
        function: result of `jax.jit` or `eqx.filter_jit`; the returned function takes the same
            arguments.
        arguments: the arguments of later calls, with arrays on their mesh.
    """
    program = function.lower(*arguments).compile()
    meet("compiled")
    return program


def meet(name: str, *, patience: int = _PATIENCE) -> None:
    """Wait at barrier `name` until all processes arrive, for at most `patience` seconds.

    The barrier uses no collective. With a single process this returns at once.

    Raises:
        RuntimeError: a process did not arrive in time.
    """
    client = _client()
    if client is None:
        return
    try:
        client.wait_at_barrier(f"megalodon_jax {name} {next(_meetings)}", 1000 * patience)
    except jax.errors.JaxRuntimeError as error:
        raise RuntimeError(
            f"distributed.meet: not all {jax.process_count()} processes reached the barrier "
            f"{name!r} within {patience} s; look at their logs, and start all of them again."
        ) from error


def _client() -> Any:
    """Return the client for barriers and messages; None if there is only one process."""
    if not jax.distributed.is_initialized():
        return None
    # JAX has no public name for this client: keep the private import in this one place.
    from jax._src.distributed import global_state

    return global_state.client


def whole(tree: Tree) -> Tree:
    """Return a pytree in which each process has every array as a whole `jax.Array`. All processes
    must call this function.

    An array that spans processes becomes one copy per process, on one of its devices; other arrays
    and leaves are unchanged.
    """
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
    """Write a checkpoint from the shards of all processes, atomically; all processes must call this
    function.

    Arguments and errors are those of `checkpoint.save_checkpoint`. The first process writes, and
    the others wait until it is done, so that every process may rely on the checkpoint afterwards.

    Raises:
        RuntimeError: a process did not arrive in time; or, in the other processes, the first
            process failed to write (the message says why).
    """
    # Checked before only the first process goes on to write.
    step = as_integer("distributed.save: step", step, 0)
    mesh = _mesh_sizes(model)
    complete, state = whole((model, opt_state))
    client, place = _client(), f"megalodon_jax save {next(_saves)}"
    failure: Exception | None = None
    if jax.process_index() == 0:
        try:
            save_checkpoint(folder, complete, step=step, opt_state=state, mesh=mesh)
        except Exception as error:
            # Raised only after the barrier, at which the other processes wait.
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
            f"distributed.save: the first process did not write step {step} to {folder}: {told}. "
            "Correct that error, and save again."
        )


def load(folder: str | os.PathLike[str], mesh: Mesh, *, opt_state_like: Any = None) -> Checkpoint:
    """Load a checkpoint onto a mesh, which may differ from the mesh it was saved on.

    Every process reads the whole checkpoint. If the meshes differ, a warning is logged: parameters
    are bit-identical, but sums are computed in another order from here on.

    Arguments, result and errors are those of `checkpoint.load_checkpoint`; `mesh` is the target
    mesh.
    """
    found = load_checkpoint(folder, opt_state_like=opt_state_like)
    here = {name: int(size) for name, size in mesh.shape.items()}
    if (found.mesh or {}) != here:
        _log.warning(
            "%s was saved on %s and is loaded on %s: parameters are bit-identical, but sums are "
            "computed in another order.",
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
