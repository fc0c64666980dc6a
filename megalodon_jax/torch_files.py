"""Reads torch files without running any code in them, and finds the model that they contain.

A file of `torch.save` is a pickle. It is read with torch's restricted unpickler only; classes that
this unpickler does not know are not imported, but replaced by classes without code. The result is
searched for state dicts and optimiser states, wherever a training script has put them. Source:
docs/stability.md "Which files".
"""

from __future__ import annotations

import re
import tempfile
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from megalodon_jax.extras import install
from megalodon_jax.file_formats import format_of_file
from megalodon_jax.tensor_files import printable

Place: TypeAlias = tuple[str, ...]
"""Keys that lead to a part of a file's nested content, from the outside in."""

MODELS = frozenset(
    {
        *("model", "state_dict", "model_state_dict", "model_state", "module", "net", "network"),
        *("weights", "params", "parameters"),
    }
)
"""Keys under which training scripts, Lightning and DeepSpeed store the trained model."""
_AVERAGE = re.compile(r"(?:^|_)(?:ema|swa|shadow|averaged?)(?:_|$)", re.IGNORECASE)
_AROUND = frozenset(
    {
        *("callbacks", "loops", "hyper_parameters", "hparams", "args", "config", "rng", "scaler"),
        *("rng_state", "rng_states", "random_state", "scheduler", "lr_scheduler", "lr_schedulers"),
    }
)
"""Keys under which a training run stores its state other than the model, perhaps with tensors."""
_WRAPPERS = ("module.", "_orig_mod.", "_forward_module.", "_fsdp_wrapped_module.")
_SAVE = "save the weights with torch.save(model.state_dict(), FILE)"
_PICKLE, _ZIP = b"\x80", b"PK\x03\x04"


@dataclass(frozen=True, slots=True, eq=False)
class TorchTensor:
    """A tensor of a torch file: memory-mapped if the file has torch's zip format, else loaded."""

    tensor: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> str:
        """Name of the stored dtype."""
        return str(self.tensor.dtype).removeprefix("torch.")

    def read(self, rows: slice | None = None) -> np.ndarray:
        """Return the tensor, or a slice of its first axis, in the stored dtype.

        Raises:
            ValueError: NumPy has no equivalent of the tensor.
        """
        return to_numpy(self.tensor if rows is None else self.tensor[rows])

    def take(self, rows: np.ndarray) -> np.ndarray:
        """Return the rows (elements of the first axis) whose indices are in `rows`."""
        return self.read()[rows]

    def place(self) -> tuple[int, ...] | None:
        """Return a key that is equal for tensors with the same memory, shape and strides.

        None for a sparse or an empty tensor.
        """
        values = self.tensor
        if str(values.layout) != "torch.strided" or values.numel() == 0:
            return None
        return (values.data_ptr(), *values.shape, *values.stride())


@dataclass(frozen=True)
class TorchContents:
    """Contents of a torch file: the trained model, optimiser states, and a list of the rest."""

    tensors: dict[str, TorchTensor]
    """Tensors of the model, by name; empty if there is no model."""
    models: dict[Place, int]
    """Number of tensors in each state dict of the model, by the keys that lead to it."""
    optimisers: dict[Place, Mapping[str, Any]] = field(default_factory=dict)
    """Optimiser states in the format of `optimizer.state_dict()`, by the keys that lead to them."""
    left: list[str] = field(default_factory=list)
    """Descriptions of everything else in the file."""

    def model(self, file: Path) -> dict[str, TorchTensor]:
        """Return the model's tensors by name.

        Raises:
            ValueError: there is no state dict; the message names `file`, and what was found.
        """
        if not self.tensors:
            held = [*map(describe, self.optimisers), *self.left]
            raise ValueError(
                f"{file} holds no state dict but {', '.join(held[:6]) or 'nothing'}; save "
                "model.state_dict(), alone or under the name 'model' or 'state_dict'."
            )
        return self.tensors


def is_torch_file(file: Path) -> bool:
    """Return whether a file starts like a file of `torch.save` (a zip archive or a pickle)."""
    with file.open("rb") as opened:
        return opened.read(4).startswith((_ZIP, _PICKLE))


def read_torch_file(file: Path) -> TorchContents:
    """Return the contents of a torch file.

    If it has torch's zip format, its tensors are memory-mapped, not read yet.

    Raises:
        ImportError: torch is not installed.
        ValueError: the file is not a torch file, is incomplete, or could be read only by running
            code in it.
    """
    return contents(_load(file))


def contents(loaded: Any) -> TorchContents:
    """Find the state dicts and optimiser states in an object returned by `torch.load`.

    State dicts under keys of other run state (`_AROUND`, such as "callbacks") are left out. Of the
    rest, the model is the first of these groups that is not empty:

    1. state dicts under one of the `MODELS` keys, without averages of weights;
    2. all state dicts, without averages of weights;
    3. the first average of weights.

    If several state dicts are chosen, the names of their tensors are prefixed with the keys
    that lead to them.
    """
    optimisers = dict(_optimisers(loaded, ()))
    dicts = dict(_state_dicts(loaded, ()))
    chosen = _trained(dicts)
    tensors: dict[str, TorchTensor] = {}
    for place in chosen:
        prefix = "".join(f"{key}." for key in place) if len(chosen) > 1 else ""
        named = _unwrapped(dict(_tensors(dicts[place], ())))
        tensors |= {prefix + name: TorchTensor(tensor) for name, tensor in named.items()}
    counts = {place: sum(1 for _ in _tensors(dicts[place], ())) for place in chosen}
    left = list(_left(loaded, (), {*chosen, *optimisers}))
    if not chosen and not optimisers:
        # Say that the file holds tensors which are no parameters: integers, or scalars.
        whole = [key for key, x in _children(loaded) if _is_tensor(x) and not _is_parameter(x)]
        left = [f"{x} (one tensor, no floating-point parameter)" if x in whole else x for x in left]
    return TorchContents(tensors, counts, optimisers, left)


def to_numpy(tensor: Any) -> np.ndarray:
    """Return a torch tensor as an array of the same dtype; bfloat16 and float8 use ml_dtypes.

    Raises:
        ValueError: the tensor is quantised or packed, or has no values.
    """
    import torch

    dtype = str(tensor.dtype).removeprefix("torch.")
    try:
        tensor = tensor.detach().cpu()
        tensor = tensor.resolve_conj().resolve_neg().to_dense().contiguous()
        if dtype == "bfloat16" or dtype.startswith("float8"):
            bits = torch.uint16 if dtype == "bfloat16" else torch.uint8
            return tensor.view(bits).numpy().view(np.dtype(getattr(ml_dtypes, dtype)))
        return tensor.numpy()
    except (TypeError, RuntimeError, AttributeError, NotImplementedError) as error:
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} in {dtype} ({tensor.layout}, on "
            f"{tensor.device}) has no values NumPy can hold; save it in a floating-point dtype."
        ) from error


def describe(place: Place) -> str:
    """Return the keys `place` as dotted text without characters that a terminal would interpret."""
    return printable(".".join(place)) or "the file itself"


def _load(file: Path) -> Any:
    with file.open("rb") as opened:
        start = opened.read(16)
    if not start:
        raise ValueError(f"{file} is empty: nothing was saved in it, or the disk was full.")
    if not start.startswith((_ZIP, _PICKLE)):
        what, advice = format_of_file(file)
        raise ValueError(
            f"{file} is not a checkpoint: expected a safetensors file, or a torch file (.pt, .bin, "
            f".ckpt) with a state dict; it is {what or 'neither'}: "
            f"{advice or 'name the file that torch.save wrote'}."
        )
    if start.startswith(_ZIP):
        _check_archive(file)
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            f"{file} is a torch file, but torch is not installed: {install('torch')}, or export "
            "the checkpoint as safetensors."
        ) from error
    archive, names = start.startswith(_ZIP), []
    try:
        if archive:
            names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
        stand_ins: list[Any] = [(_Number if n.startswith("numpy.") else _Record, n) for n in names]
        # Warnings about pickle protocols and deprecated storages concern the program that saved.
        with (
            warnings.catch_warnings(),
            torch.serialization.safe_globals(stand_ins),
            _under_no_foreign_name(file) as place,
        ):
            warnings.simplefilter("ignore")
            loaded = torch.load(place, map_location="cpu", weights_only=True, mmap=archive or None)
    except Exception as error:  # torch lets every error of its unpickler through
        raise ValueError(_unreadable(file, error)) from error
    if not isinstance(loaded, (Mapping, list, tuple)) or (names and not loaded):
        what = f"a {type(loaded).__name__}"
        if isinstance(loaded, OrderedDict) and names:
            what = f"a pickled object ({names[0]} and what belongs to it)"
        raise ValueError(f"{file} holds {what}, expected a state dict; {_SAVE}.")
    return loaded


@contextmanager
def _under_no_foreign_name(file: Path) -> Iterator[Path]:
    """Provide a path to a torch file whose name does not end in .safetensors, within this context.

    torch.load chooses the format by that ending, not by the content. Memory-mapped tensors
    stay valid after the path is removed.
    """
    if file.suffix != ".safetensors":
        yield file
        return
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "file.pt"
        place.symlink_to(file.resolve())
        yield place


def _check_archive(file: Path) -> None:
    if not zipfile.is_zipfile(file):
        raise ValueError(f"{file} is cut off: it begins as a torch file and ends too early; copy it"
                         " again, or take the checkpoint before it.")  # fmt: skip
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
    members = {entry.filename.rpartition("/")[2] for entry in entries}
    if members and all(member.endswith(".npy") for member in members):
        raise ValueError(
            f"{file} is a NumPy archive (.npz), not a checkpoint: save its arrays with "
            "safetensors.numpy.save_file."
        )
    if "data.pkl" not in members:
        raise ValueError(f"{file} is a zip archive that torch.save did not write; {_SAVE}.")
    if "constants.pkl" in members:
        raise ValueError(f"{file} is a TorchScript program; load it in torch and {_SAVE}.")
    _check_unpacked(file, entries)


def _check_unpacked(file: Path, entries: Sequence[zipfile.ZipInfo]) -> None:
    """Raise ValueError if an archive is compressed, or its entries together exceed the file's size.

    torch.save does not compress. A small compressed archive may unpack to any size, and so may one
    whose entries share the same bytes of the file.
    """
    packed = [entry.filename for entry in entries if entry.compress_type != zipfile.ZIP_STORED]
    if packed:
        raise ValueError(
            f"{file} is compressed ({printable(packed[0])}), which torch.save never does: it may "
            f"unpack to any size. If you trust its origin, unpack it, load it in torch and {_SAVE}."
        )
    unpacked, size = sum(entry.file_size for entry in entries), file.stat().st_size
    if unpacked > size:
        raise ValueError(
            f"{file} has {size:,} bytes and would unpack to {unpacked:,}: its parts overlap, or it "
            "is damaged. Copy it again."
        )


def _unreadable(file: Path, error: Exception) -> str:
    """Return a message that says why a torch file could not be read, and what to do.

    It replaces torch's own message, which advises to switch off the protection against code.
    """
    asked = re.search(r"GLOBAL ([\w.]+)", str(error))
    if asked:
        return (
            f"{file} holds more than tensors: reading it would run {asked[1]}, which is not done. "
            f"Where the model was trained, {_SAVE}."
        )
    # 149 is the FRAME opcode, with which pickles of protocol 4 and later start.
    if re.search(r"Unsupported operand 149\b", str(error)):
        return (
            f"{file} is pickled with a newer protocol than 2, the one that torch reads without "
            "running code in it. Where it was saved, leave pickle_protocol out: "
            "torch.save(..., FILE)."
        )
    if "UntypedStorage" in str(error):
        return (
            f"{file} has torch's format before 1.6, which cannot store float8: torch itself cannot "
            "read it. Where it was saved, leave _use_new_zipfile_serialization out."
        )
    if type(error).__name__ == "UnpicklingError":
        return (
            f"{file} is not readable as tensors: it is damaged, or pickles other objects. "
            f"Copy it again, or where the model was trained, {_SAVE}."
        )
    return (
        f"{file} is not a readable torch file ({type(error).__name__}): it is cut off or damaged; "
        "copy it again, or take the checkpoint before it."
    )


class _Number:
    """Stands in for NumPy's scalars and dtypes: accepts any arguments and stores nothing."""

    def __init__(self, *_: Any) -> None: ...

    def __setstate__(self, _: Any) -> None: ...


class _Record:
    """Stands in for any other pickled class: holds its items and attributes, without its code."""

    def __new__(cls, *_: Any) -> Any:
        # The unpickler fills in items and attributes only if the type is exactly OrderedDict.
        return OrderedDict()


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((str(key), child) for key, child in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((str(index), child) for index, child in enumerate(value))


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "detach") and hasattr(value, "cpu")


def is_optimiser_state(value: Any) -> bool:
    """Return whether a value has the format of torch's `optimizer.state_dict()`."""
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("state"), Mapping)
        and isinstance(value.get("param_groups"), Sequence)
    )


def _optimisers(value: Any, place: Place) -> Iterator[tuple[Place, Mapping[str, Any]]]:
    if is_optimiser_state(value):
        yield place, value
        return
    for key, child in _children(value):
        yield from _optimisers(child, (*place, key))


def _state_dicts(value: Any, place: Place) -> Iterator[tuple[Place, Mapping[str, Any]]]:
    """Yield (place, mapping) for each outermost mapping that has a parameter among its values.

    Optimiser states are skipped. A mapping that contains one, or a mapping under one of the
    `MODELS` keys, is not yielded, but searched. `place` holds the keys that lead to a mapping.
    """
    if is_optimiser_state(value):
        return
    holds = isinstance(value, Mapping) and any(_is_parameter(x) for x in value.values())
    around = isinstance(value, Mapping) and any(
        is_optimiser_state(child) or (key in MODELS and isinstance(child, Mapping))
        for key, child in _children(value)
    )
    if holds and not around:
        yield place, value
        return
    for key, child in _children(value):
        yield from _state_dicts(child, (*place, key))


def _is_parameter(value: Any) -> bool:
    return (
        _is_tensor(value) and (value.is_floating_point() or value.is_complex()) and value.ndim > 0
    )


def _trained(dicts: Mapping[Place, Any]) -> list[Place]:
    """Return the keys that lead to the model's state dicts, chosen by the rules of `contents`.

    `dicts` has all state dicts of the file, by the keys that lead to them.
    """
    own = [p for p in dicts if not _AROUND.intersection(p)]
    averages = [p for p in own if any(_AVERAGE.search(key) for key in p)]
    trained = [p for p in own if p not in averages]
    return [p for p in trained if MODELS.intersection(p)] or trained or averages[:1]


def _tensors(value: Any, place: Place) -> Iterator[tuple[str, Any]]:
    for key, child in _children(value):
        if _is_tensor(child):
            yield ".".join((*place, key)), child
        elif isinstance(child, Mapping):
            yield from _tensors(child, (*place, key))


def _unwrapped(named: dict[str, Any]) -> dict[str, Any]:
    """Return tensors by name, without the prefixes that wrappers such as DDP put before all."""
    while prefix := next((w for w in _WRAPPERS if all(n.startswith(w) for n in named)), ""):
        if not named:
            break
        named = {name.removeprefix(prefix): tensor for name, tensor in named.items()}
    return named


def _left(value: Any, place: Place, taken: set[Place]) -> Iterator[str]:
    """Yield a description of each part of a file except those to which the keys `taken` lead."""
    if place in taken:
        return
    if not place or any(t[: len(place)] == place for t in taken):
        for key, child in _children(value):
            yield from _left(child, (*place, key), taken)
        return
    inside = sum(1 for _ in _tensors({"": value}, ()))
    pickled = type(value) is OrderedDict and not value
    more = " (a pickled object)" if pickled else f" ({inside:,} tensors)" if inside > 1 else ""
    yield describe(place) + more
