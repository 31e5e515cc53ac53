"""The site table: every place in the transformer that has a name, and what others call it.

Axes: b batch, t token, s key token, d residual width, p position channels, a all heads' channels side by side,
h heads, n neurons, k active features, v output vocabulary.
"""

from dataclasses import dataclass

from pellucid.core.config import ModelConfig
from pellucid.core.errors import unknown
from pellucid.core.parts import part_sites


@dataclass(frozen=True)
class Site:
    """A named place. `{l}` stands for the layer's number."""

    name: str
    shape: str
    meaning: str
    cheap: bool = True
    """Cheap sites are always computed; the others are built only when a tap names them."""
    node: bool = False
    """Whether its channels are nodes of a channel circuit (weight-sparse transformers, A.5)."""
    circuit_sparsity: str | None = None
    transformer_lens: str | None = None


SITES = (
    Site("embed", "b t d", "token embedding, with added positions", transformer_lens="hook_embed"),
    Site("{l}.resid.pre", "b t d", "residual stream before the layer", circuit_sparsity="{l}.resid_in", transformer_lens="blocks.{l}.hook_resid_pre"),
    Site("{l}.attn.in", "b t d+p", "what attention reads: after norm and AbsTopK", node=True, circuit_sparsity="{l}.attn.act_in", transformer_lens="blocks.{l}.ln1.hook_normalized"),
    Site("{l}.attn.q", "b t a", "queries", node=True, circuit_sparsity="{l}.attn.q", transformer_lens="blocks.{l}.attn.hook_q"),
    Site("{l}.attn.k", "b t a", "keys", node=True, circuit_sparsity="{l}.attn.k", transformer_lens="blocks.{l}.attn.hook_k"),
    Site("{l}.attn.v", "b t a", "values", node=True, circuit_sparsity="{l}.attn.v", transformer_lens="blocks.{l}.attn.hook_v"),
    Site("{l}.attn.mix", "b t a", "values averaged by the pattern", circuit_sparsity="{l}.attn.y", transformer_lens="blocks.{l}.attn.hook_z"),
    Site("{l}.attn.out", "b t d", "attention's write", node=True, circuit_sparsity="{l}.attn.resid_delta", transformer_lens="blocks.{l}.hook_attn_out"),
    Site("{l}.resid.mid", "b t d", "residual stream between attention and MLP", circuit_sparsity="{l}.resid_mid", transformer_lens="blocks.{l}.hook_resid_mid"),
    Site("{l}.mlp.in", "b t d+p", "what the MLP reads: after norm and AbsTopK", node=True, circuit_sparsity="{l}.mlp.act_in", transformer_lens="blocks.{l}.ln2.hook_normalized"),
    Site("{l}.mlp.code.index", "b t k", "active features of a bottleneck before the MLP, as integers", cheap=False),
    Site("{l}.mlp.code", "b t k", "the scores of these"),
    Site("{l}.mlp.decoded", "b t d+p", "what the MLP reads after the module named by `mlp_input`"),
    Site("{l}.mlp.act", "b t n", "neurons, after the nonlinearity", node=True, circuit_sparsity="{l}.mlp.post_act", transformer_lens="blocks.{l}.mlp.hook_post"),
    Site("{l}.mlp.out", "b t d", "the MLP's write", node=True, circuit_sparsity="{l}.mlp.resid_delta", transformer_lens="blocks.{l}.hook_mlp_out"),
    Site("{l}.resid.post", "b t d", "residual stream after the layer", transformer_lens="blocks.{l}.hook_resid_post"),
    Site("final", "b t d", "residual stream before the last norm", circuit_sparsity="final_resid"),
    Site("logits", "b t v", "the output", transformer_lens="unembed.hook_unembed"),
    Site("{l}.attn.pattern", "b h t s", "attention pattern, without the sink", cheap=False, transformer_lens="blocks.{l}.attn.hook_pattern"),
    Site("{l}.attn.head", "b t h d", "each head's own write", cheap=False, transformer_lens="blocks.{l}.attn.hook_result"),
    Site("{l}.attn.q.read", "b t h d", "each head's query's copy of the residual stream", cheap=False, transformer_lens="blocks.{l}.hook_q_input"),
    Site("{l}.attn.k.read", "b t h d", "each head's key's copy of the residual stream", cheap=False, transformer_lens="blocks.{l}.hook_k_input"),
    Site("{l}.attn.v.read", "b t h d", "each head's value's copy of the residual stream", cheap=False, transformer_lens="blocks.{l}.hook_v_input"),
    Site("{l}.mlp.read", "b t d", "the MLP's copy of the residual stream", cheap=False, transformer_lens="blocks.{l}.hook_mlp_in"),
    Site("final.read", "b t d", "the unembedding's copy of the residual stream", cheap=False),
)  # fmt: skip


def model_sites(config: ModelConfig) -> dict[str, Site]:
    """The sites that a model of this config has, by name, in the order of the computation."""
    coded = part_sites(config.mlp_input)
    by_layer = [site for site in SITES if site.name.startswith("{l}")]
    first, last = [SITES[0]], [site for site in SITES[1:] if not site.name.startswith("{l}")]
    found = {site.name: site for site in first}
    for number, layer in enumerate(config.layers):
        for site in by_layer:
            kind = site.name.removeprefix("{l}.")
            absent = (
                (kind.startswith("attn.") and not layer.heads)
                or (kind.startswith("mlp.") and not layer.d_mlp)
                or (kind.startswith("mlp.code") and kind not in coded)
                or (kind == "mlp.decoded" and config.mlp_input is None)
                or (kind == "attn.head" and config.keeps("attn.out") is not None)
            )
            if not absent:
                found[site.name.format(l=number)] = site
    return found | {site.name: site for site in last}


def check_sites(sites: frozenset[str], config: ModelConfig) -> None:
    """Raise a `ValueError` for a site that a model of this config lacks, saying which are near."""
    known = model_sites(config)
    for name in sorted(sites - known.keys()):
        if name.endswith(".attn.head") and config.keeps("attn.out") is not None:
            raise ValueError(
                f"{name!r} does not exist here: AbsTopK follows attention's write, so heads do not add up; "
                f"use {name.replace('.head', '.out')!r}"
            )
        raise unknown("site", name, known)
    for name in sorted(sites):
        shared = name.rsplit(".", 2)[0] + ".in"
        if name.endswith((".q.read", ".k.read", ".v.read")) and shared in sites:
            raise ValueError(
                f"{shared!r} and {name!r} cannot be tapped in one run: the reader has its own copy"
            )


def node_sites(config: ModelConfig) -> dict[str, int]:
    """The sites whose channels are the nodes of a channel circuit, and their widths."""
    widths = {}
    for name, site in model_sites(config).items():
        if site.node:
            layer = config.layers[int(name.split(".")[0])]
            sizes = {
                "b t d": config.d_model,
                "b t d+p": config.d_read,
                "b t a": layer.d_attn,
                "b t n": layer.d_mlp,
            }
            widths[name] = sizes[site.shape]
    return widths


def stream_sites(config: ModelConfig) -> tuple[str, ...]:
    """The residual stream after the embedding and after every sublayer."""
    sites = ["embed"]
    for number, layer in enumerate(config.layers):
        sites += [f"{number}.resid.mid"] * bool(layer.heads) + [f"{number}.resid.post"] * bool(layer.d_mlp)
    return tuple(sites)
