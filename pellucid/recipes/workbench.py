"""A trained run with all that methods need beside it, and pruning it from end to end."""

import contextlib
import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from tokenizers import Tokenizer
from torch import Tensor

from pellucid.core.checkpoint import (
    boxed,
    content_hash,
    find_checkpoint,
    load_metadata,
    load_model,
    load_tokenizer,
)
from pellucid.core.circuit import Circuit, kept_masks
from pellucid.core.errors import places
from pellucid.core.files import write_atomic
from pellucid.core.transformer import Transformer
from pellucid.data.prepare import prepare
from pellucid.data.shards import Shard
from pellucid.lab.config import PruneConfig
from pellucid.lab.controls import Point, controls, loss_at
from pellucid.lab.faithful import text_kl
from pellucid.lab.means import node_means, stored_means
from pellucid.lab.prune import frozen, prune
from pellucid.recipes.recipe import Recipe
from pellucid.recipes.view import Subject, model_view
from pellucid.tasks import make_task
from pellucid.tasks.task import Task
from pellucid.training.log import read_log
from pellucid.viewer.schema import ModelView

MEAN_TOKENS = 262_144


@dataclass(frozen=True)
class Workbench:
    """A run opened for study: its model, tokenizer, recipe, and the means of its nodes over its pretraining data."""

    path: Path
    """Where circuits are kept."""
    model: Transformer
    tokenizer: Tokenizer
    recipe: Recipe
    metadata: dict[str, Any]
    means: dict[str, Tensor]
    text: Shard
    """Held-out tokens of the run's own mixture of corpora."""
    train: Shard
    """Training tokens, which means are over."""

    @classmethod
    def open(cls, path: str | Path, *, device: str = "auto") -> "Workbench":
        """The run at `path`; a `ValueError` if it was not trained from a recipe.

        What is made of a model in the box, `pellucid:NAME`, is written to `runs/NAME`.
        """
        metadata, tokenizer = load_metadata(path), load_tokenizer(path)
        model = load_model(path, device=device)
        recipe = load_recipe(path)
        mixture = [(c.name, c.weight) for c in recipe.data.corpora]
        train = prepare(mixture, tokenizer, MEAN_TOKENS, "train", seed=recipe.data.seed)
        text = prepare(mixture, tokenizer, MEAN_TOKENS, "validation", seed=recipe.data.seed)
        means = stored_means(path, model, train.tokens)
        name = boxed(path)
        path = Path(path) if name is None else Path("runs") / name
        return cls(path, model, tokenizer, recipe, metadata, means, text, train)

    def task(self, name: str) -> Task:
        """The task `name` in this model's tokens."""
        return make_task(name, self.tokenizer)

    def means_for(self, config: PruneConfig) -> dict[str, Tensor]:
        """What a search with this config freezes nodes at."""
        if config.means == "all":
            return self.means
        return node_means(self.model, self.train.tokens, by_position=True)

    def controls(
        self, task: Task, config: PruneConfig, *, seed: int = 0, progress: Callable[..., None] | None = None
    ) -> dict[str, list[Point]]:
        """What the same search finds where there is nothing to find; also written beside its circuit."""
        found = controls(
            self.model, task, self.means_for(config), self.train.tokens, config, seed=seed, progress=progress
        )
        text = json.dumps(
            {name: [asdict(point) for point in points] for name, points in found.items()}, indent=1
        )
        write_atomic(self.folder(task.name, search_name(config.key(), seed)) / "controls.json", text + "\n")
        return found

    def prune(
        self, task: Task, config: PruneConfig, *, seed: int = 0, progress: Callable[..., None] | None = None
    ) -> Circuit:
        """The circuit of `task`, from `circuits/` beside the checkpoint if the same search was made before; `keep` says
        what becomes of it, and of an earlier one."""
        circuit = self.load(self.folder(task.name, search_name(config.key(), seed)) / "circuit.json")
        if circuit is None:
            means = self.means_for(config)
            circuit = prune(self.model, task, means, config=config, seed=seed, progress=progress)
            circuit = self.on_text(circuit, means)
        self.keep(circuit)
        return circuit

    def on_text(self, circuit: Circuit, means: dict[str, Tensor]) -> Circuit:
        """`circuit` with `text_kl` among its metrics, on held-out pretraining text."""
        with frozen(self.model) as model:
            found = text_kl(model, kept_masks(circuit, model), means, self.text.tokens)
        return circuit.model_copy(update={"metrics": {**circuit.metrics, "text_kl": found}})

    def load(self, file: Path) -> Circuit | None:
        """The circuit in `file`, None if there is no file. Raises ValueError if it is of another model."""
        if not file.exists():
            return None
        circuit, own = Circuit.load(file), content_hash(self.model)
        if circuit.model != own:
            raise ValueError(
                f"{file} is a circuit of the model {circuit.model}, but the one in {self.path} is {own}: move it away first"
            )
        return circuit

    def folder(self, task: str, search: str) -> Path:
        """Where what came of the search of that `search_name` is: in `circuits/TASK/` if it is the latest or the first,
        else in a folder there of the search's name. Raises ValueError where the latest is of another model."""
        place = self.path / "circuits" / task
        latest = self.load(place / "circuit.json")
        first = latest is None and not (place / search).exists()
        return place if first or (latest and made_by(latest) == search) else place / search

    def keep(self, circuit: Circuit) -> None:
        """Make `circuit` the latest, `circuits/TASK/circuit.json`. One of another search that is there moves to a folder
        beside it, with its view and controls. A whole model, in which nothing was searched, is none and is not kept.

        Raises ValueError where the latest is of another model."""
        if not circuit.metrics["searched"]:
            return
        place, own = self.path / "circuits" / circuit.task, self.folder(circuit.task, made_by(circuit))
        if self.load(own / "circuit.json") != circuit:
            circuit.save(own / "circuit.json")
        if own != place:
            if latest := self.load(place / "circuit.json"):
                move_products(place, place / made_by(latest))
            move_products(own, place)

    def view(self, name: str, task: Task, circuit: Circuit) -> ModelView:
        """The circuit as a page shows it; also written beside it as `view.json`."""
        subject = Subject(self.model, self.tokenizer, self.means, task, self.text.tokens)
        log = read_log(self.path / "log.jsonl")
        per_step = self.metadata["tokens"] / max(1, self.metadata["step"])
        curves = {
            key: [(line["step"] * per_step, line[key]) for line in log if key in line] for key in ("loss",)
        }
        facts = {
            "validation_loss": self.validation_loss,
            **{f"validation_loss_{name}": loss for name, loss in self.metadata["validation"].items()},
            **parameter_counts(self.model),
            "task": task.name,
            "tokens": self.metadata["tokens"],
            **circuit.metrics,
            **self.control_losses(circuit),
            "token_edges": circuit.token_edges,
        }
        view = model_view(name, self.description, subject, circuit, facts, curves)
        write_atomic(self.folder(task.name, made_by(circuit)) / "view.json", view.model_dump_json() + "\n")
        return view

    def control_losses(self, circuit: Circuit) -> dict[str, float]:
        """The least loss of each control within the circuit's edges, where controls of its search are written."""
        file = self.folder(circuit.task, made_by(circuit)) / "controls.json"
        if not file.exists():
            return {}
        found = json.loads(file.read_text())
        edges = int(circuit.metrics["edges"] or 0)
        return {
            f"control_{name}": loss_at([Point(**point) for point in points], edges)
            for name, points in found.items()
        }

    @property
    def description(self) -> str:
        """The run in a line."""
        c, layers = self.model.config, self.model.config.layers
        heads = sum(len(layer.heads) for layer in layers)
        neurons = sum(layer.d_mlp for layer in layers)
        corpora = ", ".join(corpus.name for corpus in self.recipe.data.corpora)
        return (
            f"{self.recipe.name}: {len(layers)} layers, width {c.d_model}, {heads} heads, {neurons:,} neurons, "
            f"{c.vocab_size:,} tokens; trained on {corpora}"
        )

    @property
    def validation_loss(self) -> float | None:
        """Nats a token, over the corpora by their share of the mixture; None if training has not got that far."""
        weights = {c.name: c.weight for c in self.recipe.data.corpora}
        losses = self.metadata["validation"]
        if not losses:
            return None
        return sum(weights[name] * loss for name, loss in losses.items()) / sum(weights[n] for n in losses)


def search_name(search: object, seed: object) -> str:
    """A short hash of a search, by its config's key and its seed."""
    return hashlib.sha256(f"{search} {seed}".encode()).hexdigest()[:8]


def made_by(circuit: Circuit) -> str:
    """The `search_name` of the search that found `circuit`."""
    return search_name(circuit.metrics.get("search"), circuit.metrics.get("seed"))


def move_products(source: Path, target: Path) -> None:
    """Move what came of a search; the circuit last, so that after a crash the next call moves the rest."""
    target.mkdir(exist_ok=True)
    for name in ("controls.json", "view.json", "circuit.json"):
        if (source / name).exists():
            (source / name).replace(target / name)
    with contextlib.suppress(OSError):  # the task's folder is not empty
        source.rmdir()


def load_recipe(path: str | Path) -> Recipe:
    """What the run at `path` was trained from; a `ValueError` if it does not say."""
    recipe = load_metadata(path).get("recipe")
    if not recipe:
        raise ValueError(f"{path} does not say what it was trained on")
    try:
        return TypeAdapter(Recipe).validate_python(recipe)
    except ValidationError as error:
        raise ValueError(
            f"{find_checkpoint(path) / 'config.json'}: its recipe is not valid: {places(error)}"
        ) from None


def parameter_counts(model: Transformer) -> dict[str, float | int]:
    """Parameters and nonzeros: of all, and without the bigram table and sinks, which are dense by design."""
    state = dict(model.named_parameters())
    apart = {name for name in state if name == "bigram" or name.endswith(".sink")}
    sparse = {name: p for name, p in state.items() if name not in apart}
    count, nonzero = (
        sum(p.numel() for p in sparse.values()),
        sum(int(p.count_nonzero()) for p in sparse.values()),
    )
    return {
        "parameters": count,
        "nonzeros": nonzero,
        "nonzero_fraction": nonzero / count,
        "dense_apart_parameters": sum(state[name].numel() for name in apart),
    }


def load_view(path: str | Path) -> ModelView:
    """The view that pruning wrote: at `path`, or in the one circuit under a run's `circuits/`."""
    path = Path(path)
    files = (
        [path]
        if path.is_file()
        else sorted(path.glob("view.json")) or sorted(path.glob("circuits/*/view.json"))
    )
    if not files:
        raise ValueError(
            f"no pruned circuit at {path}: expected view.json there or under circuits/ (run prune first)"
        )
    if len(files) > 1:
        raise ValueError(f"{path} holds several circuits: name one of {', '.join(map(str, files))}")
    try:
        view = ModelView.model_validate_json(files[0].read_text())
    except ValidationError as error:
        raise ValueError(
            f"{files[0]} is not a view of a circuit, the view.json that prune writes: {places(error)}"
        ) from None
    if "task" not in view.metrics:
        raise ValueError(f"{files[0]} does not say which task it is of")
    return view
