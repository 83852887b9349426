"""Where every element lies in a family's files, and what ``config.json`` says: numbers and names, without a file."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packages.models.tests.reference import MIXTURES
from torch import Tensor

from shardweave.comm import Rectangle, split_sizes
from shardweave.models import ParameterShape, TransformerConfig, local_shape, parameter_shapes, preset
from shardweave.models.huggingface import HuggingFaceError
from shardweave.models.huggingface.configs import config_from_json, config_to_json
from shardweave.models.huggingface.families import FAMILIES, family_for
from shardweave.models.huggingface.files import byte_count, plan_files, runs
from shardweave.models.huggingface.mapping import Piece, matches, pieces, pieces_by_parameter
from shardweave.tensor_parallel import RotaryScaling

SMALL: dict[str, Any] = {"layers": 2, "hidden": 24, "heads": 12, "vocab": 11, "sequence": 8, "dropout": 0.1}
LLAMA: dict[str, Any] = SMALL | {
    "position": "rotary", "norm": "rmsnorm", "activation": "swiglu", "tie_embeddings": False, "kv_heads": 4, "ffn": 13,
    "dropout": 0.0,
}  # fmt: skip
CONFIGS: dict[str, TransformerConfig] = {
    "gpt2": TransformerConfig(**SMALL, activation="gelu_tanh", ffn=13, attention_dropout=0.2),
    "bloom": TransformerConfig(**SMALL, position="alibi", embedding_norm=True, activation="gelu_tanh"),
    "gpt_neox": TransformerConfig(
        **SMALL, head_dim=2, position="rotary", parallel_residual=True, tie_embeddings=False, norm_eps=1e-6,
        rotary_base=300.0,
    ),
    "llama": TransformerConfig(**LLAMA, attention_bias=True, mlp_bias=True, head_dim=4, rotary_base=20.0),
    "mixtral": TransformerConfig(**LLAMA, experts=3, experts_per_token=2, init_std=0.01),
}  # fmt: skip
"""One of each family: three key heads a rank, heads that three and four ranks share, a vocabulary that none divides."""

each_family = pytest.mark.parametrize("family", CONFIGS)


def numbered(config: TransformerConfig, family: str) -> dict[str, Tensor]:
    """Their tensors, every element another number."""
    shapes = {piece.theirs: piece.shape for piece in pieces(config, FAMILIES[family])}
    total = sum(math.prod(shape) for shape in shapes.values())
    parts = torch.arange(total).split([math.prod(shape) for shape in shapes.values()])
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def block_of(pieces_of_it: list[Piece], part: Rectangle, theirs: dict[str, Tensor]) -> Tensor:
    """A rectangle of ours, put together from the blocks that the map names."""
    found = torch.full(part.sizes, -1)
    for piece in pieces_of_it:
        for match in matches(piece, part):
            block = theirs[piece.theirs][match.theirs.index]
            assert block.shape == match.theirs.sizes
            inside = match.ours.moved([-offset for offset in part.offsets])
            values = block.t() if piece.transposed else block
            target = found[inside.index]
            assert (target == -1).all()
            target.copy_(values.reshape(target.shape))
    return found


def by_hand(
    config: TransformerConfig, family: str, entry: ParameterShape, theirs: dict[str, Tensor]
) -> Tensor:
    """Our whole parameter from theirs, as the families' own code takes them apart."""
    names = {piece.theirs for piece in pieces_by_parameter(config, FAMILIES[family])[entry.name]}
    if family == "mixtral" and len(entry.shape) == 3:
        return torch.stack([theirs[name] for name in sorted(names)])
    (name,) = names
    tensor, role = theirs[name], entry.name.split(".")[-2]
    if family == "gpt2" and ".attention." in entry.name + ".":
        tensor = tensor.t() if tensor.dim() == 2 else tensor
    elif family == "gpt2" and ".mlp." in entry.name and tensor.dim() == 2:
        tensor = tensor.t()
    if role not in ("query", "key", "value") or family in ("llama", "mixtral"):
        return tensor
    number = ("query", "key", "value").index(role)
    if family == "gpt2":
        return tensor.chunk(3)[number]
    heads = tensor.view(config.heads, 3, config.head_size, *tensor.shape[1:])
    return heads[:, number].flatten(0, 1)


@each_family
def test_every_element_of_every_tensor_is_in_one_place(family: str) -> None:
    config = CONFIGS[family]
    theirs, known = numbered(config, family), pieces_by_parameter(config, FAMILIES[family])
    entries = parameter_shapes(config)
    assert list(known) == [entry.name for entry in entries]
    seen = []
    for entry in entries:
        whole = block_of(known[entry.name], Rectangle((0,) * len(entry.shape), entry.shape), theirs)
        assert torch.equal(whole, by_hand(config, family, entry, theirs)), entry.name
        seen.append(whole.flatten())
    total = sum(tensor.numel() for tensor in theirs.values())
    assert torch.equal(torch.cat(seen).sort().values, torch.arange(total))


@each_family
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_parts_of_split_parameters_are_the_whole_ones_parts(family: str, ranks: int) -> None:
    config = CONFIGS[family]
    theirs, known = numbered(config, family), pieces_by_parameter(config, FAMILIES[family])
    for entry in parameter_shapes(config):
        whole = block_of(known[entry.name], Rectangle((0,) * len(entry.shape), entry.shape), theirs)
        if entry.dim is None:
            continue
        size = entry.shape[entry.dim] // entry.units
        offset = 0
        for rank, units in enumerate(split_sizes(entry.units, ranks)):
            sizes = local_shape(entry, ranks, rank)
            if sizes[entry.dim] != units * size:
                continue  # key heads that are copied
            offsets = [0] * len(sizes)
            offsets[entry.dim] = offset
            part = Rectangle(tuple(offsets), sizes)
            assert torch.equal(block_of(known[entry.name], part, theirs), whole[part.index]), entry.name
            offset += units * size
        assert offset == entry.shape[entry.dim] or config.num_kv_heads % ranks


@settings(max_examples=60, deadline=None)
@given(family=st.sampled_from(list(CONFIGS)), data=st.data())
def test_any_rectangle_is_found(family: str, data: st.DataObject) -> None:
    """Also one that begins in the middle of a head, or holds some of the experts."""
    config = CONFIGS[family]
    theirs, known = numbered(config, family), pieces_by_parameter(config, FAMILIES[family])
    entry = data.draw(st.sampled_from(parameter_shapes(config)))
    bounds = [sorted(data.draw(st.lists(st.integers(0, n), min_size=2, max_size=2))) for n in entry.shape]
    part = Rectangle(tuple(low for low, _ in bounds), tuple(high - low for low, high in bounds))
    whole = by_hand(config, family, entry, theirs)
    found = block_of(known[entry.name], part, theirs)
    assert torch.equal(found, whole[part.index])
    for piece in known[entry.name]:
        for match in matches(piece, part):
            values = theirs[piece.theirs][match.theirs.index].flatten()
            flat = theirs[piece.theirs].flatten()
            places = [flat[first : first + count] for first, count in runs(piece.shape, match.theirs)]
            assert torch.equal(torch.cat(places) if places else flat[:0], values)


@each_family
@pytest.mark.parametrize("tied", [False, True])
def test_a_configuration_comes_back(family: str, tied: bool) -> None:
    config = replace(CONFIGS[family], tie_embeddings=tied)
    assert family_for(config).name == family
    told = config_to_json(config, FAMILIES[family], dtype="float32", tokens={"bos_token_id": 7})
    again, found = config_from_json(told)
    assert found.name == family
    assert told["bos_token_id"] == 7
    for field in _RESOLVED:
        assert getattr(again, field) == getattr(config, field), field


_RESOLVED = (
    "layers", "hidden", "heads", "num_kv_heads", "head_size", "ffn_size", "vocab", "sequence", "position", "norm",
    "embedding_norm", "activation", "parallel_residual", "tie_embeddings", "dropout", "attention_dropout",
    "use_attention_bias", "use_mlp_bias", "norm_eps", "rotary_base", "rotary_fraction", "rotary_scaling", "init_std",
    "experts", "experts_per_token",
)  # fmt: skip


@pytest.mark.parametrize(
    "scaling",
    [
        RotaryScaling(kind="linear", factor=4.0),
        RotaryScaling(kind="llama3", factor=8.0, original=16, low=1.5, high=3.0),
        RotaryScaling(kind="yarn", factor=2.0, original=16, beta_fast=20.0),
    ],
    ids=lambda scaling: scaling.kind,
)
@pytest.mark.parametrize("family", ["gpt_neox", "llama"])
def test_scaled_rotary_comes_back_and_version_4_reads_it(family: str, scaling: RotaryScaling) -> None:
    config = replace(CONFIGS[family], rotary_scaling=scaling, rotary_base=5e5)
    told = config_to_json(config, FAMILIES[family], dtype="float32")
    assert config_from_json(told)[0].rotary_scaling == scaling
    del told["rope_parameters"]
    again = config_from_json(told)[0]
    assert (again.rotary_scaling, again.rotary_base) == (scaling, 5e5)
    assert again.rotary_fraction == config.rotary_fraction


def test_older_names_are_read() -> None:
    neox = {
        "model_type": "gpt_neox", "num_hidden_layers": 44, "hidden_size": 6144, "num_attention_heads": 64,
        "intermediate_size": 24576, "vocab_size": 50432, "max_position_embeddings": 2048, "hidden_act": "gelu_fast",
        "rotary_pct": 0.5, "rotary_emb_base": 20000, "torch_dtype": "float16", "use_parallel_residual": False,
    }  # fmt: skip
    config = config_from_json(neox)[0]
    assert (config.rotary_fraction, config.rotary_base, config.parallel_residual) == (0.5, 20000.0, False)
    assert config.activation == "gelu_tanh"
    gpt2 = {
        "model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024, "n_inner": None,
        "vocab_size": 50257,
    }  # fmt: skip
    assert config_from_json(gpt2)[0] == replace(preset("gpt2"), bias=True)
    llama = {
        "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192,
        "rope_theta": 500000.0, "rope_scaling": None, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    published = preset("llama-3-8b")
    found = config_from_json(llama)[0]
    assert all(getattr(found, field) == getattr(published, field) for field in _RESOLVED)


@pytest.mark.parametrize(
    ("family", "changes", "text"),
    [
        ("gpt2", {"model_type": "t5"}, "model_type: 't5'.*gpt2, bloom, gpt_neox, llama, mixtral"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx: True"),
        ("gpt2", {"activation_function": "tanh"}, "activation_function: 'tanh'"),
        ("gpt2", {"n_embd": None}, "lacks 'n_embd'"),
        ("gpt2", {"resid_pdrop": 0.3}, "resid_pdrop: 0.3, embd_pdrop: 0.1"),
        ("gpt2", {"n_head": 5}, "heads: 5 does not divide hidden: 24"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm"),
        ("llama", {"hidden_act": "relu"}, "hidden_act: 'relu'"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale": 3.0}}, "mscale: 3.0"),
        ("mixtral", {"sliding_window": 4}, "sliding_window: 4"),
    ],
)  # fmt: skip
def test_what_cannot_be_built_is_refused_by_name(family: str, changes: dict[str, Any], text: str) -> None:
    told = config_to_json(CONFIGS[family], FAMILIES[family], dtype="float32") | changes
    with pytest.raises(HuggingFaceError, match=text):
        config_from_json(told, "some/config.json")


def test_what_no_family_has_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"no family .*nearest is llama.*qk_norm: True, llama has False"):
        family_for(replace(CONFIGS["llama"], qk_norm=True))
    with pytest.raises(ValueError, match=r"family bloom cannot.*position: learned, bloom has alibi"):
        family_for(CONFIGS["gpt2"], "bloom")
    with pytest.raises(ValueError, match="router_bias: True"):
        family_for(replace(CONFIGS["mixtral"], router_bias=True))
    with pytest.raises(ValueError, match="experts: some"):
        family_for(MIXTURES["switch"], "gpt2")
    with pytest.raises(ValueError, match="'gpt3' is not one of gpt2"):
        family_for(CONFIGS["gpt2"], "gpt3")


def test_files_are_filled_one_after_the_other() -> None:
    known = pieces(CONFIGS["gpt2"], FAMILIES["gpt2"])
    (single,) = plan_files(known, "F32", 4, 10**9)
    assert single.name == "model.safetensors"
    assert len(single.header) % 8 == 0
    many = plan_files(known, "BF16", 2, 3000)
    assert [file.name for file in many] == [
        f"model-{n:05d}-of-{len(many):05d}.safetensors" for n in range(1, len(many) + 1)
    ]
    assert [name for file in many for name in file.tensors] == list(single.tensors)
    for file in many:
        assert file.size - len(file.header) <= 3000 or len(file.tensors) == 1
    assert (byte_count("5GB"), byte_count("1.5 MiB"), byte_count(17)) == (5 * 10**9, 3 << 19, 17)
    for wrong in ("5 parsecs", "0", -3):
        with pytest.raises(HuggingFaceError, match="shard_size"):
            byte_count(wrong)
