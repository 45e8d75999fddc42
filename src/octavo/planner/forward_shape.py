"""ForwardShape: the widths that decide how much memory a forward pass takes beside weights and KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.models.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardShape:
    """Widths in elements, of the whole model, not of one device's share.

    Args:
        mlp_width: Inner width of the widest dense MLP; 0 if all layers are mixtures.
        is_gated: Whether that MLP has a gate besides its inner rows.
        expert_width: Inner width of one expert; 0 if the model is no mixture.
        num_experts_per_token: Experts that one token visits in a layer; 0 if the model is no mixture.
        has_expert_buffers: Whether another engine's kernels keep buffers for the experts; those for MXFP4 do not.
        latent_width: What latent attention keeps of a token in one layer; 0 if there is none.
        has_states: Whether layers keep a recurrent state, whose kernels need memory that no rule here counts.
        sees_images: Whether the model has parts for images or sound besides, which other engines load, too.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    mlp_width: int = 0
    is_gated: bool = True
    expert_width: int = 0
    num_experts_per_token: int = 0
    has_expert_buffers: bool = True
    latent_width: int = 0
    has_states: bool = False
    sees_images: bool = False

    @property
    def is_mixture(self) -> bool:
        return self.num_experts_per_token > 0


def forward_shape(shape: ModelShape) -> ForwardShape:
    """Read the widths off a model's tensors: an MLP's inner width is what its last matrix takes in."""
    downs = [each for each in shape.tensors if each.role == "mlp" and each.name.endswith("down_proj.weight")]
    expert_downs = [each for each in shape.tensors if each.role == "expert" and each.name.endswith("down_proj.weight")]
    routers = sum(each.count for each in shape.tensors if each.role == "router" and each.name.endswith("weight"))
    visits = sum(each.count if each.num_active is None else each.num_active for each in expert_downs)
    latent = [layer.kv.key_dim for layer in shape.layers if layer.kv and layer.kv.kind == "latent"]
    return ForwardShape(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_layers=len(shape.layers),
        mlp_width=max((each.columns for each in downs), default=0),
        is_gated=any(each.role == "mlp" and "gate_proj" in each.name for each in shape.tensors) or not downs,
        expert_width=max((each.columns for each in expert_downs), default=0),
        num_experts_per_token=visits // routers if routers else 0,
        has_expert_buffers=shape.quantization != "mxfp4",
        latent_width=max(latent, default=0),
        has_states=any(layer.state for layer in shape.layers),
        sees_images=bool(shape.uncounted),
    )
