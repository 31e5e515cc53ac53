"""Pellucid: a laboratory for transformers whose mechanisms can be read."""

from pellucid.core.checkpoint import load_model, save_model
from pellucid.core.circuit import Circuit, Edge, Node
from pellucid.core.config import ActivationSparsity, LayerConfig, ModelConfig, uniform
from pellucid.core.edges import EdgeTap, edge_table
from pellucid.core.generate import generate
from pellucid.core.record import record
from pellucid.core.taps import Ablate, Mask, Patch, Recorder, Tap, chain
from pellucid.core.transformer import Transformer

__version__ = "0.1.0"

__all__ = [
    "Ablate",
    "ActivationSparsity",
    "Circuit",
    "Edge",
    "EdgeTap",
    "LayerConfig",
    "Mask",
    "ModelConfig",
    "Node",
    "Patch",
    "Recorder",
    "Tap",
    "Transformer",
    "chain",
    "edge_table",
    "generate",
    "load_model",
    "record",
    "save_model",
    "uniform",
]
