"""Checkpoints that other projects' own code wrote: read, compared with golden values, refused."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from safetensors.torch import load_file, save_file

from dspark_train.blocks import Sight
from dspark_train.drafter import Drafter, DrafterConfig
from dspark_train.formats import files, load_config, load_drafter
from dspark_train.formats.files import INDEX
from tests import golden_tensors

FOLDER = Path(__file__).parent / "checkpoints"
GOLDEN = {
    "deepspec-dspark-vanilla": "dspark_vanilla",
    "deepspec-dspark-gated": "dspark_gated",
    "deepspec-dspark-rnn": "dspark_rnn",
    "zlab-dflash": "dflash",
    "zlab-dflash2": "dflash2",
    "speculators-dspark": "dspark_vanilla",
    "speculators-dflash": "dflash",
    "speculators-dflash2": "dflash2",
}


def same(found: Drafter, expected: Drafter) -> None:
    """Same weights to the bit and the same configuration, as far as both say it."""
    theirs = found.state_dict()
    assert set(theirs) == set(expected.state_dict())
    for name, tensor in expected.state_dict().items():
        assert torch.equal(theirs[name], tensor), name
    unsaid = {"target", "num_target_layers", "initializer_range", "max_position_embeddings"}
    if expected.config.markov_head_type is None:
        unsaid.add("markov_rank")
    for key in set(DrafterConfig.__annotations__) - unsaid:
        assert getattr(found.config, key) == getattr(expected.config, key), key


@pytest.mark.parametrize("name", GOLDEN)
def test_every_layout_becomes_the_golden_drafter(name: str) -> None:
    expected, head, _ = golden_tensors.load(GOLDEN[name])
    found = load_drafter(FOLDER / name, head=head)
    same(found, expected)
    assert found.config.num_target_layers == (None if "speculators" in name else 12)
    assert load_config(FOLDER / name).to_dict() == found.config.to_dict()


@pytest.fixture
def copy(tmp_path: Path) -> Callable[..., Path]:
    """A copy of a checkpoint with other fields (None deletes one) and other tensors."""

    def make(
        name: str,
        fields: dict[str, Any] | None = None,
        tensors: Callable[[dict[str, torch.Tensor]], None] | None = None,
    ) -> Path:
        folder = tmp_path / f"{name}-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(FOLDER / name, folder)
        content = json.loads((folder / "config.json").read_text()) | (fields or {})
        content = {key: value for key, value in content.items() if value != "absent"}
        (folder / "config.json").write_text(json.dumps(content))
        if tensors is not None:
            changed = load_file(folder / "model.safetensors")
            tensors(changed)
            save_file(changed, folder / "model.safetensors")
        return folder

    return make


def test_deepspecs_headless_dflash_keeps_its_convention(copy) -> None:
    """DSpark's layout without heads proposes from the anchor: as DFlash it would be off by one."""

    def without_heads(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "_head." in name and "lm_head" not in name]:
            del tensors[name]

    fields = {
        "markov_rank": 0,
        "enable_confidence_head": False,
        "confidence_head_with_markov": False,
    }
    folder = copy("deepspec-dspark-vanilla", fields, without_heads)
    expected, head, _ = golden_tensors.load("dspark_vanilla")
    found = load_drafter(folder, head=head)
    assert (found.config.sample_from_anchor, found.config.markov_head_type) == (True, None)
    assert found.slots.num_proposals == expected.slots.num_proposals == 5
    for name, tensor in found.state_dict().items():
        assert torch.equal(tensor, expected.state_dict()[name])


def drop_shared(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["embed_tokens.weight"], tensors["lm_head.weight"]


@pytest.mark.parametrize("where", ["flat", "nested", "silent"])
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_specforge_nests_fields_or_not(copy, kind: str, where: str) -> None:
    """What the fields do not say, the tensors do."""
    name = f"deepspec-dspark-{kind}"
    content = json.loads((FOLDER / name / "config.json").read_text())
    heads = ("markov_rank", "markov_head_type", "enable_confidence_head")
    heads += ("confidence_head_with_markov",)
    moved = ("target_layer_ids", "mask_token_id")
    fields: dict[str, Any] = {
        "architectures": ["DSparkDraftModel"],
        "auto_map": {"AutoModel": "dspark.DSparkDraftModel"},
        "is_causal": False,
        "rope_theta": 10000,
        "rope_scaling": None,
        "rope_parameters": "absent",
    }
    if where != "flat":
        nested = {key: content[key] for key in (*moved, *(heads if where == "nested" else ()))}
        fields["dflash_config"] = nested | {"projector_type": "dspark", "confidence_head_alpha": 1}
        fields |= dict.fromkeys((*moved, *heads, "num_anchors"), "absent")
    expected, head, _ = golden_tensors.load(f"dspark_{kind}")
    same(load_drafter(copy(name, fields, drop_shared), head=head), expected)


def test_specforges_dflash_says_its_fields_at_the_top(copy) -> None:
    content = json.loads((FOLDER / "zlab-dflash/config.json").read_text())
    folder = copy("zlab-dflash", content["dflash_config"] | {"dflash_config": "absent"})
    same(load_drafter(folder), golden_tensors.load("dflash")[0])


def test_layer_ids_of_speculators_count_the_embedding(copy) -> None:
    """Off by one, the taps would be those of the layers above (fault 24)."""
    written = json.loads((FOLDER / "speculators-dflash/config.json").read_text())
    assert written["aux_hidden_state_layer_ids"] == [2, 4, 6]
    assert load_config(FOLDER / "speculators-dflash").target_layer_ids == [1, 3, 5]
    assert load_config(FOLDER / "zlab-dflash").target_layer_ids == [1, 3, 5]


def test_sharded_weights(copy) -> None:
    folder = copy("zlab-dflash2")
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    halves = (names[::2], names[1::2])
    where = {}
    for number, part in enumerate(halves, 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        where |= dict.fromkeys(part, file)
    (folder / "model.safetensors").unlink()
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    same(load_drafter(folder), golden_tensors.load("dflash2")[0])
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match="shards are missing"):
        load_drafter(folder)
    os.truncate(folder / "model-00001-of-00002.safetensors", 3000)
    with pytest.raises(ValueError, match=r"could not be loaded \(model-00001-of-00002.safetensors"):
        load_drafter(folder)
    save_file({n: tensors[n] for n in halves[0]}, folder / "model-00001-of-00002.safetensors")
    (folder / INDEX).unlink()
    with pytest.raises(ValueError, match="lacks the tensor"):
        load_drafter(folder)


def test_rotary_fields_of_a_multimodal_target_are_stripped(copy) -> None:
    """Fault 30: a draft rotates whole heads by one position."""
    rope = {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.25}
    folder = copy("zlab-dflash", {"rope_parameters": rope | {"mrope_section": [1, 1, 2]}})
    same(load_drafter(folder), golden_tensors.load("dflash")[0])


def test_a_reduced_vocabulary_takes_its_rows_of_the_targets_head(copy) -> None:
    _, head, _ = golden_tensors.load("dspark_vanilla")
    ids = torch.tensor([0, 3, 4, 40, 95])

    def reduce(tensors: dict[str, torch.Tensor]) -> None:
        tensors["d2t"] = ids - torch.arange(5)
        tensors["t2d"] = torch.zeros(96, dtype=torch.bool).index_fill(0, ids, True)
        tensors["lm_head.weight"] = head.projection.weight[ids].clone()
        tensors["markov_head.markov_w2.weight"] = tensors["markov_head.markov_w2.weight"][
            :5
        ].clone()

    folder = copy("speculators-dspark", {"draft_vocab_size": 5}, reduce)
    found = load_drafter(folder, head=head)
    assert torch.equal(found.draft_ids, ids)

    def contradict(tensors: dict[str, torch.Tensor]) -> None:
        reduce(tensors)
        tensors["t2d"][1] = True

    with pytest.raises(ValueError, match="t2d and d2t contradict"):
        load_drafter(copy("speculators-dspark", {"draft_vocab_size": 5}, contradict), head=head)


def add(name: str, *shape: int) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.update({name: torch.zeros(shape)})


SIZES = json.loads((FOLDER / "speculators-dflash/config.json").read_text())[
    "transformer_layer_config"
]
MIXED = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 16}
SIGHTS: dict[str, tuple[str, dict[str, Any], list[Sight]]] = {
    "whole": ("zlab-dflash", {}, [Sight(), Sight()]),
    "not causal": ("zlab-dflash", {**MIXED, "is_causal": False}, [Sight(), Sight(16)]),
    "causal": ("zlab-dflash", {"is_causal": True}, [Sight(causal=True)] * 2),
    "all causal": (
        "zlab-dflash",
        {**MIXED, "is_causal": True},
        [Sight(causal=True), Sight(16, causal=True)],
    ),
    # full layers see whole blocks and sliding ones do not, where nothing is said
    "said by the layers": (
        "zlab-dflash",
        {**MIXED, "is_causal": None},
        [Sight(), Sight(16, causal=True)],
    ),
    "speculators": (
        "speculators-dflash",
        {"transformer_layer_config": SIZES | MIXED, "sliding_window_non_causal": False},
        [Sight(), Sight(16, from_anchor=True, causal=True)],
    ),
    "speculators, not causal": (
        "speculators-dspark",
        {"transformer_layer_config": SIZES | MIXED, "sliding_window_non_causal": True},
        [Sight(), Sight(16, from_anchor=True)],
    ),
}


@pytest.mark.parametrize("case", SIGHTS)
def test_what_the_layers_see(copy, case: str) -> None:
    """The rules of causality and windows differ between layouts (trap: causality)."""
    name, fields, expected = SIGHTS[case]
    assert load_config(copy(name, fields)).sights == expected


REFUSED: dict[str, tuple[str, dict[str, Any], Any, str]] = {
    "architecture": (
        "zlab-dflash",
        {"architectures": ["EagleModel"]},
        None,
        r"architectures=\['EagleModel'\], expected .*DFlashDraftModel",
    ),
    "kind of speculators": (
        "speculators-dflash",
        {"speculators_model_type": "eagle3"},
        None,
        "speculators_model_type='eagle3', expected one of",
    ),
    "field": ("zlab-dflash", {"tree_width": 4}, None, "tree_width=4, expected no such field"),
    "nested field": (
        "zlab-dflash",
        {"dflash_config": {"mask_token_id": 95, "target_layer_ids": [1], "denoise": 3}},
        None,
        "denoise=3, expected no such field",
    ),
    "said twice": (
        "zlab-dflash",
        {"block_size": 7},
        None,
        r"block_size=\[7, 6\], expected the same value at the top and inside",
    ),
    "causal": ("zlab-dflash", {"is_causal": "yes"}, None, "is_causal='yes', expected true, false"),
    "causal speculators": (
        "speculators-dflash",
        {"transformer_layer_config": SIZES | {"is_causal": True}},
        None,
        "is_causal=True, expected false: full layers see whole blocks there",
    ),
    "a window of unknown causality": (
        "speculators-dflash",
        {"transformer_layer_config": SIZES | MIXED, "sliding_window_non_causal": "absent"},
        None,
        "sliding_window_non_causal=None, expected true or false beside sliding layers",
    ),
    "linear attention": (
        "zlab-dflash",
        {"layer_types": ["full_attention", "linear_attention"]},
        None,
        "layer_types='linear_attention', expected full_attention or sliding_attention",
    ),
    "quantised": (
        "zlab-dflash",
        {"quantization_config": {"bits": 4}},
        None,
        "quantization_config=.*expected no such field",
    ),
    "embedding tap": (
        "deepspec-dspark-rnn",
        {"target_layer_ids": [-1, 3, 5]},
        None,
        "the embedding cannot be tapped",
    ),
    "last layer": (
        "zlab-dflash",
        {"num_target_layers": 6},
        None,
        r"target_layer_ids=\[1, 3, 5\] must be .* before the last layer \(5\)",
    ),
    "missing field": ("zlab-dflash2", {"hidden_size": "absent"}, None, "hidden_size=None"),
    "rope": (
        "zlab-dflash",
        {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1.0}},
        None,
        "rope_type='spiral', expected default or one of",
    ),
    "markov head": (
        "deepspec-dspark-rnn",
        {"markov_head_type": "lstm"},
        None,
        "markov_head_type='lstm', expected one of",
    ),
    "tensor": (
        "zlab-dflash",
        {},
        add("layers.0.self_attn.sinks", 4),
        "has the tensor layers.0.self_attn.sinks",
    ),
    "head of another kind": (
        "deepspec-dspark-vanilla",
        {},
        add("markov_head.gate_proj.weight", 8, 40),
        "has the tensor markov_head.gate_proj.weight",
    ),
    "eight bits": (
        "zlab-dflash",
        {},
        lambda tensors: tensors.update({"fc.weight": tensors["fc.weight"].to(torch.int8)}),
        r"fc\.weight is torch\.int8, expected one of .*bfloat16.* quantised weights are not read",
    ),
    "missing tensor": (
        "zlab-dflash2",
        {},
        lambda tensors: tensors.pop("candidate_selector.predecessor_codebook"),
        "lacks the tensor candidate_selector.predecessor_codebook",
    ),
    "shape": ("zlab-dflash", {"intermediate_size": 65}, None, r"has shape .*\(64, 32\)?"),
    "embedding of its own": (
        "deepspec-dspark-vanilla",
        {},
        lambda tensors: tensors["embed_tokens.weight"][7].add_(1),
        "ships embed_tokens.weight, which differs from the target's in 1 of 96 rows",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_unknown_is_refused_by_name(copy, case: str) -> None:
    name, fields, tensors, message = REFUSED[case]
    folder = copy(name, fields, tensors)
    _, head, _ = golden_tensors.load(GOLDEN[name])
    with pytest.raises(ValueError, match=message) as error:
        load_drafter(folder, head=head)
    assert str(folder) in str(error.value)


def test_what_a_checkpoint_ships_needs_the_target() -> None:
    with pytest.raises(ValueError, match=r"ships embed_tokens.weight: give the target"):
        load_drafter(FOLDER / "deepspec-dspark-vanilla")


@pytest.mark.parametrize("file", ["pytorch_model.bin", "training.pt", "modeling_dflash.py"])
def test_pickles_and_code_are_refused_unread(copy, file: str) -> None:
    folder = copy("zlab-dflash")
    (folder / file).write_text("raise SystemExit")
    with pytest.raises(ValueError, match=f"{file}.*expected .*safetensors"):
        load_drafter(folder)


@pytest.mark.parametrize(
    "error",
    [
        LocalEntryNotFoundError("Cannot reach the hub\nand more lines"),
        HfHubHTTPError(
            "404: no such repository\nand more",
            response=httpx.Response(404, request=httpx.Request("GET", "https://hub")),
        ),
        OSError("No route to host"),
    ],
)
def test_a_hub_id_that_cannot_be_reached_is_one_clear_message(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def offline(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(files, "snapshot_download", offline)
    for read in (load_config, load_drafter):
        with pytest.raises(
            ValueError, match=r"owner/name could not be loaded .*connection"
        ) as told:
            read("owner/name")
        assert len(str(told.value).splitlines()) == 1


def test_of_a_hub_repository_only_json_and_safetensors_are_fetched(monkeypatch) -> None:
    def fetched(name: str, allow_patterns: list[str]) -> str:
        assert (name, allow_patterns) == ("z-lab/tiny", ["*.json", "*.safetensors"])
        return str(FOLDER / "zlab-dflash")

    monkeypatch.setattr(files, "snapshot_download", fetched)
    same(load_drafter("z-lab/tiny"), golden_tensors.load("dflash")[0])


def test_no_checkpoint_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist; expected a folder or a hub id"):
        load_drafter(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"without a config\.json"):
        load_config(tmp_path)
