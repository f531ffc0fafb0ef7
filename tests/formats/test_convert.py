"""`stages=[convert] source=… output=…` from the command line, and every format of an export."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dspark_train.artifacts import Artifact
from dspark_train.decoding import SpeculativeDecoder
from dspark_train.drafter import load_drafter as load_own
from dspark_train.formats import load_drafter, write
from dspark_train.stages.export import compare, refuse_untrained, require_as_recorded
from dspark_train.target import Target
from tests import golden_tensors
from tests.formats.test_reading import FOLDER, same
from tests.random_drafter import make_drafter
from tests.tiny_pipeline import Run, refused


@pytest.fixture
def golden_target(tmp_path: Path) -> Path:
    """A folder with a target that has the embedding and head of the golden drafters."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from tests import tiny_language

    _, head, _ = golden_tensors.load("dspark_vanilla")
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=96,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=12,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=512,
            tie_word_embeddings=False,
        )
    )
    model.set_input_embeddings(head.embedding)
    model.lm_head.weight = head.projection.weight
    model.save_pretrained(tmp_path / "golden target")
    tiny_language.build_tokenizer().save_pretrained(tmp_path / "golden target")
    return tmp_path / "golden target"


def test_what_came_in_goes_out_in_our_format(tiny_run: Run, tmp_path: Path) -> None:
    source, output = FOLDER / "zlab-dflash2", tmp_path / "ours"
    ended = tiny_run("stages=[convert]", f"source={source}", f"output={output}")
    assert ended.status == 0, ended.err
    assert "read back, compared; give convert.target= to decode with it" in ended.out
    same(load_own(output), golden_tensors.load("dflash2")[0])
    assert "converted from" in (output / "README.md").read_text()
    again = tiny_run("stages=[convert]", f"source={source}", f"output={output}")
    refused(again, "exists already")


def test_several_formats_with_the_target(
    tiny_run: Run, tmp_path: Path, golden_target: Path
) -> None:
    """DeepSpec ships embedding and head, which are compared; then decode with what was written."""
    given = [
        "stages=[convert]",
        f"source={FOLDER / 'deepspec-dspark-vanilla'}",
        f"output={tmp_path / 'out'}",
        "export.formats=[vllm,speculators,native]",
    ]
    refused(tiny_run(*given), "ships embed_tokens.weight", "convert.target=")
    ended = tiny_run(*given, f"convert.target={golden_target}")
    assert ended.status == 0, ended.err
    assert ended.out.count("read back, compared, decoded with") == 3
    target = Target.load(str(golden_target), dtype="float32")
    prompt, results = [3, 1, 4, 1, 5], []
    for name in ("vllm", "speculators", "native"):
        decoder = SpeculativeDecoder.from_pretrained(tmp_path / "out" / name, target)
        results.append(decoder.generate(prompt, 20, eos_ids=()))
    plain = SpeculativeDecoder.from_pretrained(target=target, proposer="plain")
    for result in results:
        assert result.tokens == plain.generate(prompt, 20, eos_ids=()).tokens
        assert result.stats.histogram == results[0].stats.histogram


def test_a_destination_that_cannot_carry_it_is_refused_before_anything_is_written(
    tiny_run: Run, tmp_path: Path
) -> None:
    ended = tiny_run(
        "stages=[convert]",
        f"source={FOLDER / 'deepspec-dspark-rnn'}",
        f"output={tmp_path / 'out'}",
        "export.formats=[native,vllm]",
    )
    refused(ended, "vllm cannot carry rnn", "sglang")
    assert not (tmp_path / "out").exists()
    refused(tiny_run("stages=[convert]", "source=x"), "output=None")
    refused(
        tiny_run("stages=[convert]", "source=x", "output=y", "export.formats=[gguf]"),
        "export.formats=['gguf']: expected some of",
        lines=3,
    )


def test_the_stage_export_writes_and_checks_every_format(
    tiny_run_finished: Run, tmp_path: Path
) -> None:
    """All that carry DSpark: each has a card, is in the manifest, and decodes the same."""
    names = "native,deepspec,vllm,sglang,speculators"
    ended = tiny_run_finished("stages=[export]", f"export.formats=[{names}]")
    assert ended.status == 0, ended.err
    assert "vllm has no place for this drafter's confidence temperatures" in ended.out
    export = Artifact.open(tmp_path / "run/export")
    places = export.facts["formats"]
    assert set(places) == set(names.split(","))
    trained = Artifact.open(tmp_path / "run/train").facts["drafter"]
    for place in places.values():
        folder = export.folder(place)
        said = (folder / "README.md").read_text()
        for part in (
            "## Recipe",
            "## Accepted length",
            "temperature 0.7",
            "train.lr",
            "## Licence",
        ):
            assert part in said
        fields = json.loads((folder / "config.json").read_text())
        assert fields["block_size"] == trained["block_size"]
    assert ended.out.count("has no place for this drafter's confidence temperatures") == 3
    assert ended.out.count("confidence_shifts") == 1  # sglang has a place for temperatures alone
    told = json.loads(
        (export.folder(places["sglang"]) / "confidence_temperatures.json").read_text()
    )
    assert len(told["temperatures"]) == trained["block_size"]
    assert told["num_samples"] > 0
    calibrated = Artifact.open(tmp_path / "run/calibrate").facts
    assert told["temperatures"] == calibrated["unshifted_temperatures"]
    assert told["temperatures"] != calibrated["temperatures"]
    assert told["ece_after"] == calibrated["ece_unshifted"]


def test_the_check_leaves_the_drafter_in_the_dtype_that_is_written(
    random_target, tmp_path: Path
) -> None:
    """A decoder computes in the target's dtype: formats written later must not be in that."""
    target = random_target(vocab_size=11, num_layers=3)
    drafter = make_drafter(target).bfloat16()
    for name in ("native", "vllm"):
        write(tmp_path / name, name, drafter)
        compare(tmp_path / name, name, drafter, target, [1, 4, 2])
        assert load_drafter(tmp_path / name).dtype == drafter.dtype == torch.bfloat16


def test_the_check_finds_another_confidence(random_target, tmp_path: Path, monkeypatch) -> None:
    """Planted: what was read back decodes the same tokens, but is less sure of them."""
    target = random_target(vocab_size=11, num_layers=3)
    drafter = make_drafter(target)
    write(tmp_path / "out", "native", drafter)
    other = load_drafter(tmp_path / "out")
    other.confidence_head.proj.bias.data += 1
    monkeypatch.setattr("dspark_train.stages.export.reload", lambda *_: other)
    with pytest.raises(ValueError, match="decodes differently"):
        compare(tmp_path / "out", "native", drafter, target, [1, 4, 2])


@pytest.mark.parametrize("key", ["target_layer_ids", "block_size", "mask_token_id"])
def test_conventions_are_those_of_the_manifest(key: str) -> None:
    config = load_drafter(FOLDER / "zlab-dflash2").config
    recorded = {"drafter": config.to_dict()}
    drafted = SimpleNamespace(facts=recorded, directory=Path("run/train"))
    require_as_recorded(config, drafted)
    recorded["drafter"][key] = [7] if key == "target_layer_ids" else 7
    with pytest.raises(ValueError, match=rf"says {key}=.*manifest beside it \[?7"):
        require_as_recorded(config, drafted)


def test_an_untrained_convolution_is_refused(tmp_path: Path) -> None:
    drafter = load_drafter(FOLDER / "zlab-dflash2")
    refuse_untrained(drafter)
    drafter.layers[1].mlp_conv.kernel_projection.weight.data.zero_()
    with pytest.raises(ValueError, match=r"layers\.1\.mlp_conv\.kernel_projection\.weight"):
        refuse_untrained(drafter)
