"""Every family of the README's table, tiny and random: capture, train, export, exact decoding."""

from pathlib import Path

import pytest
import torch

from dspark_train.artifacts import Artifact
from dspark_train.decoding import SpeculativeDecoder
from dspark_train.target import Target
from tests import families, tiny_language, tiny_pipeline

SETTINGS = (
    "stages=[rollout,capture,train,calibrate,export]",
    "prompts.limit=20",
    "rollout.max_new_tokens=20",
    "capture.taps=[0,2]",
    "train.batch_documents=4",
    "train.epochs=6",
    "train.validation=0.1",
    "train.warmup=0",
    "calibrate.prompts=2",
    "calibrate.max_new_tokens=8",
    "export.formats=[native,vllm,sglang]",
)
NEW_TOKENS = 24


@pytest.mark.slow
@pytest.mark.parametrize("family", families.FAMILIES)
def test_the_whole_pipeline(
    family: str,
    tmp_path: Path,
    tiny_prompts: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """About 20 steps; greedy output in float32 is that of transformers' own generate."""
    tokenizer = tiny_language.build_tokenizer()
    model, folder = families.make(family, len(tokenizer)), tmp_path / "target"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    given = tiny_pipeline.arguments(folder, tiny_prompts, tmp_path / "run", *SETTINGS)
    ended = tiny_pipeline.run_main(monkeypatch, capfd, given)
    assert ended.status == 0, ended.err
    assert 15 <= Artifact.open(tmp_path / "run/train").counts["steps"] <= 30

    export = Artifact.open(tmp_path / "run/export")
    target = Target.load(str(folder), dtype="float32")
    prompts = [[5, 6, 7, 8], list(range(5, 25))]
    expected = [
        target.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    for place in export.facts["formats"].values():
        decoder = SpeculativeDecoder.from_pretrained(export.directory / place, target)
        for prompt, tokens in zip(prompts, expected, strict=True):
            assert decoder.generate(prompt, NEW_TOKENS, eos_ids=()).tokens == tokens
    assert len(set(expected[0])) > 2  # not the same token for ever
