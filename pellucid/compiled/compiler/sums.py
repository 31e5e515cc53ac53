"""Which sums of k values there are: the numerators of means."""

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from pellucid.compiled.rasp.values import RaspError, Value

BITS = 1 << 22
"""The widest range of joint sums that is held as a bit set, in steps."""


class TooLarge(RaspError):
    """A value set that cannot be enumerated."""


def sums(
    numbers: Sequence[Sequence[Value]], widths: Sequence[int], limit: int
) -> tuple[np.ndarray, list[np.ndarray], list[int]]:
    """All joint sums of w items, for every w in `widths` (all positive).

    `numbers[i][row]` is quantity i of the kind of item `row`. Returns each result's width, its sums (one array for each
    quantity, multiplied by the last result, the quantity's scale). Raises `TooLarge` beyond `limit` results.
    """
    scales = [math.lcm(*(Fraction(v).denominator for v in column)) for column in numbers]
    whole = [[int(v * scale) for v in column] for column, scale in zip(numbers, scales, strict=True)]
    low = [min(column, default=0) for column in whole]
    longest = max(widths, default=0)
    spans = [(max(column, default=0) - least) * longest + 1 for column, least in zip(whole, low, strict=True)]
    radix = [math.prod(spans[i + 1 :]) for i in range(len(spans))]
    size = math.prod(spans)
    if size > 2**62:
        raise TooLarge(f"sums of {longest} values have {size:.0e} possible values: too many to enumerate")
    steps = sorted(
        {
            sum((c[row] - m) * r for c, m, r in zip(whole, low, radix, strict=True))
            for row in range(len(numbers[0]) if numbers else 1)
        }
    )
    found_widths, found = (reach_bits if size <= BITS else reach_sets)(steps, widths, size, limit)
    totals = []
    for least, span, r in zip(low, spans, radix, strict=True):
        totals.append((found // r) % span + least * found_widths)
    return found_widths, totals, scales


def reach_bits(
    steps: Sequence[int], widths: Sequence[int], size: int, limit: int
) -> tuple[np.ndarray, np.ndarray]:
    """(width, sum) of all sums, by shifting a bit set of the sums so far."""
    wanted, reach, out, count = set(widths), 1, [], 0
    for w in range(1, max(widths, default=0) + 1):
        shifted = 0
        for step in steps:
            shifted |= reach << step
        reach = shifted
        if w in wanted:
            raw = np.frombuffer(reach.to_bytes((size + 7) // 8, "little"), dtype=np.uint8)
            sums_ = np.flatnonzero(np.unpackbits(raw, bitorder="little"))
            count += len(sums_)
            if count > limit:
                raise TooLarge(f"its joint values are more than {limit:,}: too many to enumerate")
            out.append((np.full(len(sums_), w), sums_))
    return collect(out)


def reach_sets(
    steps: Sequence[int], widths: Sequence[int], size: int, limit: int
) -> tuple[np.ndarray, np.ndarray]:
    """(width, sum) of all sums, for sums that are few but far apart."""
    wanted, reach, out, count = set(widths), np.zeros(1, dtype=np.int64), [], 0
    for w in range(1, max(widths, default=0) + 1):
        if len(reach) * len(steps) > 4 * limit:
            raise TooLarge(f"its joint values are more than {limit:,}: too many to enumerate")
        reach = np.unique(reach[:, None] + np.array(steps, dtype=np.int64))
        if w in wanted:
            count += len(reach)
            if count > limit:
                raise TooLarge(f"its joint values are more than {limit:,}: too many to enumerate")
            out.append((np.full(len(reach), w), reach))
    return collect(out)


def collect(parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    if not parts:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    widths, found = zip(*parts, strict=True)
    return np.concatenate(widths).astype(np.int64), np.concatenate(found).astype(np.int64)


def fractions(numerators: np.ndarray, denominators: np.ndarray) -> tuple[np.ndarray, list[int | Fraction]]:
    """The distinct numerators / denominators, and which of them each pair is."""
    common = np.gcd(numerators, denominators)
    over, under = numerators // common, denominators // common
    least, radix = int(over.min(initial=0)), int(under.max(initial=0)) + 1
    if (int(over.max(initial=0)) - least + 1) * radix > 2**62:
        raise TooLarge("its means have numerators and denominators too large to enumerate")
    flat, where = np.unique((over - least) * radix + under, return_inverse=True)
    pairs = zip((flat // radix + least).tolist(), (flat % radix).tolist(), strict=True)
    return where, [n if d == 1 else Fraction(n, d) for n, d in pairs]
