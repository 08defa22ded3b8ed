"""Polynomials over GF(65497), many at once: interpolation and evaluation for toploc.py.

Not here: what the points are or what a polynomial proves. Residues travel as float64, whose 53 bits hold every
intermediate exactly and which numpy multiplies several values at a time; arrays are [points, polynomials], so
that each step runs over whole rows.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from protocol.limits import PROOF_FIELD

Residues = NDArray[np.float64]

P: Final = PROOF_FIELD
_BLOCK: Final = 16  # coefficients summed before a reduction: 16·P² is far below 2^53


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
    """1/d for d in 0..P-1; index -d gives 1/(-d). The inverse of 0 is never asked for, and is 0."""
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
    """Coefficients, ascending, of the polynomials through (x, y): all [points, polynomials].

    x must be distinct within a column, 0 ≤ x < P; y any integers below P. Newton's divided differences, then
    the expansion into powers.
    """
    points, columns = x.shape
    inverses = _inverses()
    differences: Residues = y.astype(np.float64)
    scratch = np.empty_like(differences)
    quotient = np.empty_like(differences)
    for order in range(1, points):
        step = np.subtract(differences[order:], differences[order - 1 : -1], out=scratch[order:])
        step *= inverses[x[order:] - x[:-order]]
        reduce(step, quotient[order:])
        differences[order:] = step
    # Horner on the Newton form, p ← p·(t − x_i) + d_i. Multiplying by t moves every coefficient up one place,
    # which is free when the lowest place moves down instead.
    room = np.zeros((points + 1, columns))
    nodes = x.astype(np.float64)
    for order in range(points - 1, -1, -1):
        degree = points - 1 - order  # coefficients so far
        held = room[order + 1 : order + 1 + degree]
        product = np.multiply(held, nodes[order], out=scratch[:degree])
        moved = room[order : order + degree + 1]
        moved[0] = differences[order]
        moved[:degree] -= product
        reduce(moved, quotient[: degree + 1])
    return canonical(room[:points])


def evaluate(coefficients: NDArray[Any], x: NDArray[np.int64]) -> NDArray[np.int64]:
    """Values of polynomials [polynomials, coefficients] at x [polynomials, points].

    Blocks of 16 coefficients against the powers x^0..x^15, then Horner in x^16 over the blocks.
    """
    count, length = coefficients.shape
    blocks = -(-length // _BLOCK)
    padded = np.zeros((count, blocks * _BLOCK))
    padded[:, :length] = coefficients
    base = x.astype(np.float64)
    quotient = np.empty_like(base)
    powers = np.empty((count, _BLOCK, x.shape[1]))
    power = np.ones_like(base)
    for exponent in range(_BLOCK):
        powers[:, exponent] = power
        power *= base
        reduce(power, quotient)
    parts = padded.reshape(count, blocks, _BLOCK) @ powers
    total = np.zeros_like(base)
    for block in range(blocks - 1, -1, -1):
        total *= power
        total += parts[:, block]
        reduce(total, quotient)
    return canonical(total)
