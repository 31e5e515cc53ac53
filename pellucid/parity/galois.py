"""The field GF(2^t): its elements are the integers 0..2^t - 1, bit b standing for x^b."""

import numpy as np

POLYNOMIALS = {
    3: 0b1011,
    4: 0b10011,
    5: 0b100101,
    6: 0b1000011,
    7: 0b10000011,
    8: 0b100011011,
    9: 0b1000000011,
    10: 0b10000001001,
    11: 0b100000000101,
    12: 0b1000000001001,
    13: 0b10000000011011,
    14: 0b100000000100001,
    15: 0b1000000000000011,
    16: 0b10000000000101011,
}
"""An irreducible polynomial of each degree t: the least one, read as a number."""


def multiply(a: np.ndarray, b: np.ndarray, t: int) -> np.ndarray:
    """The product of field elements, one by one."""
    product = np.zeros_like(a)
    for bit in range(t):
        product = product ^ np.where(b >> bit & 1, a, 0)
        a = a << 1
        a = np.where(a >> t & 1, a ^ POLYNOMIALS[t], a)
    return product


def inverses(t: int) -> np.ndarray:
    """(2^t,) the inverse of every element: a^(2^t - 2), which makes the inverse of 0 be 0. ValueError unless 3 <= t <= 16."""
    if t not in POLYNOMIALS:
        raise ValueError(f"t must be in 3..16, got {t}")
    power = np.arange(1 << t)
    inverse = np.ones_like(power)
    for _ in range(t - 1):
        power = multiply(power, power, t)
        inverse = multiply(inverse, power, t)
    return inverse
