"""Whether a saved state fits that of a run, before orbax reads it."""

import contextlib
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from train.plain_files import read_json
from train.store.log import warn

NEW_RUN = "which takes a new run, as --init-from begins with this one's mean model"
# Of parts without arrays, such as (), which orbax tells from {}.
OTHER_STRUCTURE = f"it has the parts of another optimizer or algorithm, {NEW_RUN}"
Kinds = dict[str, jax.ShapeDtypeStruct]
"""Shape and dtype of each array, by its name, such as opt_state.0.count."""


class MisfitError(ValueError):
    """A checkpoint is whole, and of another state than that of this run."""


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turns an error of orbax, which has many kinds and lines, into a ValueError."""
    try:
        yield
    except Exception as error:
        why = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(f"its state cannot be read: {why}") from error


def check_fits(path: Path, state: Any, part: bool = False) -> None:
    """Compares what a checkpoint holds with a state, and warns of other dtypes.

    Args:
      path: folder of the saved state.
      state: the state that it is to be.
      part: whether it is only a part of it.

    Raises:
      MisfitError: if an array is missing, has another shape, or is none of the state's.
    """
    saved, wanted = _saved(path), _kinds(state)
    missing, stray = wanted.keys() - saved.keys(), saved.keys() - wanted.keys()
    if missing or (stray and not part):
        found = [f"it has no {_some(missing)}"] * bool(missing)
        found += [f"it has {_some(stray)} besides"] * (bool(stray) and not part)
        raise MisfitError(f"{', and '.join(found)}; {_advice(missing | stray)}")
    # The model first: of another, the moments differ too.
    for name, x in sorted(_leaves(state), key=lambda one: not _is_of_model(one[0])):
        old, new = saved[name].shape, wanted[name].shape
        if old != new and is_key(x):
            raise MisfitError(_other_keys(path, name, key_kind(x)))
        if old != new:
            said = f"its {name} has the shape {old}, wanted {new}"
            raise MisfitError(f"{said}; {_advice([name])}")
        _check_chunk(name, saved[name])
    _warn_of_dtypes(saved, wanted)


def _check_chunk(name: str, saved: Any) -> None:
    """Raises for chunks larger than their array, as reading one takes its memory."""
    chunk = getattr(saved.storage, "chunk_shape", None) or ()
    if math.prod(chunk) > math.prod(max(1, size) for size in saved.shape):
        raise MisfitError(
            f"its {name} of the shape {saved.shape} is in chunks of {chunk}, which no "
            "run writes; take another checkpoint"
        )


def _warn_of_dtypes(saved: Kinds, wanted: Kinds) -> None:
    names: dict[tuple[str, str], str] = {}
    for name, x in wanted.items():
        names.setdefault((str(saved[name].dtype), str(x.dtype)), name)
    for (old, new), name in names.items():
        if old != new and jax.process_index() == 0:
            is_wide, is_wider = "64" in old, "64" in new
            how = f"; JAX_ENABLE_X64={int(is_wide)} keeps it" * (is_wide != is_wider)
            warn(f"{name} was saved as {old}, and continues as {new}{how}")


def _saved(path: Path) -> Kinds:
    # Not of a checkpointer, which logs that a part has no metadata of its own.
    handler: Any = ocp.StandardCheckpointHandler()
    with explained():
        tree = handler.metadata(path.absolute())
    return _kinds(getattr(tree, "tree", tree))


def _kinds(tree: Any) -> Kinds:
    return {name: _as_data(x) for name, x in _leaves(tree)}


def _as_data(x: Any) -> Any:
    """The array, or the form of the numbers that random keys are."""
    return jax.eval_shape(jax.random.key_data, x) if is_key(x) else x


def _leaves(tree: Any) -> list[tuple[str, Any]]:
    """The arrays of a tree by their names, whether it has tuples or their fields."""
    return [
        (jax.tree_util.keystr(path, simple=True, separator="."), x)
        for path, x in jax.tree.leaves_with_path(tree)
        if hasattr(x, "dtype")  # In what is saved, () is a leaf.
    ]


def key_kind(keys: Any) -> Any:
    """The implementation of random keys, or of what has their shape and dtype."""
    kinds: list[Any] = []
    jax.eval_shape(lambda x: kinds.append(jax.random.key_impl(x)), keys)
    return kinds[0]


def is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _other_keys(path: Path, name: str, now: Any) -> str:
    """The sentence for random keys of another kind."""
    saved = "another"
    # As orbax has it.
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        for file in (path / "array_metadatas").iterdir():
            for one in read_json(file)["array_metadatas"]:
                if one["array_metadata"]["param_name"] == name:
                    saved = one["array_metadata"]["ext_metadata"]["random_key_impl"]
    return (
        f"its random keys, {name}, are of the kind {saved}, and those of this process "
        f"of the kind {now}: set JAX_DEFAULT_PRNG_IMPL={saved}"
    )


def _some(names: Iterable[str]) -> str:
    some = sorted(names)
    return ", ".join(some[:3]) + (", ..." if len(some) > 3 else "")


def _is_of_model(name: str) -> bool:
    return name.startswith(("params", "model_state"))


def _advice(names: Iterable[str]) -> str:
    if any(map(_is_of_model, names)):
        return "it is of another model, which takes a new run"
    return f"it is of another optimizer or algorithm, {NEW_RUN}"
