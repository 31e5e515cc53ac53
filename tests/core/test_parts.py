"""Modules that a config names by kind are found through entry points, and stand between the norm and every MLP."""

from importlib.metadata import EntryPoint

import pytest
import torch
from torch import nn

from pellucid import ModelConfig, Recorder, Transformer, load_model, save_model, uniform
from pellucid.core import parts


class Halve(nn.Module):
    """Halves what the MLP reads, for an auxiliary loss of its mean square."""

    def __init__(self, d_in: int, factor: float = 0.5):
        super().__init__()
        self.factor = nn.Parameter(torch.full((d_in,), factor))

    @classmethod
    def make(cls, d_in, **fields):
        return cls(d_in, **fields)

    def forward(self, x, at=None):
        return self.factor * x, x.square().mean()


@pytest.fixture
def installed(monkeypatch):
    point = EntryPoint(name="halve", value="tests.core.test_parts:Halve", group="pellucid.parts")
    monkeypatch.setattr(parts, "entry_points", lambda group: [point] if group == "pellucid.parts" else [])
    parts.find_part.cache_clear()
    yield
    parts.find_part.cache_clear()


FIELDS = {"vocab_size": 11, "d_model": 8, "n_ctx": 9, "layers": uniform(2, 2, 4, 6)}


def test_a_named_module_stands_before_every_mlp_and_its_loss_is_added(installed, tmp_path):
    model = Transformer(ModelConfig(**FIELDS, mlp_input={"kind": "halve", "factor": 0.25}), device="cpu")
    recorder, tokens = Recorder(), torch.arange(8)[None]
    logits, aux = model.outputs(tokens, tap=recorder)
    expected = 0
    for layer in (0, 1):
        read, decoded = recorder.values[f"{layer}.mlp.in"], recorder.values[f"{layer}.mlp.decoded"]
        torch.testing.assert_close(decoded, 0.25 * read)
        expected = expected + read.square().mean()
    torch.testing.assert_close(aux, expected)
    save_model(model, tmp_path / "m")
    assert torch.equal(load_model(tmp_path / "m", device="cpu")(tokens), logits)


def test_an_unknown_kind_is_named_and_without_one_there_is_no_such_site(installed):
    with pytest.raises(ValueError, match="unknown mlp_input kind 'halv'; did you mean 'halve'"):
        Transformer(ModelConfig(**FIELDS, mlp_input={"kind": "halv"}), device="cpu")
    assert "0.mlp.decoded" not in Transformer(ModelConfig(**FIELDS), device="cpu").sites
