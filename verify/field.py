"""Polynomials over GF(65497), many at once: interpolation and evaluation for toploc.py.

Not here: what the points are or what a polynomial proves. Residues travel as float64, whose 53 bits hold every
intermediate exactly and which numpy multiplies several values at a time.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from protocol.limits import PROOF_FIELD

Residues = NDArray[np.float64]

P: Final = PROOF_FIELD
_BLOCK: Final = 16  # about √128, which makes the fewest multiplications


def reduce(values: Residues, quotient: Residues) -> None:
    """Bring integers |v| < 2^51 to [0, P] in place (P may stand for 0). `quotient` is scratch of equal shape."""
    np.multiply(values, 1.0 / P, out=quotient)
    np.floor(quotient, out=quotient)
    quotient *= P
    values -= quotient


def canonical(values: Residues) -> NDArray[np.int64]:
    reduced = values.astype(np.int64)
    reduced %= P
    return reduced


@lru_cache(maxsize=1)
def _inverses() -> Residues:
    """1/d for d in 0..P-1. The inverse of 0 is never asked for, and is 0."""
    base = np.arange(P, dtype=np.int64)
    power = np.ones(P, dtype=np.int64)
    exponent = P - 2  # Fermat: d^(P-2) = 1/d
    while exponent:
        if exponent & 1:
            power = power * base % P
        base = base * base % P
        exponent >>= 1
    return power.astype(np.float64)


def interpolate(x: NDArray[np.int64], y: NDArray[Any]) -> NDArray[np.int64]:
    """Coefficients, ascending, of the polynomials through (x, y): all [polynomials, points].

    x must be distinct within a row, 0 ≤ x < P; y any integers below P. Lagrange's form: with M = ∏(t − x_i),
    w_i = y_i / M'(x_i) and s_n = Σ w_i x_i^n, the coefficient of t^j is Σ_n s_n M_(j+1+n).
    """
    points = x.shape[1]
    master = _product(x)
    slope = master[1:] * np.arange(1, points + 1)[:, None]
    slope %= P
    weights = y * _inverses()[evaluate(np.ascontiguousarray(slope.T), x)]
    reduce(weights, np.empty_like(weights))
    sums = np.ascontiguousarray(_power_sums(x, weights).T)
    result = np.zeros((points, len(x)))
    product = np.empty_like(result)
    for n in range(points):  # at most 128 products below 2^32: exact in float64
        result[: points - n] += np.multiply(master[n + 1 :], sums[n], out=product[: points - n])
    return canonical(result).T


def _product(x: NDArray[np.int64]) -> Residues:
    """Coefficients [points + 1, polynomials], ascending, of ∏(t − x_i), by a tree of pairwise products."""
    count, points = x.shape
    leaves = 1 << (points - 1).bit_length()
    tree = np.zeros((2, leaves, count))
    tree[0, :points] = P - x.T
    tree[1, :points] = 1
    tree[0, points:] = 1  # the polynomial 1 fills up to a power of two
    while tree.shape[1] > 1:
        left, right = np.ascontiguousarray(tree[:, 0::2]), np.ascontiguousarray(tree[:, 1::2])
        terms = len(tree)
        tree = np.zeros((2 * terms - 1, *left.shape[1:]))
        term = np.empty_like(right)
        for place in range(terms):
            tree[place : place + terms] += np.multiply(left[place], right, out=term)
        reduce(tree, np.empty_like(tree))
    return tree[: points + 1, 0]


def _power_sums(x: NDArray[np.int64], weights: Residues) -> Residues:
    """s_n = Σ w_i x_i^n for n below the number of points: [polynomials, points]."""
    count, points = x.shape
    powers, power = _powers(x)
    giant = np.empty((count, -(-points // _BLOCK), points))
    step = weights.copy()
    quotient = np.empty_like(step)
    for block in range(giant.shape[1]):
        giant[:, block] = step
        step *= power
        reduce(step, quotient)
    sums = (giant @ powers.transpose(0, 2, 1)).reshape(count, -1)[:, :points]
    reduce(sums, np.empty_like(sums))
    return sums


def evaluate(coefficients: NDArray[Any], x: NDArray[np.int64]) -> NDArray[np.int64]:
    """Values of polynomials [polynomials, coefficients] at x [polynomials, points].

    Blocks of 16 coefficients against the powers x^0..x^15, then Horner in x^16 over the blocks.
    """
    count, length = coefficients.shape
    blocks = -(-length // _BLOCK)
    padded = np.zeros((count, blocks * _BLOCK))
    padded[:, :length] = coefficients
    powers, power = _powers(x)
    parts = padded.reshape(count, blocks, _BLOCK) @ powers
    total = np.zeros(x.shape)
    quotient = np.empty_like(total)
    for block in range(blocks - 1, -1, -1):
        total *= power
        total += parts[:, block]
        reduce(total, quotient)
    return canonical(total)


def _powers(x: NDArray[np.int64]) -> tuple[Residues, Residues]:
    """x^0..x^15 as [polynomials, 16, points], and x^16 as [polynomials, points]."""
    base = x.astype(np.float64)
    quotient = np.empty_like(base)
    powers = np.empty((len(x), _BLOCK, x.shape[1]))
    power = np.ones_like(base)
    for exponent in range(_BLOCK):
        powers[:, exponent] = power
        power *= base
        reduce(power, quotient)
    return powers, power
