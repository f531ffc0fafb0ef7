"""Every server out: the table of conversions cell by cell, and a test per trap of the formats."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dspark_train.drafter import Drafter
from dspark_train.formats import FORMATS, load_drafter, refuse_uncarried, what_is_left_out, write
from dspark_train.formats.card import Measured, Story, card
from dspark_train.formats.check import reload
from dspark_train.formats.destinations import carriers
from dspark_train.formats.writing import TEMPERATURES
from dspark_train.target import TargetHead
from tests import golden_tensors
from tests.formats.test_reading import FOLDER, GOLDEN, same

DSPARK = ("deepspec", "vllm", "sglang", "speculators")
DFLASH = ("vllm", "sglang", "speculators", "dflash", "transformers")
# rows: what is read; columns: what it can become besides our own format
CONVERSIONS = {
    "deepspec-dspark-vanilla": DSPARK,
    "deepspec-dspark-gated": ("deepspec", "sglang", "speculators"),
    "deepspec-dspark-rnn": ("deepspec", "sglang", "speculators"),
    # DSpark's layout without heads, which DeepSpec calls DFlash
    "deepspec-headless": ("deepspec", "speculators"),
    "zlab-dflash": DFLASH,
    "zlab-dflash2": ("vllm", "sglang", "speculators", "dflash"),
    "speculators-dspark": DSPARK,
    "speculators-dflash": DFLASH,
    "speculators-dflash2": ("vllm", "sglang", "speculators", "dflash"),
}


def read(name: str) -> tuple[Drafter, TargetHead]:
    origin = "deepspec-dspark-vanilla" if name == "deepspec-headless" else name
    _, head, _ = golden_tensors.load(GOLDEN[origin])
    drafter = load_drafter(FOLDER / origin, head=head)
    if name == "deepspec-headless":
        drafter.markov_head = drafter.confidence_head = None
        drafter.config.markov_head_type, drafter.config.enable_confidence_head = None, False
    drafter.config.num_target_layers = 12  # as the target would say
    drafter.config.target = {"name": "tiny/target"}
    return drafter, head


def written(folder: Path, name: str, drafter: Drafter, head: TargetHead | None = None) -> Any:
    """Fields and tensors of an export."""
    write(folder, name, drafter, head, architectures=["Qwen3ForCausalLM"])
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


@pytest.mark.parametrize("destination", FORMATS)
@pytest.mark.parametrize("source", CONVERSIONS)
def test_every_cell_of_the_table(tmp_path: Path, source: str, destination: str) -> None:
    """Filled cells are read back bit-equal; empty ones are refused with what to do."""
    drafter, head = read(source)
    if destination in ("native", *CONVERSIONS[source]):
        write(tmp_path / "export", destination, drafter, head)
        found = reload(tmp_path / "export", destination, drafter, head)
        for name, tensor in drafter.state_dict().items():
            assert torch.equal(found.state_dict()[name], tensor)
        assert found.slots == drafter.slots
    else:
        with pytest.raises(
            ValueError, match=rf"export format {destination} cannot.*native.*\] can"
        ):
            write(tmp_path / "export", destination, drafter, head)
        assert not (tmp_path / "export").exists()
    assert set(carriers(drafter.config)) == {"native", *CONVERSIONS[source]}


@pytest.mark.parametrize("source", GOLDEN)
def test_round_trips_are_bit_equal(tmp_path: Path, source: str) -> None:
    """Into our format and back into their own: the tensors of the file that came in."""
    drafter, head = read(source)
    write(tmp_path / "native", "native", drafter, head)
    ours = load_drafter(tmp_path / "native", head=head)
    kind = {"deepspec": "deepspec", "zlab": "dflash"}.get(source.split("-")[0], "speculators")
    fields, tensors = written(tmp_path / "theirs", kind, ours, head)
    original = load_file(FOLDER / source / "model.safetensors")
    assert set(tensors) == set(original)
    for name, tensor in original.items():
        assert torch.equal(tensors[name], tensor), name
    theirs = json.loads((FOLDER / source / "config.json").read_text())
    nested = ("dflash_config", "transformer_layer_config")
    for key in ("block_size", "mask_token_id", "target_layer_ids", "aux_hidden_state_layer_ids"):
        for level in (lambda c: c, *(lambda c, n=n: c.get(n, {}) for n in nested)):
            assert level(fields).get(key) == level(theirs).get(key), key
    assert fields["architectures"] == theirs["architectures"]
    same(load_drafter(tmp_path / "theirs", head=head), drafter)


def backbone(layers: int = 2, taps: int = 3) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the golden drafters' backbone: D 32, 4 query and 2 KV heads of 8."""
    D, F = 32, 64
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (D, taps * D),
        "hidden_norm.weight": (D,),
        "norm.weight": (D,),
    }
    for i in range(layers):
        at, mlp = f"layers.{i}.self_attn.", f"layers.{i}.mlp."
        shapes |= {
            f"layers.{i}.input_layernorm.weight": (D,),
            f"layers.{i}.post_attention_layernorm.weight": (D,),
            f"{at}q_proj.weight": (32, D),
            f"{at}k_proj.weight": (16, D),
            f"{at}v_proj.weight": (16, D),
            f"{at}o_proj.weight": (D, 32),
            f"{at}q_norm.weight": (8,),
            f"{at}k_norm.weight": (8,),
            f"{mlp}gate_proj.weight": (F, D),
            f"{mlp}up_proj.weight": (F, D),
            f"{mlp}down_proj.weight": (D, F),
        }
    return shapes


MARKOV = {"markov_head.markov_w1.weight": (96, 8), "markov_head.markov_w2.weight": (96, 8)}
HEADS = {
    "vanilla": MARKOV,
    "gated": MARKOV | {"markov_head.gate_proj.weight": (8, 40), "markov_head.gate_proj.bias": (8,)},
    "rnn": MARKOV
    | {"markov_head.joint_proj.weight": (24, 48), "markov_head.joint_proj.bias": (24,)},
}
CONFIDENCE = {"confidence_head.proj.weight": (1, 40), "confidence_head.proj.bias": (1,)}
SELECTOR = {
    "candidate_selector.predecessor_codebook": (96, 8),
    "candidate_selector.successor_codebook": (96, 8),
    "candidate_selector.hidden_projection.weight": (8, 32),
}
CONVOLUTIONS = {
    f"layers.{i}.{place}_conv.{name}": shape
    for i in range(2)
    for place in ("attention", "mlp")
    for name, shape in (("base_kernel", (2, 2, 32)), ("kernel_projection.weight", (16, 32)))
}


@pytest.mark.parametrize("source", CONVERSIONS)
def test_tensor_names_and_shapes_to_the_letter(tmp_path: Path, source: str) -> None:
    """vLLM raises at an unknown tensor, SGLang ignores one: neither may ever see any."""
    drafter, head = read(source)
    shared = {"embed_tokens.weight": (96, 32), "lm_head.weight": (96, 32)}
    expected = backbone()
    if drafter.config.markov_head_type == "selector":
        expected |= SELECTOR | CONVOLUTIONS
    elif drafter.config.markov_head_type:
        expected |= HEADS[drafter.config.markov_head_type] | CONFIDENCE
    for name in CONVERSIONS[source]:
        _, tensors = written(tmp_path / name, name, drafter, head)
        found = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
        assert found == expected | (shared if name == "deepspec" else {}), name


def every_export(tmp_path: Path) -> Any:
    for source in GOLDEN:
        drafter, head = read(source)
        for name in CONVERSIONS[source]:
            yield source, name, written(tmp_path / source / name, name, drafter, head)[0]


def test_trap_layer_ids(tmp_path: Path) -> None:
    """i everywhere, i + 1 in speculators, and never the field that vLLM would read raw."""
    for _, name, fields in every_export(tmp_path):
        if name == "speculators":
            assert fields["aux_hidden_state_layer_ids"] == [2, 4, 6]
            assert "target_layer_ids" not in fields
        else:
            where = fields.get("dflash_config", fields)
            assert where["target_layer_ids"] == [1, 3, 5]
            assert "aux_hidden_state_layer_ids" not in fields
        assert "eagle_aux_hidden_state_layer_ids" not in json.dumps(fields)


def test_trap_block_size(tmp_path: Path) -> None:
    """DFlash counts the anchor, DSpark does not; both are served with the trained length."""
    for source, name, fields in every_export(tmp_path):
        drafter, _ = read(source)
        size, proposals = (6, 5) if "dflash" in source else (5, 5)
        assert fields["block_size"] == size
        said = card(name, drafter.config, Story())
        if name in ("vllm", "speculators"):
            assert f'"num_speculative_tokens": {proposals}' in said
        if name == "sglang":
            flag = "dspark-block-size" if "dspark" in source else "num-draft-tokens"
            assert f"--speculative-{flag} {size}" in said
        if name == "speculators":
            method = fields["speculators_config"]["proposal_methods"][0]
            assert method["speculative_tokens"] == proposals


def test_trap_sample_from_anchor_is_always_said(tmp_path: Path) -> None:
    """Its default differs between readers. DFlash's own layout has no such field."""
    for source, name, fields in every_export(tmp_path):
        if "dspark" in source or name == "speculators":
            assert fields["sample_from_anchor"] is ("dspark" in source)
        else:
            assert "sample_from_anchor" not in fields


def test_trap_the_other_convention_with_a_markov_head(tmp_path: Path) -> None:
    """DFlash's convention with DSpark's head is served in the layout of DSpark, and says so."""
    drafter, head = read("deepspec-dspark-vanilla")
    drafter.config.sample_from_anchor = False
    fields, _ = written(tmp_path / "vllm", "vllm", drafter)
    assert fields["architectures"] == ["Qwen3DSparkModel"]
    assert fields["sample_from_anchor"] is False
    assert load_drafter(tmp_path / "vllm").slots.num_proposals == 4
    with pytest.raises(ValueError, match="deepspec cannot carry sample_from_anchor=false"):
        write(tmp_path / "deepspec", "deepspec", drafter, head)


@pytest.mark.parametrize("name", ["vllm", "sglang", "dflash", "transformers"])
def test_trap_headless_dspark_is_not_servable(tmp_path: Path, name: str) -> None:
    drafter, _ = read("deepspec-dspark-vanilla")
    drafter.config.markov_head_type = None
    with pytest.raises(ValueError, match=r"cannot carry .*\[native, deepspec, speculators\] can"):
        write(tmp_path / name, name, drafter)


def test_trap_causality(tmp_path: Path) -> None:
    for _, _, fields in every_export(tmp_path):
        sizes = fields.get("transformer_layer_config", fields)
        assert sizes["is_causal"] is False
        assert sizes["layer_types"] == ["full_attention"] * 2
        assert sizes["use_sliding_window"] is False


def test_trap_embedding_and_head_are_left_out(tmp_path: Path) -> None:
    for source, name, fields in every_export(tmp_path):
        tensors = load_file(tmp_path / source / name / "model.safetensors")
        assert ("embed_tokens.weight" in tensors) is (name == "deepspec")
        assert ("lm_head.weight" in tensors) is (name == "deepspec")
        assert fields["tie_word_embeddings"] is False


@pytest.mark.parametrize("kind", ["gated", "rnn"])
def test_trap_vllm_has_vanilla_heads_only(tmp_path: Path, kind: str) -> None:
    drafter, _ = read(f"deepspec-dspark-{kind}")
    with pytest.raises(
        ValueError, match=rf"vllm cannot carry {kind}.*sglang.*markov_head_type=van"
    ):
        write(tmp_path / "vllm", "vllm", drafter)


def test_trap_confidence(tmp_path: Path) -> None:
    """Fields always; the temperatures in a file of SGLang's, or it is said that they are lost."""
    drafter, _ = read("deepspec-dspark-vanilla")
    drafter.config.confidence_temperatures = [1.0, 1.1, 1.2, 1.3, 1.4]
    numbers = {"dataset": "d", "num_samples": 9, "ece_before": [0.1], "ece_after": [0.0]}
    write(tmp_path / "sglang", "sglang", drafter, calibration=numbers)
    told = json.loads((tmp_path / "sglang" / TEMPERATURES).read_text())
    assert told == {"temperatures": [1.0, 1.1, 1.2, 1.3, 1.4], **numbers}
    assert TEMPERATURES in card("sglang", drafter.config, Story())
    assert what_is_left_out("sglang", drafter.config) == []
    drafter.config.confidence_shifts = [0.1, 0.0, 0.0, 0.0, -0.1]
    (note,) = what_is_left_out("sglang", drafter.config)
    assert "no place for this drafter's confidence temperatures, which were fitted with" in note
    (note,) = what_is_left_out("vllm", drafter.config)
    assert "sglang" not in note
    write(tmp_path / "without", "sglang", drafter)
    assert not (tmp_path / "without" / TEMPERATURES).exists()
    assert TEMPERATURES not in card("sglang", drafter.config, Story())
    drafter.config.unshifted_temperatures = [0.9, 1.0, 1.0, 1.0, 1.0]
    write(tmp_path / "unshifted", "sglang", drafter)
    told = json.loads((tmp_path / "unshifted" / TEMPERATURES).read_text())
    assert told == {"temperatures": drafter.config.unshifted_temperatures}
    (note,) = what_is_left_out("sglang", drafter.config)
    assert "and temperatures that were fitted without" in note
    for name in ("vllm", "speculators", "deepspec"):
        (note,) = what_is_left_out(name, drafter.config)
        assert "temperatures" in note
        assert "our decoder or sglang" in note
        assert note in card(name, drafter.config, Story())
    drafter.config.confidence_temperatures = drafter.config.unshifted_temperatures = None
    for name in ("sglang", "vllm"):  # shifts alone
        (note,) = what_is_left_out(name, drafter.config)
        assert "confidence_shifts" in note
        assert "temperatures" not in note
    for _, _, fields in every_export(tmp_path):
        if "markov_rank" in fields:
            assert fields["confidence_head_with_markov"] is True
            assert fields["enable_confidence_head"] is True


def test_trap_a_confidence_head_without_markov(tmp_path: Path) -> None:
    drafter, _ = read("zlab-dflash")
    drafter.config.enable_confidence_head = True
    with_head = Drafter(drafter.config)
    (note,) = what_is_left_out("dflash", with_head.config)
    assert "left out" in note
    _, tensors = written(tmp_path / "dflash", "dflash", with_head)
    assert not [name for name in tensors if name.startswith("confidence")]


def test_trap_reduced_vocabulary(tmp_path: Path) -> None:
    """target id = draft id + d2t[draft id], with the rows of the head; SGLang has no such thing."""
    _, head, _ = golden_tensors.load("dspark_vanilla")
    config = read("deepspec-dspark-vanilla")[0].config
    config.draft_vocab_size = 4
    drafter, ids = Drafter(config), torch.tensor([1, 2, 50, 90])
    drafter.draft_only(ids)
    write(tmp_path / "native", "native", drafter, head)
    assert torch.equal(reload(tmp_path / "native", "native", drafter, head).draft_ids, ids)
    for name in ("vllm", "speculators"):
        fields, tensors = written(tmp_path / name, name, drafter, head)
        assert fields["draft_vocab_size"] == 4
        assert tensors["d2t"].tolist() == [1, 1, 48, 87]
        assert torch.equal(tensors["lm_head.weight"], head.projection.weight[ids])
        assert tensors["markov_head.markov_w2.weight"].shape == (4, 8)
        assert tensors["markov_head.markov_w1.weight"].shape == (96, 8)
        assert ("t2d" in tensors) is (name == "speculators")
        reload(tmp_path / name, name, drafter, head)
    assert tensors["t2d"].nonzero().flatten().tolist() == ids.tolist()
    with pytest.raises(ValueError, match=r"reduced draft vocabulary.*draft_vocab_size=null"):
        write(tmp_path / "sglang", "sglang", drafter, head)
    with pytest.raises(ValueError, match="give the target"):
        write(tmp_path / "no target", "vllm", drafter)


def test_trap_nesting(tmp_path: Path) -> None:
    """DSpark's fields at the top, DFlash's nested; transformers reads three of them at the top."""
    for source, name, fields in every_export(tmp_path):
        if name == "speculators":
            continue
        nested = fields.get("dflash_config")
        assert (nested is None) is ("dspark" in source)
        if "dspark" in source:
            assert fields["markov_rank"] == 8
            assert fields["markov_head_type"] in source or source == "speculators-dspark"
        else:
            assert nested["mask_token_id"] == 95
        at_the_top = {"target_layer_ids", "block_size", "mask_token_id"} <= set(fields)
        assert at_the_top is ("dspark" in source or name == "transformers")


def test_trap_rotary_fields_of_the_target(tmp_path: Path) -> None:
    drafter, _ = read("zlab-dflash")
    drafter.config.rope_parameters |= {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}
    fields, _ = written(tmp_path / "vllm", "vllm", drafter)
    assert fields["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}


def test_scales_of_a_target_travel_with_dflash2(tmp_path: Path) -> None:
    drafter, _ = read("zlab-dflash2")
    facts = {
        "output_multiplier": 1.0,
        "final_logit_softcapping": 30.0,
        "input_embedding_scale": 45.25,
    }
    drafter.config.target = {"name": "tiny/target", "head": facts}
    fields, _ = written(tmp_path / "dflash", "dflash", drafter)
    assert fields["dflash_config"]["final_logit_softcapping"] == 30.0
    assert "output_multiplier" not in fields["dflash_config"]
    assert load_drafter(tmp_path / "dflash").config.target["head"] == facts


def test_what_needs_the_target_says_so(tmp_path: Path) -> None:
    drafter = load_drafter(FOLDER / "speculators-dspark")
    with pytest.raises(ValueError, match=r"how many layers the target has.*convert\.target="):
        write(tmp_path / "vllm", "vllm", drafter)
    with pytest.raises(ValueError, match=r"deepspec ships rows.*convert\.target="):
        write(tmp_path / "deepspec", "deepspec", drafter)


def test_a_mixture_of_kinds_stays_with_us(tmp_path: Path) -> None:
    drafter, _ = read("zlab-dflash2")
    drafter.config.conv_kernel_size = None
    for name in FORMATS[1:]:
        with pytest.raises(ValueError, match="mixture that only the format native has"):
            refuse_uncarried(name, drafter.config)


def test_the_card_tells_what_is_known() -> None:
    drafter, _ = read("deepspec-dspark-vanilla")
    story = Story(
        recipe={"train": {"lr": 6e-4, "epochs": 10}},
        data={"prompts": "bundled", "responses": 461},
        measured=[Measured("8 prompts", "temperature 0.7", 2.3456, [0.81, 0.7])],
        licence="apache-2.0",
    )
    said = card("sglang", drafter.config, story)
    for part in (
        "license: apache-2.0",
        "base_model: tiny/target",
        "| 8 prompts | temperature 0.7 | 2.346 | 0.81 0.70 |",
        "| train.lr | 0.0006 |",
        "| responses | 461 |",
        "--speculative-algorithm DSPARK",
        "SpeculativeDecoder.from_pretrained",
    ):
        assert part in said
    unknown = card("native", drafter.config, Story())
    assert "The target's is not recorded" in unknown
    assert "Accepted length" not in unknown
