"""What the parity kernels gain: selection, scores and sums against plain products, and the memory that they take.

512 tokens of d = 1024, 32 children of each parent, on two threads. The plain forms hold their sign patterns ready; those
of the children are one matrix product, those of single features are gathered from a table of all 32,768 directions.
"""

import resource
from collections.abc import Callable

import torch
from timing import medians, record
from torch import Tensor

from pellucid.kernels import parity

D, CHILDREN, TOKENS = 1024, 32, 512
SHIFT = D.bit_length() - 1
ACTIVE, FLAT = (16, 32), 48


def pair(fast: Callable[[], object], plain: Callable[[], object]) -> dict[str, float]:
    """Milliseconds of both, and their ratio."""
    s = medians({"fast": fast, "plain": plain}, rounds=11)
    return {
        **{f"{name}_ms": round(1000 * t, 2) for name, t in s.items()},
        "times_faster": round(s["plain"] / s["fast"], 1),
    }


def peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def extra_memory(selections: dict[str, Callable[[Tensor], object]]) -> dict[str, int]:
    """Bytes a token by which each raises the peak, all results being held, when very many tokens are coded."""
    tokens = 65536
    x, held, extra = torch.randn(tokens, D), [], {}
    for name, select in selections.items():
        select(x[:64])  # compiles
        before = peak_bytes()
        held.append(select(x))
        extra[name] = round((peak_bytes() - before) / tokens)
    return extra


def main() -> None:
    torch.set_num_threads(2)
    draw = torch.Generator().manual_seed(0)
    # Which bijection stands for the inverse does not matter to speed.
    masks = torch.arange(D) | torch.randperm(D, generator=draw) << SHIFT
    x, features = torch.randn(TOKENS, D, generator=draw), D * CHILDREN
    mean, scale = (
        torch.randn(D + features, generator=draw) / 10,
        torch.rand(D + features, generator=draw) + 0.5,
    )
    first, level = (mean[:D], scale[:D]), (mean[D:], scale[D:])
    rest = {"shift": SHIFT, "children": CHILDREN, "k": ACTIVE[1]}
    norm = D**-0.5

    def hierarchical(x: Tensor) -> tuple[parity.Selection, parity.Selection]:
        top = parity.select_channels(x, *first, ACTIVE[0])
        return top, parity.select_children(x, top[0], masks, *level, **rest)

    def flat(x: Tensor) -> parity.Selection:
        return parity.select_flat(x, masks, mean, scale, children=CHILDREN, k=FLAT)

    memory = extra_memory({"hierarchical": hierarchical, "flat": flat})
    parent_signs = parity.signs(torch.arange(D), masks)
    patterns = parity.signs(torch.arange(CHILDREN) << SHIFT, masks)
    directions = parity.signs(torch.arange(features), masks) * norm
    number = torch.arange(CHILDREN) << SHIFT

    def hierarchical_plain() -> Tensor:
        parents = ((x - first[0]) * first[1]).abs().topk(ACTIVE[0]).indices
        raw = ((x[:, None] * parent_signs[parents]) @ patterns.T * norm).flatten(1)
        index = (parents[..., None] | number).flatten(1)
        place = ((raw - level[0][index]) * level[1][index]).abs().topk(ACTIVE[1]).indices
        return index.gather(1, place)

    def flat_plain() -> Tensor:
        raw = torch.cat([x, x @ directions.T], dim=1)
        return ((raw - mean) * scale).abs_().topk(FLAT).indices

    index = torch.randint(0, features, (TOKENS, FLAT), generator=draw)
    z = torch.randn(TOKENS, FLAT, generator=draw)

    def backward(f: Callable[[Tensor], Tensor], at: Tensor) -> Callable[[], object]:
        def call() -> None:
            leaf = at.clone().requires_grad_()
            y = f(leaf)
            y.backward(torch.ones_like(y))

        return call

    def score_plain(x: Tensor) -> Tensor:
        return torch.einsum("nd,nkd->nk", x, directions[index])

    def decode_plain(z: Tensor) -> Tensor:
        return torch.einsum("nk,nkd->nd", z, directions[index])

    agree = (flat(x)[0].sort().values == flat_plain().sort().values).float().mean().item()
    record(
        "parity",
        hierarchical=pair(lambda: hierarchical(x), hierarchical_plain),
        flat=pair(lambda: flat(x), flat_plain),
        score=pair(lambda: parity.score(x, index, masks), lambda: score_plain(x)),
        score_backward=pair(backward(lambda x: parity.score(x, index, masks), x), backward(score_plain, x)),
        decode=pair(lambda: parity.decode(z, index, masks), lambda: decode_plain(z)),
        decode_backward=pair(
            backward(lambda z: parity.decode(z, index, masks), z), backward(decode_plain, z)
        ),
        flat_features_that_agree=round(agree, 5),
        extra_bytes_per_token=memory,
        code_bytes_per_token=12 * FLAT,
    )


if __name__ == "__main__":
    main()
