"""Targets for tests: one that speaks a tiny language, and random ones small enough to enumerate."""

import hashlib
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from dspark_train.__main__ import main
from dspark_train.target import Target
from tests import tiny_language, tiny_pipeline

# what is started in the background ignores Ctrl-C, and so would the children that tests interrupt
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny_target_folder(request: pytest.FixtureRequest) -> Path:
    """A folder with the trained tiny target; trained once and kept in pytest's cache."""
    source = Path(tiny_language.__file__).read_bytes()
    key = hashlib.sha256(source + f"{torch.__version__} {transformers.__version__}".encode())
    cache = request.config.cache.mkdir("tiny_target")
    folder = cache / key.hexdigest()[:16]
    if not folder.exists():
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # threads only cost at this size, and change the last bits
        tokenizer = tiny_language.build_tokenizer()
        model = tiny_language.build_model(tokenizer)
        tiny_language.train(model, tokenizer)
        torch.set_num_threads(threads)
        # several processes may do this at the same time, and all make the same
        unfinished = Path(tempfile.mkdtemp(dir=cache))
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        try:
            unfinished.rename(folder)
        except OSError:
            shutil.rmtree(unfinished)
    return folder


@pytest.fixture(scope="session")
def tiny_target(tiny_target_folder: Path) -> Target:
    """The trained target of the tiny language in float32: 6 layers, hidden 64, vocabulary 128."""
    return Target.load(str(tiny_target_folder), dtype="float32")


@pytest.fixture
def random_target() -> Callable[..., Target]:
    """Make an untrained Llama with a vocabulary small enough to enumerate its distribution.

    `make(vocab_size=5, num_layers=3, seed=0, **config)`: float32, hidden 16, no chat template, no
    end of sequence. Its weights are large, so that its distributions are far from uniform.
    """

    def make(vocab_size: int = 5, num_layers: int = 3, seed: int = 0, **config: object) -> Target:
        torch.manual_seed(seed)
        fields = {
            "vocab_size": vocab_size,
            "num_hidden_layers": num_layers,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 64,
            "initializer_range": 0.5,
            "bos_token_id": None,
            "eos_token_id": None,
        }
        words = {f"t{i}": i for i in range(vocab_size)}
        backend = Tokenizer(models.WordLevel(words, unk_token="t0"))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
        model = LlamaForCausalLM(LlamaConfig(**(fields | config)))
        return Target.wrap(model, tokenizer, name="random")

    return make


@pytest.fixture
def save_target(tmp_path: Path) -> Callable[[Target], Path]:
    """Write a target to a folder that `Target.load` takes: `save(target) -> folder`."""

    def save(target: Target) -> Path:
        folder = tmp_path / "target"
        target.model.save_pretrained(folder)
        target.tokenizer.save_pretrained(folder)
        return folder

    return save


@pytest.fixture(scope="session")
def tiny_prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A JSONL file of requests in the tiny language."""
    return tiny_pipeline.write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl")


@pytest.fixture(scope="session")
def finished_run(
    tiny_target_folder: Path, tiny_prompts: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder of a finished run of the whole pipeline; copy it before changing it."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    with pytest.MonkeyPatch.context() as patch:
        given = tiny_pipeline.arguments(tiny_target_folder, tiny_prompts, run_dir)
        patch.setattr(sys, "argv", ["dspark_train", *given])
        main()
    return run_dir


@pytest.fixture
def tiny_run(
    tiny_target_folder: Path,
    tiny_prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> tiny_pipeline.Run:
    """Run the pipeline in `tmp_path/run`: `tiny_run("stages=[rollout]") -> Ended`."""

    def run(*overrides: str) -> tiny_pipeline.Ended:
        given = tiny_pipeline.arguments(
            tiny_target_folder, tiny_prompts, tmp_path / "run", *overrides
        )
        return tiny_pipeline.run_main(monkeypatch, capfd, given)

    return run


@pytest.fixture
def tiny_run_finished(
    tiny_run: tiny_pipeline.Run, finished_run: Path, tmp_path: Path
) -> tiny_pipeline.Run:
    """As `tiny_run`, in a copy of the finished run."""
    shutil.copytree(finished_run, tmp_path / "run")
    return tiny_run
