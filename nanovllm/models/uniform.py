"""The random number of a token, which depends only on its seed and its position."""

from torch import Tensor


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """Hash (seed, position) to [R] float64 in [0, 1), by SplitMix64 (Steele et al. 2014)."""
    z = _mix(seeds + positions * _signed(0x9E3779B97F4A7C15))
    z = _mix(z + _signed(0x9E3779B97F4A7C15))
    return _shift(z, 11).double() * 2.0**-53


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shift(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros. torch's operator repeats the sign bit."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
