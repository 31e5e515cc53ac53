"""The parity kernels on the CPU: sixteen tokens, or sixteen parents of one token, side by side in a vector register.

An array of *rows* is float32 (rows, 16). Selections keep a token's best candidates while scores are computed, so that no
scores beyond one row array ever exist. Compiled by numba at the first call and cached; threads are Python's own (the
kernels release the GIL), so that any number of callers, and forks, are safe.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic
from torch import Tensor

LANES = 16
FLOATS = ir.VectorType(ir.FloatType(), LANES)
INTS = ir.VectorType(ir.IntType(32), LANES)


def instruction(f: Callable) -> Callable[..., Any]:
    """What numba cannot say, in the code of LLVM: `f` gives a signature and its lowering."""
    return intrinsic(f)


def helper(f: Callable) -> Callable[..., Any]:
    """`f` compiled into the kernels that call it."""
    return njit(nogil=True, error_model="numpy")(f)


def kernel(f: Callable) -> Callable[..., Any]:
    """`f` compiled; kept on disk where there is a place that can be written to."""
    try:
        return njit(cache=True, nogil=True, error_model="numpy")(f)
    except RuntimeError:
        return helper(f)


def _row(context, builder, array_type, array, number, kind=FLOATS):
    """Pointer to row `number` of an array, as to one vector."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(builder.bitcast(data, kind.as_pointer()), [number])


def _everywhere(builder, scalar):
    """A 32-bit integer in all lanes."""
    one = builder.insert_element(ir.Constant(INTS, ir.Undefined), scalar, ir.IntType(32)(0))
    return builder.shuffle_vector(one, one, ir.Constant(INTS, [0] * LANES))


def _butterfly(size: int):
    @instruction
    def butterfly(typing, rows, first, step):
        """The Walsh-Hadamard transform of the rows first, first + step, ... (`size` of them), in place."""

        def codegen(context, builder, signature, arguments):
            at = [
                _row(
                    context,
                    builder,
                    signature.args[0],
                    arguments[0],
                    builder.add(arguments[1], builder.mul(arguments[2], ir.Constant(ir.IntType(64), i))),
                )
                for i in range(size)
            ]
            v = [builder.load(p, align=4) for p in at]
            half = 1
            while half < size:
                for i in range(size):
                    if not i & half:
                        v[i], v[i + half] = builder.fadd(v[i], v[i + half]), builder.fsub(v[i], v[i + half])
                half *= 2
            for p, value in zip(at, v, strict=True):
                builder.store(value, p, align=4)
            return context.get_dummy_value()

        return types.void(rows, types.int64, types.int64), codegen

    return butterfly


butterfly2, butterfly4, butterfly8 = _butterfly(2), _butterfly(4), _butterfly(8)


@instruction
def add_signed(typing, rows, number, value, index, mask):
    """rows[number] += value * (-1)^popcount(index & mask), where each lane has its own index (uint32)."""

    def codegen(context, builder, signature, arguments):
        rows, number, value, index, mask = arguments

        at = _row(context, builder, signature.args[0], rows, number)
        lanes = builder.load(
            _row(context, builder, signature.args[3], index, ir.IntType(64)(0), INTS), align=4
        )
        popcount = get_or_insert_function(
            builder.module, ir.FunctionType(INTS, [INTS]), f"llvm.ctpop.v{LANES}i32"
        )
        count = builder.call(popcount, [builder.and_(lanes, _everywhere(builder, mask))])
        sign = builder.shl(count, ir.Constant(INTS, [31] * LANES))
        signed = builder.xor(sign, _everywhere(builder, builder.bitcast(value, ir.IntType(32))))
        total = builder.fadd(builder.load(at, align=4), builder.bitcast(signed, FLOATS))
        builder.store(total, at, align=4)
        return context.get_dummy_value()

    return types.void(rows, types.int64, types.float32, index, types.uint32), codegen


@instruction
def copy_signed(typing, to, number, source, bits):
    """to[number] = source[number] * (-1)^popcount(bits)."""

    def codegen(context, builder, signature, arguments):
        to, number, source, bits = arguments
        target = _row(context, builder, signature.args[0], to, number, INTS)
        value = builder.load(_row(context, builder, signature.args[2], source, number, INTS), align=4)
        sign = builder.shl(builder.ctpop(bits), bits.type(31))
        builder.store(builder.xor(value, _everywhere(builder, sign)), target, align=4)
        return context.get_dummy_value()

    return types.void(to, types.int64, source, types.uint32), codegen


@instruction
def signed(typing, value, index, mask):
    """value * (-1)^popcount(index & mask)."""

    def codegen(context, builder, signature, arguments):
        value, index, mask = arguments
        sign = builder.shl(builder.ctpop(builder.and_(index, mask)), mask.type(31))
        return builder.bitcast(builder.xor(builder.bitcast(value, mask.type), sign), value.type)

    return types.float32(types.float32, types.uint32, types.uint32), codegen


@instruction
def reach(typing, rows, number, norm, mean, scale, floor):
    """Which lanes of a row have a magnitude |(raw * norm - mean) * scale| of at least their `floor`: bits of a uint32."""

    def codegen(context, builder, signature, arguments):
        rows, number, norm, mean, scale, floor = arguments
        i32 = ir.IntType(32)

        def everywhere(scalar):
            return builder.bitcast(_everywhere(builder, builder.bitcast(scalar, i32)), FLOATS)

        raw = builder.load(_row(context, builder, signature.args[0], rows, number), align=4)
        z = builder.fsub(builder.fmul(raw, everywhere(norm)), everywhere(mean))
        bits = builder.bitcast(builder.fmul(z, everywhere(scale)), INTS)
        size = builder.and_(bits, ir.Constant(INTS, [0x7FFFFFFF] * LANES))
        least = builder.load(
            _row(context, builder, signature.args[5], floor, ir.IntType(64)(0), INTS), align=4
        )
        lanes = builder.bitcast(builder.icmp_unsigned(">=", size, least), ir.IntType(LANES))
        return builder.zext(lanes, i32)

    return types.uint32(rows, types.int64, *(types.float32,) * 3, floor), codegen


@instruction
def lowest(typing, bits):
    """The place of the lowest one of a uint32 that has a one."""
    return types.int64(types.uint32), lambda context, builder, signature, arguments: builder.zext(
        builder.cttz(arguments[0], ir.IntType(1)(1)), ir.IntType(64)
    )


@helper
def rows(n: int) -> np.ndarray:
    """n rows of zeros that each begin at a multiple of their own 64 bytes."""
    space = np.zeros((n + 1) * LANES, np.float32)
    begin = -(space.ctypes.data // 4) % LANES
    return space[begin : begin + n * LANES].reshape(n, LANES)


@helper
def transform(y: np.ndarray) -> None:
    """The Walsh-Hadamard transform of all rows, in place, not normalised."""
    n, step = len(y), 1
    while step < n:
        left = n // step
        size = 2 if left == 2 else 4 if left == 4 or left == 16 else 8
        for base in range(0, n, size * step):
            for first in range(base, base + step):
                if size == 8:
                    butterfly8(y, first, step)
                elif size == 4:
                    butterfly4(y, first, step)
                else:
                    butterfly2(y, first, step)
        step *= size


@helper
def magnitude(z):
    """|z| as an integer of the same order; NaN is above all."""
    return np.uint32(np.float32(z).view(np.uint32) & np.uint32(0x7FFFFFFF))


@helper
def keep(keys, raws, lane, size, number, raw):
    """Insert a candidate of magnitude `size` where it belongs in the best of a token (lane), if it does: the largest
    first, of equal ones the lower feature number."""
    key = np.uint64(size) << np.uint64(32) | np.uint64(0xFFFFFFFF) - np.uint64(number)
    i = np.uint64(keys.shape[1] - 1)
    if key < keys[lane, i]:
        return
    while i > 0 and keys[lane, i - np.uint64(1)] < key:
        keys[lane, i] = keys[lane, i - np.uint64(1)]
        raws[lane, i] = raws[lane, i - np.uint64(1)]
        i -= np.uint64(1)
    keys[lane, i] = key
    raws[lane, i] = raw


@helper
def hand_over(keys: np.ndarray, raws: np.ndarray, index: np.ndarray, score: np.ndarray) -> None:
    """Write a token's best out, and forget them."""
    for i in range(len(keys)):
        index[i] = 0xFFFFFFFF - (keys[i] & np.uint64(0xFFFFFFFF))
        score[i] = raws[i]
        keys[i] = 0


@helper
def parents_scores(
    y: np.ndarray, x: np.ndarray, index: np.ndarray, masks: np.ndarray, bucket: np.ndarray
) -> None:
    """Raw scores, times sqrt(d), of all children (rows) of sixteen parents (lanes): the channels, signed by the
    parent, are summed by the bits that children see, and those sums transformed."""
    y[:] = 0
    for k in range(len(x)):
        add_signed(y, bucket[k], x[k], index, masks[k])
    transform(y)


@kernel
def _child_scores(begin, end, x, parents, masks, shift, out):
    children, norm = out.shape[2], np.float32(1 / np.sqrt(x.shape[1]))
    bucket = (masks >> np.uint32(shift) & np.uint32(children - 1)).astype(np.int64)
    y, index = rows(children), np.zeros(LANES, np.uint32)
    for n in range(begin, end):
        for group in range(0, parents.shape[1], LANES):
            lanes = min(LANES, parents.shape[1] - group)
            for lane in range(lanes):
                index[lane] = parents[n, group + lane]
            parents_scores(y, x[n], index, masks, bucket)
            for lane in range(lanes):
                for j in range(children):
                    out[n, group + lane, j] = y[j, lane] * norm


@kernel
def _select_children(begin, end, x, parents, masks, mean, scale, shift, children, first, index, score):
    norm, k = np.float32(1 / np.sqrt(x.shape[1])), index.shape[1]
    bucket = (masks >> np.uint32(shift) & np.uint32(children - 1)).astype(np.int64)
    one, zero, floor = np.float32(1), np.float32(0), np.zeros(LANES, np.uint32)
    y, z, lane_index = rows(children), rows(children), np.zeros(LANES, np.uint32)
    keys, raws = np.zeros((1, k), np.uint64), np.zeros((1, k), np.float32)
    for n in range(begin, end):
        floor[:] = 0
        for group in range(0, parents.shape[1], LANES):
            lanes = min(LANES, parents.shape[1] - group)
            for lane in range(lanes):
                lane_index[lane] = parents[n, group + lane]
            parents_scores(y, x[n], lane_index, masks, bucket)
            for j in range(first, children):
                for lane in range(lanes):
                    number = np.uint64(lane_index[lane]) | np.uint64(j) << np.uint64(shift)
                    y[j, lane] *= norm
                    z[j, lane] = (y[j, lane] - mean[number]) * scale[number]
            for j in range(first, children):
                hits = np.uint32(reach(z, j, one, zero, one, floor) & ((1 << lanes) - 1))
                while hits:
                    lane = lowest(hits)
                    hits = np.uint32(hits & (hits - np.uint32(1)))
                    number = np.uint64(lane_index[lane]) | np.uint64(j) << np.uint64(shift)
                    keep(keys, raws, 0, magnitude(z[j, lane]), number, y[j, lane])
                    floor[:] = keys[0, k - 1] >> np.uint64(32)
        hand_over(keys[0], raws[0], index[n], score[n])


@kernel
def _select_channels(begin, end, x, mean, scale, index, score):
    d, k = x.shape[1], index.shape[1]
    one, zero, lanes = np.float32(1), np.float32(0), min(LANES, d)
    z, floor = rows(-(-d // LANES)), np.zeros(LANES, np.uint32)
    flat = z.reshape(-1)
    keys, raws = np.zeros((1, k), np.uint64), np.zeros((1, k), np.float32)
    for n in range(begin, end):
        for c in range(d):
            flat[c] = (x[n, c] - mean[c]) * scale[c]
        floor[:] = 0
        for row in range(len(z)):
            hits = np.uint32(reach(z, row, one, zero, one, floor) & ((1 << lanes) - 1))
            while hits:
                lane = lowest(hits)
                hits = np.uint32(hits & (hits - np.uint32(1)))
                c = row * LANES + lane
                keep(keys, raws, 0, magnitude(flat[c]), c, x[n, c])
                floor[:] = keys[0, k - 1] >> np.uint64(32)
        hand_over(keys[0], raws[0], index[n], score[n])


@helper
def keep_rows(y, norm, first, mean, scale, floor, keys, raws):
    """Offer the tokens (lanes) the features first, first + 1, ... (rows)."""
    k = keys.shape[1]
    for row in range(len(y)):
        number = first + row
        m, s = mean[number], scale[number]
        lanes = reach(y, row, norm, m, s, floor)
        while lanes:
            lane = lowest(lanes)
            lanes = np.uint32(lanes & (lanes - np.uint32(1)))
            raw = y[row, lane] * norm
            keep(keys, raws, lane, magnitude((raw - m) * s), number, raw)
            floor[lane] = keys[lane, k - 1] >> np.uint64(32)


@kernel
def _select_flat(begin, end, x, masks, mean, scale, children, index, score):
    d, k = x.shape[1], index.shape[1]
    norm = np.float32(1 / np.sqrt(d))
    own, y, floor = rows(d), rows(d), np.empty(LANES, np.uint32)
    keys, raws = np.zeros((LANES, k), np.uint64), np.zeros((LANES, k), np.float32)
    for n in range(begin, end, LANES):
        lanes = min(LANES, end - n)
        floor[:] = 0xFFFFFFFF
        floor[:lanes] = 0
        for lane in range(lanes):
            for c in range(d):
                own[c, lane] = x[n + lane, c]
        keep_rows(own, np.float32(1), 0, mean, scale, floor, keys, raws)
        for j in range(children):
            for c in range(d):
                copy_signed(y, c, own, np.uint32(np.uint32(j * d) & masks[c]))
            transform(y)
            keep_rows(y, norm, d + j * d, mean, scale, floor, keys, raws)
        for lane in range(lanes):
            hand_over(keys[lane], raws[lane], index[n + lane], score[n + lane])


@kernel
def _score(begin, end, x, index, masks, out):
    y, lane_index = rows(8), np.zeros(LANES, np.uint32)
    norm = np.float32(1 / np.sqrt(x.shape[1]))
    for n in range(begin, end):
        for group in range(0, index.shape[1], LANES):
            lanes = min(LANES, index.shape[1] - group)
            for lane in range(lanes):
                lane_index[lane] = index[n, group + lane]
            y[:] = 0
            for c in range(x.shape[1]):
                add_signed(y, c & 7, x[n, c], lane_index, masks[c])
            for lane in range(lanes):
                none = index[n, group + lane] < 0
                out[n, group + lane] = np.float32(0) if none else y[:, lane].sum() * norm


@kernel
def _decode(begin, end, z, index, masks, out):
    d = out.shape[1]
    norm = np.float32(1 / np.sqrt(d))
    total = np.empty(d, np.float32)
    for n in range(begin, end):
        total[:] = 0
        for i in range(index.shape[1]):
            if index[n, i] >= 0:
                feature, weight = np.uint32(index[n, i]), z[n, i] * norm
                for c in range(d):
                    total[c] += signed(weight, feature, masks[c])
        out[n] = total


@cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """Threads of this process: a fork does not inherit them."""
    return ThreadPoolExecutor(threads)


def _run(f: Callable, n: int, *arguments: Any) -> None:
    """A kernel over tokens 0..n-1, in torch's number of threads."""
    threads = max(min(torch.get_num_threads(), n // LANES), 1)
    arguments = tuple(a.detach().numpy() if isinstance(a, Tensor) else a for a in arguments)
    cuts = [n * i // threads // LANES * LANES for i in range(threads)] + [n]
    if threads == 1:
        f(0, n, *arguments)
    else:
        parts = _pool(os.getpid(), threads).map(lambda i: f(cuts[i], cuts[i + 1], *arguments), range(threads))
        list(parts)


def _words(masks: Tensor) -> np.ndarray:
    return masks.numpy().astype(np.uint32)


def _selection(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    return torch.empty((len(x), k), dtype=torch.int64), x.new_empty((len(x), k))


def select_channels(x: Tensor, mean: Tensor, scale: Tensor, k: int) -> tuple[Tensor, Tensor]:
    found = _selection(x, k)
    _run(_select_channels, len(x), x.contiguous(), mean.contiguous(), scale.contiguous(), *found)
    return found


def select_children(
    x: Tensor,
    parents: Tensor,
    masks: Tensor,
    mean: Tensor,
    scale: Tensor,
    *,
    shift: int,
    children: int,
    k: int,
) -> tuple[Tensor, Tensor]:
    found = _selection(x, k)
    moments = mean.contiguous(), scale.contiguous()
    above = shift >= x.shape[1].bit_length()
    tokens = x.contiguous(), parents.contiguous(), _words(masks)
    _run(_select_children, len(x), *tokens, *moments, shift, children, int(above), *found)
    return found


def select_flat(
    x: Tensor, masks: Tensor, mean: Tensor, scale: Tensor, *, children: int, k: int
) -> tuple[Tensor, Tensor]:
    found = _selection(x, k)
    moments = mean.contiguous(), scale.contiguous()
    _run(_select_flat, len(x), x.contiguous(), _words(masks), *moments, children, *found)
    return found


def child_scores(x: Tensor, parents: Tensor, masks: Tensor, *, shift: int, children: int) -> Tensor:
    out = x.new_empty((*parents.shape, children))
    _run(_child_scores, len(x), x.contiguous(), parents.contiguous(), _words(masks), shift, out)
    return out


def score(x: Tensor, index: Tensor, masks: Tensor) -> Tensor:
    out = x.new_empty(index.shape)
    _run(_score, len(x), x.contiguous(), index.contiguous(), _words(masks), out)
    return out


def decode(z: Tensor, index: Tensor, masks: Tensor) -> Tensor:
    out = z.new_empty((len(z), len(masks)))
    _run(_decode, len(z), z.contiguous(), index.contiguous(), _words(masks), out)
    return out
