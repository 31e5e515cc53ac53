"""A recipe: everything a run needs, as data, and how it is run."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

from tokenizers import Tokenizer

from pellucid.core.checkpoint import content_hash, load_model, load_tokenizer
from pellucid.core.config import ModelConfig
from pellucid.core.transformer import Transformer, pick_device
from pellucid.data.corpora import documents
from pellucid.data.prepare import prepare
from pellucid.data.shards import Shard
from pellucid.data.tokenizer import train_tokenizer
from pellucid.sparse.hard_concrete import HardConcrete, HardConcreteConfig
from pellucid.sparse.projection import Projection, SparsityConfig
from pellucid.training import distributed
from pellucid.training.config import TrainConfig
from pellucid.training.constraint import Constraint
from pellucid.training.loop import Trained, train


@dataclass(frozen=True, kw_only=True)
class CorpusConfig:
    """A corpus and its share of the training tokens."""

    name: str
    """`tiny-python`, `python-stdlib`, `files:GLOB` or `hf:NAME`."""

    weight: float = 1.0
    """Its share, relative to the others'."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What a model is trained on."""

    corpora: tuple[CorpusConfig, ...] = (CorpusConfig(name="tiny-python"),)
    """The mixture."""

    vocab_size: int = 2048
    """Of the byte-level BPE that is trained on the mixture."""

    tokenizer_characters: int = 2_000_000
    """Text that the tokenizer is trained on, shared out as the mixture is."""

    tokens: int | None = None
    """Distinct training tokens; None is as many as training sees."""

    seed: int = 0
    """Of the generated text and the order of documents."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A run: data, model, training, and the constraint on its weights if it has one."""

    name: str
    data: DataConfig
    model: ModelConfig
    train: TrainConfig
    sparsity: SparsityConfig | HardConcreteConfig | None = None
    """How weights become few; None is a dense model."""
    start: str | None = None
    """A run of the same model and tokens, whose weights training starts from; None is random ones."""

    def __post_init__(self):
        if self.data.vocab_size > self.model.vocab_size:
            raise ValueError(
                f"the tokenizer's {self.data.vocab_size} tokens do not fit the model's vocabulary of {self.model.vocab_size}"
            )
        if self.train.seq_len > self.model.n_ctx:
            raise ValueError(f"seq_len {self.train.seq_len} does not fit into n_ctx = {self.model.n_ctx}")
        if not self.data.corpora:
            raise ValueError("data.corpora must name at least one corpus")


@dataclass(frozen=True)
class Prepared:
    """A run's data: the tokenizer, the training shard and a validation shard for each corpus."""

    tokenizer: Tokenizer
    train: Shard
    validation: dict[str, Shard]


def make_tokenizer(data: DataConfig) -> Tokenizer:
    """The tokenizer that `data` describes."""
    total = sum(c.weight for c in data.corpora)
    texts = (
        some_text(c.name, round(data.tokenizer_characters * c.weight / total), data.seed)
        for c in data.corpora
    )
    return train_tokenizer(chain.from_iterable(texts), data.vocab_size)


def some_text(corpus: str, characters: int, seed: int) -> Iterator[str]:
    """Training documents of `corpus` until there are so many characters."""
    for text in documents(corpus, "train", seed=seed):
        yield text[:characters]
        characters -= len(text)
        if characters <= 0:
            return


def prepare_data(recipe: Recipe, *, progress: Callable[[int, int], None] | None = None) -> Prepared:
    """The tokenizer of a recipe, trained anew, and its token shards, from the cache where they were made before."""
    data = recipe.data
    tokenizer = make_tokenizer(data)
    shard = prepare(
        [(c.name, c.weight) for c in data.corpora],
        tokenizer,
        data.tokens or recipe.train.tokens + recipe.train.seq_len + 1,
        "train",
        seed=data.seed,
        progress=progress,
    )
    validation = {
        c.name: prepare(
            [(c.name, 1.0)], tokenizer, 2 * recipe.train.validation_tokens, "validation", seed=data.seed
        )
        for c in data.corpora
    }
    return Prepared(tokenizer, shard, validation)


def run(
    recipe: Recipe,
    out: str | Path,
    *,
    device: str = "auto",
    resume: bool = False,
    tensorboard: bool = False,
    prepared: Prepared | None = None,
) -> Trained:
    """Train what `recipe` says into the directory `out`."""
    with distributed.process_group(pick_device(device)):
        if prepared is None:
            with distributed.first():
                prepared = prepare_data(recipe)
        model = Transformer(recipe.model, seed=recipe.train.seed, device=device)
        made_from = {"tokens": prepared.train.meta["blake2b"]}
        if recipe.start is not None:
            made_from["start"] = start_from(recipe.start, model, prepared.tokenizer)
        return train(
            model,
            recipe.train,
            prepared.train.tokens,
            out,
            constraint=make_constraint(model, recipe),
            validation={name: shard.tokens for name, shard in prepared.validation.items()},
            tokenizer=prepared.tokenizer,
            recipe=asdict(recipe),
            made_from=made_from,
            resume=resume,
            tensorboard=tensorboard,
            label=recipe.name,
        )


def make_constraint(model: Transformer, recipe: Recipe) -> Constraint:
    """What keeps the model's weights few."""
    if recipe.sparsity is None:
        return Constraint()
    if isinstance(recipe.sparsity, HardConcreteConfig):
        return HardConcrete(model, recipe.sparsity, seed=recipe.train.seed)
    return Projection(model, recipe.sparsity)


def start_from(path: str | Path, model: Transformer, tokenizer: Tokenizer) -> str:
    """Put the weights of the run at `path` into `model`; returns their hash. `ValueError` if it is of another kind."""
    source = load_model(path, device=model.device)
    if source.config != model.config:
        a, b = asdict(source.config), asdict(model.config)
        different = ", ".join(f"{key} ({a[key]} there)" for key in a if a[key] != b[key])
        raise ValueError(f"training cannot start from {path}: its model differs in {different}")
    if load_tokenizer(path).to_str() != tokenizer.to_str():
        raise ValueError(f"training cannot start from {path}: its tokenizer is another")
    model.load_state_dict(source.state_dict())
    return content_hash(source)
