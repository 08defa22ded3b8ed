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
_STEP: Final = 4  # of a block's powers, those that are not a multiple of this stay unreduced, below 2^30


def reduce(values: Residues, quotient: Residues) -> None:
    """Bring integers |v| < 2^52 to |v| < 2^15 in place, equal modulo P. `quotient` is scratch of equal shape."""
    np.multiply(values, 1.0 / P, out=quotient)
    np.rint(quotient, out=quotient)
    quotient *= P
    values -= quotient


def canonical(values: Residues) -> NDArray[np.int64]:
    """The same residues as integers in 0..P-1. Overwrites `values`."""
    scratch = np.empty_like(values)
    reduce(values, scratch)
    np.multiply(values < 0, P, out=scratch)
    values += scratch
    return values.astype(np.int64)


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
    reduce(slope, np.empty_like(slope))
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
    sums = (giant @ powers.transpose(1, 2, 0)).reshape(count, -1)[:, :points]  # 128 products below 2^45: exact
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
    parts = padded.reshape(count, blocks, _BLOCK) @ powers.transpose(1, 0, 2)  # 16 products below 2^46: exact
    total = parts[:, blocks - 1].copy()
    quotient = np.empty_like(total)
    reduce(total, quotient)
    for block in range(blocks - 2, -1, -1):
        total *= power
        total += parts[:, block]
        if block:
            reduce(total, quotient)
    return canonical(total)


def _powers(x: NDArray[np.int64]) -> tuple[Residues, Residues]:
    """x^0..x^15 as [16, polynomials, points], |value| < 2^30, and x^16 as [polynomials, points], below 2^15."""
    powers = np.empty((_BLOCK, *x.shape))
    powers[0] = 1
    powers[1] = x
    quotient = np.empty((2, *x.shape))
    reduce(powers[1], quotient[0])
    np.multiply(powers[1], powers[1], out=powers[2])
    reduce(powers[2], quotient[0])
    np.multiply(powers[1:3], powers[2], out=powers[3:5])
    reduce(powers[3:5], quotient)
    for start in range(_STEP, _BLOCK, _STEP):
        np.multiply(powers[1:_STEP], powers[start], out=powers[start + 1 : start + _STEP])
        following = powers[start] * powers[_STEP]
        reduce(following, quotient[0])
        if start + _STEP < _BLOCK:
            powers[start + _STEP] = following
    return powers, following
