"""One recipe for each ablation of the weight-sparse seed's appendix A, and for each other way to sparse weights.

All are changes of one small base. As a program, trains any of them over seeds and learning rates and tabulates them:
`python -m pellucid.recipes.ablations --out runs/ablations --seeds 3 no-warmup clip`.
"""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import tyro
from rich.table import Table

from pellucid.core.checkpoint import load_metadata
from pellucid.core.config import ActivationSparsity, ModelConfig, uniform
from pellucid.core.errors import unknown
from pellucid.core.files import write_atomic
from pellucid.recipes.recipe import DataConfig, Recipe, prepare_data, run
from pellucid.sparse.hard_concrete import HardConcreteConfig
from pellucid.sparse.projection import SparsityConfig
from pellucid.training.config import TrainConfig
from pellucid.training.log import read_log
from pellucid.training.loop import Interrupted
from pellucid.training.progress import StepProgress, console, results

Change = Callable[[Recipe], Recipe]
FRACTION = 0.05


def base() -> Recipe:
    """What the ablations change: two layers of width 128, 5% nonzeros, a million tokens."""
    return Recipe(
        name="ablate-base",
        data=DataConfig(vocab_size=512, tokens=4_200_000),
        model=ModelConfig(
            vocab_size=512,
            d_model=128,
            n_ctx=128,
            layers=uniform(n_layer=2, n_head=8, d_head=16, d_mlp=512),
            norm_gain=False,
            bigram=True,
            activation_sparsity=ActivationSparsity(fraction=0.25),
        ),
        train=TrainConfig(steps=500, batch_size=16, seq_len=128, lr=8e-2),
        sparsity=SparsityConfig(fraction=FRACTION),
    )


@dataclass(frozen=True)
class Ablation:
    """A change of the base recipe."""

    figure: int | None
    """The seed's figure; None where it has none."""

    meaning: str
    change: Change

    def __call__(self, recipe: Recipe) -> Recipe:
        return self.change(recipe)


def train(**changes: Any) -> Change:
    return lambda r: replace(r, train=replace(r.train, **changes))


def model(**changes: Any) -> Change:
    return lambda r: replace(r, model=replace(r.model, **changes))


def sparsity(**changes: Any) -> Change:
    return lambda r: replace(r, sparsity=replace(topk(r), **changes))


def topk(recipe: Recipe) -> SparsityConfig:
    """The top-k settings of a recipe that has them."""
    if not isinstance(recipe.sparsity, SparsityConfig):
        raise ValueError(f"ablations change a recipe with a SparsityConfig, not {recipe.sparsity!r}")
    return recipe.sparsity


def also_dense(*patterns: str) -> Change:
    return lambda r: sparsity(dense=(*topk(r).dense, *patterns))(r)


def heads(d_head: int) -> Change:
    """Heads of another size, as many as keep the attention's width."""
    return lambda r: model(
        layers=tuple(
            replace(layer, heads=(d_head,) * max(1, layer.d_attn // d_head)) for layer in r.model.layers
        )
    )(r)


def budget(times: float) -> Change:
    return lambda r: train(steps=max(1, round(times * r.train.steps)))(r)


def activation(fraction: float) -> Change:
    return model(activation_sparsity=ActivationSparsity(fraction=fraction))


def gates(recipe: Recipe) -> Recipe:
    """HardConcrete at the same floor, with Adam as those gates need it."""
    config = HardConcreteConfig(floor=topk(recipe).fraction, dense=topk(recipe).dense)
    return train(lr=1e-2, eps=1e-8, gradient="none")(replace(recipe, sparsity=config))


ABLATIONS: dict[str, Ablation] = {
    "base": Ablation(None, "nothing: the base itself", lambda r: r),
    "no-warmup": Ablation(13, "no learning-rate warm-up", train(warmup=0.0)),
    "warmup-5": Ablation(14, "warm-up over 5% of training", train(warmup=0.05)),
    "warmup-10": Ablation(14, "warm-up over 10% of training", train(warmup=0.1)),
    "no-lr-decay": Ablation(15, "no learning-rate decay", train(final_lr=1.0)),
    "clip": Ablation(16, "gradient RMS clipped to 1, not made 1", train(gradient="clip")),
    "no-clip": Ablation(16, "gradient left alone", train(gradient="none")),
    "no-clip-small-eps": Ablation(
        16, "gradient left alone, Adam's usual epsilon of 1e-8", train(gradient="none", eps=1e-8)
    ),
    "tensor-rms": Ablation(16, "gradient RMS of each tensor made 1", train(gradient_scope="tensor")),
    "anneal-20": Ablation(17, "annealed to the end at 20% of training", sparsity(anneal_end=0.2)),
    "anneal-80": Ablation(17, "annealed to the end at 80% of training", sparsity(anneal_end=0.8)),
    "sink": Ablation(18, "attention sinks", model(sink=True)),
    "dense-biases": Ablation(19, "dense biases", also_dense("*.bias")),
    "dense-embeddings": Ablation(None, "dense embedding and unembedding", also_dense("wte.*", "head.*")),
    "head-32": Ablation(20, "heads of 32 channels", heads(32)),
    "head-64": Ablation(20, "heads of 64 channels", heads(64)),
    "legacy-schedule": Ablation(
        21, "the seed's late, abrupt schedule of embeddings and biases", sparsity(legacy_embed_schedule=True)
    ),
    "alive-0": Ablation(22, "no weights kept for units (j = 0)", sparsity(alive=0)),
    "alive-1": Ablation(22, "one weight kept for each unit (j = 1)", sparsity(alive=1)),
    "alive-2": Ablation(22, "two weights kept for each unit (j = 2)", sparsity(alive=2)),
    "no-anneal": Ablation(23, "no annealing: sparse from the start", sparsity(anneal_start=0.0, anneal_end=0.0)),
    "no-bigram": Ablation(24, "no bigram table", model(bigram=False)),
    "no-sharkfin": Ablation(25, "learning rate that ignores the fraction", sparsity(sharkfin=False)),
    "positions": Ablation(26, "learned positions, added", model(positions="learned")),
    "positions-beside": Ablation(
        26, "learned positions in 16 read-only channels", model(positions="learned", d_position=16)
    ),
    "beta1-0.8": Ablation(27, "Adam's beta1 0.8", train(beta1=0.8)),
    "beta1-0.95": Ablation(27, "Adam's beta1 0.95", train(beta1=0.95)),
    "beta2-0.99": Ablation(28, "Adam's beta2 0.99", train(beta2=0.99)),
    "beta2-0.999": Ablation(28, "Adam's beta2 0.999", train(beta2=0.999)),
    "weight-decay-0.03": Ablation(29, "weight decay 0.03", train(weight_decay=0.03)),
    "weight-decay-0.3": Ablation(29, "weight decay 0.3", train(weight_decay=0.3)),
    "eps-1": Ablation(30, "Adam's epsilon 1", train(eps=1.0)),
    "eps-0.01": Ablation(30, "Adam's epsilon 0.01", train(eps=0.01)),
    "eps-0.001": Ablation(30, "Adam's epsilon 0.001", train(eps=0.001)),
    "hard-concrete": Ablation(35, "L0 by HardConcrete gates", gates),
    "activations-dense": Ablation(37, "no activation sparsity", model(activation_sparsity=None)),
    "activations-half": Ablation(37, "half of the activations kept", activation(1 / 2)),
    "activations-eighth": Ablation(37, "an eighth of the activations kept", activation(1 / 8)),
    "tokens-half": Ablation(None, "half of the tokens", budget(0.5)),
    "tokens-double": Ablation(None, "twice the tokens", budget(2)),
    "tokens-four": Ablation(None, "four times the tokens", budget(4)),
    "dense": Ablation(None, "dense weights", lambda r: replace(r, sparsity=None)),
    "magnitude": Ablation(
        None, "dense weights until the end, then the largest kept", sparsity(anneal_start=1.0, anneal_end=1.0)
    ),
    "magnitude-tuned": Ablation(
        None,
        "dense weights, at 50% the largest kept, then training goes on",
        sparsity(anneal_start=0.5, anneal_end=0.5),
    ),
    "magnitude-gradual": Ablation(
        None,
        "dense weights, from 25% to 75% pruned by a cubic schedule (Zhu & Gupta 2017)",
        sparsity(anneal_start=0.25, anneal_end=0.75, anneal_power=3),
    ),
    "every-16": Ablation(None, "which weights stay is chosen anew each 16th step", sparsity(every=16)),
}  # fmt: skip


def ablation(name: str, recipe: Recipe | None = None) -> Recipe:
    """The recipe `ablate-NAME`: the base, or another `recipe`, with one change."""
    if name not in ABLATIONS:
        raise unknown("ablation", name, ABLATIONS)
    return replace(ABLATIONS[name](recipe or base()), name=f"ablate-{name}")


def makers() -> dict[str, Callable[[], Recipe]]:
    """The ablations as a registry has them: a documented function for each name."""

    def maker(name: str, a: Ablation) -> Callable[[], Recipe]:
        def make() -> Recipe:
            return ablation(name)

        make.__doc__ = f"{a.meaning}{f' (Figure {a.figure})' if a.figure else ''}"
        return make

    return {f"ablate-{name}": maker(name, a) for name, a in ABLATIONS.items()}


def run_ablations(
    names: Iterable[str],
    out: str | Path,
    *,
    seeds: int = 1,
    lr_factors: Sequence[float] = (1.0,),
    recipe: Recipe | None = None,
    device: str = "auto",
) -> list[dict[str, Any]]:
    """Train each ablation with each seed and learning-rate factor under `out`; returns the `tabulate`d rows.

    Runs that are finished there are not repeated, and one that was interrupted goes on. Rows are of all runs in `out`,
    so that processes which share it may divide the names.
    """
    out, names = Path(out), list(names)
    recipes = {name: ablation(name, recipe) for name in names}
    cells = [(name, f, seed) for seed in range(seeds) for name in names for f in lr_factors]
    prepared = {}
    with StepProgress("ablations", len(cells)) as bar:
        for name, factor, seed in cells:
            r = recipes[name]
            r = replace(r, train=replace(r.train, lr=factor * r.train.lr, seed=seed))
            data = (r.data, r.train.tokens if r.data.tokens is None else None)
            if data not in prepared:
                prepared[data] = prepare_data(r)
            where = out / name / f"lr{factor:g}" / f"seed{seed}"
            trained = run(r, where, device=device, resume=True, prepared=prepared[data])
            write_atomic(out / "ablations.json", json.dumps(tabulate(out), indent=1) + "\n")
            bar.step(loss=mean(trained.validation.values()))
    return tabulate(out)


def tabulate(out: str | Path) -> list[dict[str, Any]]:
    """A row for each ablation and learning-rate factor with finished runs under `out`, in the order of `ABLATIONS`.

    Losses are nats a token on validation text: mean and standard deviation over seeds, None where they are not finite
    or the seed is only one.
    """
    runs = defaultdict(list)
    for file in Path(out).glob("*/lr*/seed*/checkpoint/config.json"):
        metadata = load_metadata(file.parent)
        if metadata["step"] == metadata["train"]["steps"]:
            name = metadata["recipe"]["name"].removeprefix("ablate-")
            factor = float(file.parts[-4].removeprefix("lr"))
            nonzero = [
                line["nonzero"] for line in read_log(file.parents[1] / "log.jsonl") if "nonzero" in line
            ]
            runs[name, factor].append((mean(metadata["validation"].values()), nonzero[-1:] or [1.0]))
    rows = []
    for name, a in ABLATIONS.items():
        for factor in sorted(f for n, f in runs if n == name):
            losses = [loss for loss, _ in runs[name, factor]]
            finite = all(map(math.isfinite, losses))
            rows.append({
                "name": name,
                "figure": a.figure,
                "meaning": a.meaning,
                "lr_factor": factor,
                "seeds": len(losses),
                "loss": mean(losses) if finite else None,
                "spread": stdev(losses) if finite and len(losses) > 1 else None,
                "nonzero": mean(n for _, (n,) in runs[name, factor]),
            })  # fmt: skip
    return rows


def loss_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Each ablation at its best learning rate."""
    table = Table("ablation", "figure", "meaning", title="validation loss, nats a token")
    for column in ("loss", "nonzero", "lr factor", "seeds"):
        table.add_column(column, justify="right")
    for name in dict.fromkeys(row["name"] for row in rows):
        row = min((r for r in rows if r["name"] == name), key=lambda r: r["loss"] or math.inf)
        loss = "diverged" if row["loss"] is None else f"{row['loss']:.3f}"
        spread = "" if row["spread"] is None else f" ± {row['spread']:.3f}"
        table.add_row(
            name, str(row["figure"] or ""), row["meaning"], loss + spread,
            f"{100 * row['nonzero']:.1f}%", f"{row['lr_factor']:g}", str(row["seeds"]),
        )  # fmt: skip
    return table


@dataclass
class Sweep:
    """Train ablations, and write their losses to OUT/ablations.json. What is finished in OUT is not repeated."""

    names: tyro.conf.Positional[tuple[str, ...]] = ()
    """Which, without `ablate-`; none is all."""

    out: Path = Path("runs/ablations")
    """Directory of all the runs."""

    seeds: int = 1
    """Runs of each, with seeds 0, 1, ..."""

    lr_factors: tuple[float, ...] = (1.0,)
    """Factors on each recipe's learning rate; the table shows the best."""

    recipe: Recipe = field(default_factory=base)
    """What is changed."""

    device: str = "auto"
    """auto, cpu, cuda, ..."""

    def __call__(self) -> None:
        rows = run_ablations(
            self.names or ABLATIONS,
            self.out,
            seeds=self.seeds,
            lr_factors=self.lr_factors,
            recipe=self.recipe,
            device=self.device,
        )
        results.print(loss_table(rows))


if __name__ == "__main__":
    sweep = tyro.cli(Sweep, config=(tyro.conf.AvoidSubcommands,))
    try:
        sweep()
    except (ValueError, Interrupted) as error:
        console.print(str(error), style="red", highlight=False, markup=False, soft_wrap=True)
        raise SystemExit(130 if isinstance(error, Interrupted) else 2) from None
