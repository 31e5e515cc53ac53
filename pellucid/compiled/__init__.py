"""RASP programs compiled to transformers that compute them exactly."""

from pellucid.compiled import rasp
from pellucid.compiled.compiler.causal import CausalWarning
from pellucid.compiled.compiler.graph import CompileError
from pellucid.compiled.model import CompiledModel, compile_program
from pellucid.compiled.verify import Verification, compare, verify

__all__ = [
    "CausalWarning",
    "CompileError",
    "CompiledModel",
    "Verification",
    "compare",
    "compile_program",
    "rasp",
    "verify",
]
