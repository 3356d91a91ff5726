"""Read arrays shard by shard: norms, fingerprints, and whether copies differ."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

# Elements that are squared in float64 at a time.
_CHUNK = 1 << 20
# The fraction of the golden ratio, whose bits are as good as random.
_MIXER = np.uint64(0x9E3779B97F4A7C15)


def compare(
    arrays: Mapping[str, Any], *, by_row: bool = False
) -> tuple[np.ndarray, list[str]]:
    """Return the number of a copy of each array, and the names of those that differ.

    Copies are compared bit for bit. Each shard is read on its own, so that no array is
    gathered. All processes must call this, with arrays in one order.

    Args:
      arrays: By name, arrays of JAX, which may be sharded, or of NumPy.
      by_row: Whether the rows of an array are the copies, as `pmap` returns them.
    """
    most = max([jax.device_count(), *(len(x) for x in arrays.values() if by_row)])
    digests = np.zeros((len(arrays), most), np.uint32)
    for i, x in enumerate(arrays.values()):
        for copy, place, data in _shards(x, by_row=by_row):
            # Checksums such as CRC-32 are linear: equal or exchanged shards cancel.
            shard = hashlib.blake2b(place.encode() + data.tobytes(), digest_size=4)
            digests[i, copy] ^= int.from_bytes(shard.digest(), "little")
        digests[i] = np.bitwise_xor.reduce(_of_processes(digests[i]))
    # 0 stands for a copy that does not exist, as on devices of other processes.
    copies = np.argmax(digests != 0, axis=1)
    digest = np.take_along_axis(digests, copies[:, None], axis=1)
    are_unlike = np.any((digests != digest) & (digests != 0), axis=1)
    return copies, [
        name if by_row else name + _outlier(x, digests[i])
        for i, (name, x) in enumerate(arrays.items())
        if are_unlike[i]
    ]


def _outlier(x: Any, digests: np.ndarray) -> str:
    """Return where the only copy is that is like no other one, or no text."""
    numbers, counts = np.unique(digests[digests != 0], return_counts=True)
    (alone,) = np.nonzero(np.isin(digests, numbers[counts == 1]))
    shards = getattr(x, "addressable_shards", ())
    devices = [shard.device for shard in shards if shard.replica_id in alone]
    is_clear = len(alone) == len(devices) == 1 < max(counts)
    return f" on {devices[0]} alone" if is_clear else ""


def norms(arrays: Sequence[Any], copies: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return L2 norms, and fingerprints of the numbers in any order.

    Args:
      arrays: The arrays of `compare`.
      copies: The number of the copy to read.
    """
    norms, fingerprints = np.zeros(len(arrays)), np.zeros(len(arrays), np.uint64)
    for i, x in enumerate(arrays):
        for numbers in _numbers(x, copies[i]):
            norms[i] = math.hypot(norms[i], _norm(numbers))
            bits = numbers.view(np.uint64) * _MIXER
            fingerprints[i] += np.sum((bits ^ bits >> 32) * _MIXER >> 32)
    fingerprints = _of_processes(fingerprints).sum(0)
    return np.hypot.reduce(_of_processes(norms)), fingerprints


def by_device(x: jax.Array, devices: np.ndarray) -> np.ndarray:
    """Return the L2 norm of the shard on each of these devices."""
    place = {device: i for i, device in enumerate(devices.flat)}
    norms = np.zeros(devices.size)
    for shard in x.addressable_shards:
        parts = _in_float64(np.asarray(shard.data))
        norms[place[shard.device]] = math.hypot(*map(_norm, parts))
    return np.hypot.reduce(_of_processes(norms)).reshape(devices.shape)


def _norm(numbers: np.ndarray) -> float:
    """Return the L2 norm; squares of numbers above 1e154 would overflow."""
    peak = float(np.max(np.abs(numbers), initial=0.0))
    if not 0 < peak < math.inf:
        return peak
    fractions = numbers / peak
    return peak * math.sqrt(np.dot(fractions, fractions))


def first(x: Any) -> float:
    """Return a number of which each device has a copy, or under `pmap` a row."""
    # Flax NNX keeps it in a box.
    shards = _shards(jax.tree.leaves(x)[0])
    value = next((data.ravel()[0] for _, _, data in shards), np.nan)
    # The devices of a stage of a pipeline may be those of other processes.
    values = _of_processes(np.array([value], np.float64)).ravel().tolist()
    return next((x for x in values if not math.isnan(x)), math.nan)


def _of_processes(x: np.ndarray) -> np.ndarray:
    """Return an array with one more axis, which has the arrays of all processes."""
    if jax.process_count() == 1:
        return x[None]
    # As integers of 32 bits, since JAX would round float64.
    each = multihost_utils.process_allgather(x.view(np.uint32))
    return np.ascontiguousarray(each).view(x.dtype)


def _shards(x: Any, *, by_row: bool = False) -> Iterator[tuple[int, str, np.ndarray]]:
    """Yield the number of the copy, the place in the array, and the data of shards."""
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    is_local = not isinstance(x, jax.Array) or x.is_fully_addressable
    if by_row and is_local:
        yield from ((i, "", row) for i, row in enumerate(np.asarray(jax.device_get(x))))
    elif not isinstance(x, jax.Array) or (is_local and jax.process_count() > 1):
        yield jax.process_index(), "", np.asarray(jax.device_get(x))
    else:
        for shard in x.addressable_shards:
            copy = shard.index[0].start or 0 if by_row else shard.replica_id
            place = "" if by_row else str(shard.index)
            yield copy, place, np.asarray(jax.device_get(shard.data))


def _numbers(x: Any, copy: int) -> Iterator[np.ndarray]:
    """Yield the numbers of a copy of an array in float64, in vectors."""
    for number, _, data in _shards(x):
        if number == copy:
            yield from _in_float64(data)


def _in_float64(data: np.ndarray) -> Iterator[np.ndarray]:
    wide = np.complex128 if np.iscomplexobj(data) else np.float64
    for part in np.array_split(data.ravel(), max(1, data.size // _CHUNK)):
        yield part.astype(wide).view(np.float64)
