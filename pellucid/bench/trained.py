"""Weight-sparse models trained on a program's inputs and outputs: their mechanism is not known beforehand, but can be measured."""

import numpy as np
import torch
from torch import Tensor

from pellucid.bench.cache import code_of, kept_at
from pellucid.compiled.model import CompiledModel
from pellucid.compiled.rasp.interpreter import Interpreter
from pellucid.compiled.verify import ideal_logits
from pellucid.core.checkpoint import content_hash, load_metadata, load_model, save_model
from pellucid.core.config import ModelConfig, uniform
from pellucid.core.transformer import Transformer
from pellucid.lab.fills import real
from pellucid.sparse.projection import Projection, SparsityConfig
from pellucid.training.schedules import warmup_decay

STEPS, ROWS, LR = 3_000, 128, 1e-2
FRACTION = 0.1
DRAWN = 2_000
SOLVED = 0.99
"""Share of further inputs with every output right from which a trained model counts as one of the program."""


def config_for(compiled: CompiledModel) -> ModelConfig:
    """As deep as the compiled model, with one layer at least: 32 wide, four heads and 64 neurons a layer."""
    old = compiled.transformer.config
    return ModelConfig(
        vocab_size=old.vocab_size,
        output_vocab=compiled.transformer.unembedding.shape[0],
        d_model=32,
        n_ctx=old.n_ctx,
        layers=uniform(max(1, len(old.layers)), 4, 8, 64),
        positions="learned",
        causal=old.causal,
        norm_gain=False,
    )


class Inputs:
    """Random inputs of all lengths on which the program is defined, and the logits that a compiled model should give."""

    def __init__(self, compiled: CompiledModel, seed: int):
        assert compiled.program is not None
        self.compiled, self.rng = compiled, np.random.default_rng(seed)
        self.interpreter = Interpreter(compiled.program, causal=compiled.causal)
        self.ideal = torch.from_numpy(ideal_logits(compiled)).float()

    def draw(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """(tokens, real tokens, wanted logits)."""
        vocab, longest = self.compiled.vocab.values, self.compiled.max_len
        drawn = [
            [vocab[i] for i in self.rng.integers(len(vocab), size=self.rng.integers(1, longest + 1))]
            for _ in range(rows)
        ]
        undefined = [why for _, _, part in self.interpreter.chunks(drawn) for why in part]
        drawn = [row for row, why in zip(drawn, undefined, strict=True) if why is None]
        tokens, mask = (x.cpu() for x in self.compiled.encode(drawn))
        codes = np.zeros(tokens.shape, dtype=np.int64)
        codes[:, 1:], _ = self.compiled.run(drawn)
        return tokens, mask, self.ideal[torch.from_numpy(codes)]


def train_sparse(compiled: CompiledModel, *, steps: int = STEPS, seed: int = 0) -> tuple[Transformer, float]:
    """A weight-sparse model of the program, by the squared error of its logits, and the share of further inputs that it
    gets right at every position."""
    model = Transformer(config_for(compiled), seed=seed, device="cpu")
    projection = Projection(model, SparsityConfig(fraction=FRACTION, alive=1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    inputs = Inputs(compiled, seed)
    pool = inputs.draw(64 * ROWS)
    order = torch.Generator().manual_seed(seed)
    for step in range(steps):
        rows = torch.randint(len(pool[0]), (ROWS,), generator=order)
        tokens, mask, wanted = (x[rows] for x in pool)
        optimizer.param_groups[0]["lr"] = (
            LR
            * warmup_decay(step, steps, warmup=0.02, final=0.0)
            * projection.lr_factor((step + 1) / steps) ** 0.5
        )
        error = (model(tokens, mask=real(model, mask)) - wanted).square().sum(-1)[:, 1:]  # BOS says nothing
        optimizer.zero_grad(set_to_none=True)
        ((error * mask[:, 1:]).sum() / mask[:, 1:].sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        projection.apply((step + 1) / steps)
    return model.eval().requires_grad_(False), accuracy(model, Inputs(compiled, seed + 1))


def trained(compiled: CompiledModel) -> tuple[Transformer, float]:
    """As `train_sparse`, kept beside prepared corpora under a hash of everything that it depends on."""
    place = kept_at(
        code_of(train_sparse), content_hash(compiled.transformer), config_for(compiled).to_json(),
        STEPS, ROWS, LR, FRACTION, DRAWN,
    )  # fmt: skip
    if not place.exists():
        model, right = train_sparse(compiled)
        save_model(model, place, metadata={"inputs_right": right})
    model = load_model(place, device="cpu").requires_grad_(False)
    return model, load_metadata(place)["inputs_right"]


@torch.no_grad()
def accuracy(model: Transformer, inputs: Inputs) -> float:
    """The share of further inputs with every output nearest to the right value."""
    tokens, mask, wanted = inputs.draw(DRAWN)
    said = model(tokens, mask=real(model, mask))
    codes, right = ((x[..., None, :] - inputs.ideal).square().sum(-1).argmin(-1) for x in (said, wanted))
    return ((codes == right) | ~mask)[:, 1:].all(1).double().mean().item()
