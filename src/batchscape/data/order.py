"""Which sample is read when: one seeded stream, whatever the decomposition.

The stream is infinite. Position `p` belongs to epoch `p // num_samples`; every epoch is an
independent pseudo-random permutation of the samples, computed from the position alone. Nothing
is stored and nothing advances, so any rank can read any position and a resume is exact.

The permutations are specified here and nowhere else, so that they outlive library versions:

- `mix` is the output function of SplitMix64; word `j` of the stream keyed by `k` is
  `mix(k + (j + 1) * GAMMA)` modulo 2**64.
- The key of an epoch is word `epoch` of the stream keyed by `mix(seed)`.
- Up to 1024 samples, the permutation sorts the samples by their words, ties by index.
- Above, it is a Feistel network of 8 rounds over pairs (high, low) of digits of radices
  `a = ceil(sqrt(num_samples))` and `b = ceil(num_samples / a)`, standing for
  `high * b + low`. Round `r` with round key `k` = word `r` of the epoch's stream adds
  `mix(k + low) >> 1` to high modulo `a` when `r` is even, and `mix(k + high) >> 1` to low
  modulo `b` when it is odd. Results of `num_samples` or more go through the network again.

Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014),
https://doi.org/10.1145/2660193.2660195, with the constants of the reference code,
https://prng.di.unimi.it/splitmix64.c; Black and Rogaway, "Ciphers with arbitrary finite domains"
(CT-RSA 2002), https://doi.org/10.1007/3-540-45760-7_9, for the radices and the cycle walking.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from batchscape.errors import ConfigError

Words: TypeAlias = NDArray[np.uint64]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)
_ONE = np.uint64(1)

# Sorting is exact but linear in the samples; the network is random access but only nearly uniform,
# which shows where there are few permutations to choose from.
_SORTED_UP_TO = 1024
# Over 600 epochs of 1025 to 4099 samples, 4 rounds show too many neighbours kept together
# (chi-square p < 0.001), 6 show nothing; 8 leave a margin.
_ROUNDS = 8
# Epochs are sorted in blocks of about this many words, so memory does not grow with the request.
_BLOCK_WORDS = 2**16


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """The order in which a training run reads its samples.

    Parameters
    ----------
    num_samples : int
        Samples in an epoch, from 1 to 2**62.
    seed : int
        Names the stream, from 0 to 2**64 - 1.

    Raises
    ------
    ConfigError
        A value is not an int in its range.
    """

    num_samples: int
    seed: int

    def __post_init__(self) -> None:
        _check_range("num_samples", self.num_samples, 1, 2**62)
        _check_range("seed", self.seed, 0, 2**64 - 1)

    def indices(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Look up the samples at positions of the stream.

        Parameters
        ----------
        positions : ndarray of int64, any shape
            Positions, 0 or above, in any order.

        Returns
        -------
        ndarray of int64, same shape
            Sample indices in [0, num_samples).

        Raises
        ------
        ConfigError
            The positions are not signed integers, or one is negative.
        """
        positions = np.asarray(positions)
        if positions.dtype.kind != "i":
            raise ConfigError(f"positions must be signed integers; given {positions.dtype=}")
        if positions.size and positions.min() < 0:
            raise ConfigError(f"positions must be at least 0; given {positions.min()}")
        flat = positions.astype(np.uint64).ravel()
        epochs, slots = np.divmod(flat, np.uint64(self.num_samples))
        permute = (
            self._permute_by_sorting
            if self.num_samples <= _SORTED_UP_TO
            else self._permute_by_network
        )
        return permute(epochs, slots).astype(np.int64).reshape(positions.shape)

    def _epoch_keys(self, epochs: Words) -> Words:
        return _word(_mix(np.array([self.seed], dtype=np.uint64)), epochs)

    def _permute_by_sorting(self, epochs: Words, slots: Words) -> Words:
        distinct_epochs, row = np.unique(epochs, return_inverse=True)
        samples = np.arange(self.num_samples, dtype=np.uint64)
        indices = np.empty_like(slots)
        block = max(_BLOCK_WORDS // self.num_samples, 1)
        for start in range(0, len(distinct_epochs), block):
            keys = self._epoch_keys(distinct_epochs[start : start + block])
            permutations = _word(keys[:, None], samples).argsort(axis=1, kind="stable")
            is_in_block = (row >= start) & (row < start + block)
            indices[is_in_block] = permutations[row[is_in_block] - start, slots[is_in_block]]
        return indices

    def _permute_by_network(self, epochs: Words, slots: Words) -> Words:
        if len(epochs) and (epochs == epochs[0]).all():
            epochs = epochs[:1]  # the round keys of one epoch serve all positions
        rounds = np.arange(_ROUNDS, dtype=np.uint64)[:, None]
        round_keys = _word(self._epoch_keys(epochs), rounds)
        indices = self._network(slots, round_keys)
        (too_large,) = np.nonzero(indices >= self.num_samples)
        while too_large.size:
            keys = round_keys if len(epochs) == 1 else round_keys[:, too_large]
            indices[too_large] = self._network(indices[too_large], keys)
            too_large = too_large[indices[too_large] >= self.num_samples]
        return indices

    def _network(self, values: Words, round_keys: Words) -> Words:
        """Permute [0, a * b); shapes (n,) and (rounds, n) or (rounds, 1)."""
        radix_a = math.isqrt(self.num_samples - 1) + 1
        high_radix = np.uint64(radix_a)
        low_radix = np.uint64(-(-self.num_samples // radix_a))
        high, low = np.divmod(values, low_radix)
        for round_number, key in enumerate(round_keys):
            # Halved, so that the sum cannot wrap around: that would not be a permutation.
            if round_number % 2 == 0:
                high = (high + (_mix(key + low) >> _ONE)) % high_radix
            else:
                low = (low + (_mix(key + high) >> _ONE)) % low_radix
        return high * low_radix + low


def _check_range(name: str, value: object, lowest: int, highest: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= highest:
        raise ConfigError(f"{name} must be an int from {lowest} to {highest}; given {value!r}")


def _mix(words: Words) -> Words:
    words = (words ^ (words >> _SHIFT_1)) * _MULTIPLIER_1
    words = (words ^ (words >> _SHIFT_2)) * _MULTIPLIER_2
    return words ^ (words >> _SHIFT_3)


def _word(keys: Words, numbers: Words) -> Words:
    return _mix(keys + (numbers + _ONE) * _GAMMA)
