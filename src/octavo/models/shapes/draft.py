"""ShapeDraft: a model shape while a configuration is being read, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.models.fields import Fields
from octavo.models.shape import Layer, TensorRole, WeightTensor
from octavo.models.spec_checks import check_num_layers


@dataclass(slots=True)
class _Tally:
    """How many tensors of one size were added, and for which layers."""

    count: int = 0
    num_active: int = 0
    layers: dict[int, None] | None = None


@dataclass(frozen=True, slots=True)
class _TensorKey:
    name: str
    role: TensorRole
    rows: int
    columns: int
    num_shards: int
    is_linear: bool


def first_whole(fields: Fields, names: tuple[str, ...], default: int | None = None) -> int:
    """Return a size under the first of its names that the file has; the first name is the one that errors cite."""
    for name in names:
        if name in fields:
            return fields.whole(name)
    return fields.whole(names[0], default)


class ShapeDraft:
    """Layers and tensors of a model, collected by the functions that know its family.

    The sizes that every family has are read at once, under the names that files of any age give them.

    Args:
        fields: The configuration of the text part.
        default_max_position: Where a family's files leave it out.

    Attributes:
        layers: What each layer keeps; one entry a layer once the family function is done.
        intermediate_size: Widest MLP that one token passes, kept up to date by `raise_intermediate_size`.
    """

    __slots__ = (
        "_tallies",
        "fields",
        "hidden_size",
        "intermediate_size",
        "is_tied",
        "layers",
        "max_position",
        "num_heads",
        "num_layers",
        "vocab_size",
    )

    def __init__(self, fields: Fields, *, default_max_position: int | None = None) -> None:
        self.fields = fields
        self.hidden_size = first_whole(fields, ("hidden_size", "n_embd", "n_embed", "d_model"))
        self.num_layers = check_num_layers(
            first_whole(fields, ("num_hidden_layers", "n_layer", "n_layers")), where=fields.where
        )
        self.num_heads = first_whole(fields, ("num_attention_heads", "n_head", "n_heads"))
        self.vocab_size = fields.whole("vocab_size")
        self.max_position = first_whole(
            fields,
            ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "max_seq_len"),
            default_max_position,
        )
        self.intermediate_size = 0
        self.is_tied = False
        self.layers: list[Layer] = []
        self._tallies: dict[_TensorKey, _Tally] = {}

    @property
    def tensors(self) -> tuple[WeightTensor, ...]:
        return tuple(
            WeightTensor(
                name=key.name,
                role=key.role,
                rows=key.rows,
                columns=key.columns,
                count=tally.count,
                num_active=tally.num_active if tally.num_active != tally.count else None,
                layers=tuple(tally.layers or ()),
                num_shards=key.num_shards,
                is_linear=key.is_linear,
            )
            for key, tally in self._tallies.items()
        )

    def add(
        self,
        name: str,
        role: TensorRole,
        rows: int,
        columns: int,
        *,
        layer: int | None = None,
        count: int = 1,
        num_active: int | None = None,
        num_shards: int = 1,
        is_linear: bool = False,
    ) -> None:
        """Count `count` tensors of one size, of one layer or of none."""
        key = _TensorKey(name, role, rows, columns, num_shards, is_linear)
        tally = self._tallies.setdefault(key, _Tally(layers={}))
        tally.count += count
        tally.num_active += count if num_active is None else num_active
        if layer is not None and tally.layers is not None:
            tally.layers[layer] = None

    def linear(
        self,
        name: str,
        role: TensorRole,
        rows: int,
        columns: int,
        *,
        layer: int | None = None,
        count: int = 1,
        num_active: int | None = None,
        num_shards: int = 1,
        bias_shards: int | None = None,
        has_bias: bool = False,
    ) -> None:
        """Count the matrix of a linear layer, and its bias where it has one.

        Args:
            bias_shards: Shards of the bias where the matrix is divided along its columns, and the bias is not.
        """
        self.add(
            f"{name}.weight",
            role,
            rows,
            columns,
            layer=layer,
            count=count,
            num_active=num_active,
            num_shards=num_shards,
            is_linear=True,
        )
        if has_bias:
            self.add(
                f"{name}.bias",
                role,
                1,
                rows,
                layer=layer,
                count=count,
                num_active=num_active,
                num_shards=num_shards if bias_shards is None else bias_shards,
            )

    def norm(self, name: str, width: int, *, layer: int | None = None, has_bias: bool = False) -> None:
        """Count the weight of a norm, and the bias of a LayerNorm."""
        self.add(f"{name}.weight", "norm", 1, width, layer=layer)
        if has_bias:
            self.add(f"{name}.bias", "norm", 1, width, layer=layer)

    def embedding(self, name: str = "embed_tokens") -> None:
        self.add(f"{name}.weight", "embedding", self.vocab_size, self.hidden_size, num_shards=self.vocab_size)

    def head(self, *, is_tied: bool, has_bias: bool = False) -> None:
        """Count the output layer; a tied one is the embedding table, and only its bias is new."""
        self.is_tied = is_tied
        if not is_tied:
            self.add("lm_head.weight", "head", self.vocab_size, self.hidden_size, num_shards=self.vocab_size)
        if has_bias:
            self.add("lm_head.bias", "head", 1, self.vocab_size, num_shards=self.vocab_size)

    def raise_intermediate_size(self, width: int) -> None:
        self.intermediate_size = max(self.intermediate_size, width)
