"""Explaining a circuit by hand: what a node reads and writes, what hangs on it, and inputs that should break the model.

`docs/explained.md` uses this on the model in the box. Weight-sparse transformers, section 3.2 and Figures 4, 5 and 8.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor

from pellucid.core.checkpoint import find_checkpoint, load_model, load_tokenizer
from pellucid.core.circuit import Circuit, Node, kept_masks
from pellucid.core.errors import unknown
from pellucid.core.sites import node_sites
from pellucid.core.taps import Recorder, Tap
from pellucid.core.transformer import Transformer
from pellucid.data.words import function_name, phrase
from pellucid.lab.ablate import Kept, last_logits, last_logits_by_length
from pellucid.lab.faithful import resampled_logits
from pellucid.lab.means import stored_means
from pellucid.lab.prune import frozen
from pellucid.tasks.pairs import PairTask, Question
from pellucid.tasks.registry import make_task
from pellucid.tasks.task import Batch, Task, accuracy, answer_logits


@dataclass(frozen=True)
class Case:
    """A circuit kept with its model, and what an explanation needs beside it."""

    model: Transformer
    tokenizer: Tokenizer
    means: dict[str, Tensor]
    task: Task
    circuit: Circuit

    @classmethod
    def open(cls, path: str | Path, task: str, *, device: str = "cpu") -> "Case":
        """The circuit in `explained/TASK.json` beside the checkpoint at `path`.

        Raises `ValueError` where there is none, and for a circuit of another model.
        """
        kept = {file.stem: file for file in (find_checkpoint(path) / "explained").glob("*.json")}
        if task not in kept:
            raise unknown("explained circuit", task, kept)
        model, tokenizer = load_model(path, device=device), load_tokenizer(path)
        circuit = Circuit.load(kept[task])
        kept_masks(circuit, model)
        return cls(model, tokenizer, stored_means(path, model, ()), make_task(task, tokenizer), circuit)

    @property
    def kept(self) -> dict[str, Tensor]:
        """The circuit as masks."""
        return kept_masks(self.circuit, self.model)


def node(name: str) -> Node:
    """The node written "SITE:CHANNEL"."""
    site, _, channel = name.rpartition(":")
    if not site or not channel.isdigit():
        raise ValueError(f"a node is written SITE:CHANNEL, such as 0.mlp.act:7, not {name!r}")
    return Node(site=site, channel=int(channel))


def masks_of(model: Transformer, nodes: Iterable[Node | str]) -> dict[str, Tensor]:
    """Bool masks (width,) of every node site that keep `nodes`. Raises `ValueError` for a node that is not there."""
    masks = {
        site: torch.zeros(width, dtype=torch.bool, device=model.device)
        for site, width in node_sites(model.config).items()
    }
    for n in (node(n) if isinstance(n, str) else n for n in nodes):
        if n.site not in masks:
            raise unknown("node site", n.site, masks)
        if n.channel >= len(masks[n.site]):
            raise ValueError(f"{n.site!r} has {len(masks[n.site])} channels, so no node {n}")
        masks[n.site][n.channel] = True
    return masks


def inverse(kept: Kept) -> dict[str, Tensor]:
    """All nodes that are not in `kept`."""
    return {site: ~mask for site, mask in kept.items()}


def top_tokens(weights: Tensor, tokenizer: Tokenizer, n: int = 6) -> list[tuple[str, float]]:
    """The `n` tokens with the largest weights (v,) by magnitude, and those: zeros are left out.

    Of `model.wte.weight[:, channel]` what the embedding sends a channel; of `model.unembedding[:, channel]` which
    logits a channel raises and lowers.
    """
    order = weights.detach().abs().argsort(descending=True, stable=True)[:n].tolist()
    return [(tokenizer.decode([i]), weights[i].item()) for i in order if weights[i] != 0]


def margin(logits: Tensor, batch: Batch) -> Tensor:
    """How far (b,) the right answer's logit is above the wrong one's, from logits (b, 1, v) at each row's last token."""
    right, wrong = answer_logits(logits, batch.last()).unbind(1)
    return right - wrong


@torch.no_grad()
def swapped(model: Transformer, batch: Batch, nodes: Kept) -> Tensor:
    """The `margin` (b,) with `nodes` at their value in the other prompt of the pair, and all others running.

    Negative where the answer follows the swap: interchange intervention, also called resample ablation.
    """
    kept = {site: ~mask for site, mask in nodes.items() if mask.any()}
    return margin(resampled_logits(model, batch, kept, model), batch)


class Leaves(Tap):
    """Keeps what passes each site in `values`, with its gradient."""

    def __init__(self, sites: Iterable[str]):
        super().__init__(sites)
        self.values: dict[str, Tensor] = {}

    def __call__(self, site: str, x: Tensor) -> Tensor:
        x = x if x.requires_grad else x.detach().requires_grad_()
        x.retain_grad()
        self.values[site] = x
        return x


def swap_scores(model: Transformer, batch: Batch) -> dict[str, Tensor]:
    """For every node (width,) the change of the mean margin if it alone is swapped, to first order.

    The gradient times the difference between the two prompts, summed over tokens: attribution patching.
    """
    other, own = Recorder(node_sites(model.config)), Leaves(node_sites(model.config))
    with torch.no_grad():
        model(batch.corrupt, mask=None if model.config.causal else batch.mask, tap=other)
    with frozen(model) as model, torch.enable_grad():
        margin(last_logits(model, batch, own), batch).mean().backward()
    out = {}
    for site, x in own.values.items():
        assert x.grad is not None
        change = (other.values[site] - x.detach()) * x.grad
        out[site] = change[batch.mask].sum(0)
    return out


@torch.no_grad()
def token_means(
    model: Transformer, nodes: Sequence[Node | str], tokens: Tensor, *, least: int = 1, rows: int = 32
) -> list[Tensor]:
    """The mean activation (v,) of each node at each token of a text (n, t); NaN where it occurs under `least` times."""
    found = [node(n) if isinstance(n, str) else n for n in nodes]
    counts = torch.zeros(model.config.vocab_size)
    sums = [torch.zeros(model.config.vocab_size) for _ in found]
    recorder = Recorder({n.site for n in found})
    for part in tokens.split(rows):
        model(part.to(model.device), tap=recorder)
        flat = part.flatten().cpu()
        counts.index_add_(0, flat, torch.ones(len(flat)))
        for total, n in zip(sums, found, strict=True):
            total.index_add_(0, flat, recorder.values[n.site][..., n.channel].flatten().float().cpu())
    return [(total / counts).masked_fill(counts < least, torch.nan) for total in sums]


@dataclass(frozen=True)
class Outcome:
    """How a model does on prompts of one kind."""

    prompts: int
    correct: int
    margin: float
    """The mean logit of the right answer above the wrong one's."""

    @property
    def accuracy(self) -> float:
        return self.correct / self.prompts

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95% interval of the accuracy."""
        n, p, z = self.prompts, self.accuracy, 1.96
        centre, spread = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return max(0.0, (centre - spread) / (1 + z * z / n)), min(1.0, (centre + spread) / (1 + z * z / n))

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.accuracy:4.0%} ({low:.0%}-{high:.0%})"


@torch.no_grad()
def attack(
    model: Transformer, task: Task, *, pairs: int = 200, seed: int = 0, tap: Tap | None = None
) -> tuple[Outcome, Outcome]:
    """How the model does on the positive and on the negative prompts of a task's held-out pairs, with `tap` running."""
    batch = task.pairs(pairs, seed=seed, split="test").to(model.device)
    logits = last_logits_by_length(model, batch, tap)
    margins, right = margin(logits, batch), accuracy(logits, batch.last())
    first, second = (
        Outcome(pairs, int(right[side::2].sum()), margins[side::2].mean().item()) for side in (0, 1)
    )
    return first, second


Text = Callable[[Random, str, str, str], str]
"""A prompt from a generator, a split, the quote that opens the string and the other one."""


def _string(rng: Random, split: str, quote: str) -> str:
    return f"{function_name(rng, split)}({quote}{phrase(rng, split)}"


def _calls(n: int, same: bool) -> Text:
    def text(rng: Random, split: str, quote: str, other: str) -> str:
        kind = quote if same else other
        before = "".join([f"{_string(rng, split, kind)}{kind})\n" for _ in range(n)])
        return before + _string(rng, split, quote)

    return text


VARIANTS: dict[str, tuple[str, Text]] = {
    "red box": ("hold", lambda r, s, q, o: f"{_string(r, s, q)} {phrase(r, s)}"),
    "red`s box": ("hold", lambda r, s, q, o: f"{_string(r, s, q)}`s {phrase(r, s)}"),
    "red's box": ("fail", lambda r, s, q, o: f"{_string(r, s, q)}{o}s {phrase(r, s)}"),
    "red `box` old": ("hold", lambda r, s, q, o: f"{_string(r, s, q)} `{phrase(r, s)}` {phrase(r, s)}"),
    "red 'box' old": ("fail", lambda r, s, q, o: f"{_string(r, s, q)} {o}{phrase(r, s)}{o} {phrase(r, s)}"),
    'red ("box': ("hold", lambda r, s, q, o: f"{_string(r, s, q)} ({q}{phrase(r, s)}"),
    "red ('box": ("fail", lambda r, s, q, o: f"{_string(r, s, q)} ({o}{phrase(r, s)}"),
    "red (box": ("weaken", lambda r, s, q, o: f"{_string(r, s, q)} ({phrase(r, s)}"),
    "red', box": ("hold", lambda r, s, q, o: f"{_string(r, s, q)}{o}, {phrase(r, s)}"),
    "red's \"box": ("mend", lambda r, s, q, o: f"{_string(r, s, q)}{o}s {q}{phrase(r, s)}"),
    "four calls before, same quote": ("hold", _calls(4, True)),
    "four calls before, other quote": ("hold", _calls(4, False)),
}
"""Ways to write a string that is still open, by an example in double quotes: what the mechanism says that the model
will do, and the prompt. A control of the same form goes before each that should fail."""


def quote_task(name: str, tokenizer: Tokenizer) -> PairTask:
    """`single_double_quote` with the prompts of a variant: both members of a pair have the same words."""
    if name not in VARIANTS:
        raise unknown("variant", name, VARIANTS)
    _, text = VARIANTS[name]

    def draw(rng: Random, split: str) -> tuple[str, str]:
        state = rng.getstate()
        double = text(rng, split, '"', "'")
        rng.setstate(state)
        return double, text(rng, split, "'", '"')

    return PairTask(Question(name, f"close a string: {name}", draw, ('")', "')")), tokenizer)


def last_open_quote(tokens: Sequence[str]) -> str | None:
    """The circuit in a line: the kind of the last quote that is not one that closes."""
    kinds = {"'": "'", " '": "'", "('": "'", '"': '"', ' "': '"', '("': '"'}
    return next((kinds[token] for token in reversed(tokens) if token in kinds), None)


@torch.no_grad()
def agreement(
    model: Transformer, task: PairTask, rule: Callable[[Sequence[str]], str | None], *, pairs: int = 200
) -> float:
    """How often the model, right or wrong, prefers the answer that starts with what `rule` says of a prompt's tokens."""
    batch = task.pairs(pairs, split="test").to(model.device)
    right = margin(last_logits_by_length(model, batch), batch) > 0
    agreed = 0
    for row, mask, answers, hit in zip(batch.tokens, batch.mask, batch.answers, right, strict=True):
        answer = task.tokenizer.decode([int(answers[0 if hit else 1])])
        said = rule([task.tokenizer.decode([int(i)]) for i in row[mask]])
        agreed += said is not None and answer.startswith(said)
    return agreed / len(batch)


def attacks(
    path: str | Path, taps: Mapping[str, Tap] | None = None, *, pairs: int = 200, seed: int = 0
) -> str:
    """Every variant on the run at `path` as lines of text: accuracy on double and on single quotes, with intervals."""
    model, tokenizer = load_model(path), load_tokenizer(path)
    lines = [f"{'prompt':30} {'should':6} {'double':>16} {'single':>16}  margin"]
    for name, (says, _) in VARIANTS.items():
        double, single = attack(
            model, quote_task(name, tokenizer), pairs=pairs, seed=seed, tap=(taps or {}).get(name)
        )
        margins = f"{double.margin:+.1f} {single.margin:+.1f}"
        lines.append(f"{name:30} {says:6} {double!s:>16} {single!s:>16}  {margins}")
    return "\n".join(lines)
