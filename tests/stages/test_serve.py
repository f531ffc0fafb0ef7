"""The server as a command: it answers, ends on Ctrl-C, and says what is wrong in one message."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import openai
import pytest

from dspark_train.decoding import SpeculativeDecoder
from tests import tiny_language
from tests.tiny_pipeline import Run, arguments, refused


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["auto", "fixed:2"])
def test_serve_until_interrupted(
    finished_run: Path, tiny_target_folder: Path, tiny_prompts: Path, policy: str, tmp_path: Path
) -> None:
    port, table = free_port(), tmp_path / "costs.json"
    given = arguments(
        tiny_target_folder,
        tiny_prompts,
        finished_run,
        "stages=[serve]",
        f"serve.port={port}",
        f"serve.policy={policy}",
        "serve.model=mine",
        "serve.cost_seconds=0.2",
        f"serve.cost_table={table}",
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "dspark_train", *given],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        text=True,
    )
    try:
        while True:
            assert process.poll() is None, process.stdout.read()
            try:
                if httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).is_success:
                    break
            except httpx.HTTPError:
                time.sleep(0.1)
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
        messages = tiny_language.prompts(1)[0]
        answer = client.chat.completions.create(
            model="mine", messages=messages, temperature=0, max_tokens=20
        )
        decoder = SpeculativeDecoder.from_pretrained(
            finished_run / "export" / "checkpoint", str(tiny_target_folder), dtype="float32"
        )
        assert answer.choices[0].message.content == decoder.generate(messages, 20).text
        assert table.exists() == (policy == "auto")
    finally:
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)[0]
    assert "Traceback" not in said
    assert f"serve      mine with policy {policy} at http://127.0.0.1:{port}/v1" in said
    assert process.returncode in (0, 130)


def test_bad_input(tiny_run_finished: Run, tmp_path: Path) -> None:
    serve = "stages=[serve]"
    table = f"serve.cost_table={tmp_path}/none/costs.json"
    refused(tiny_run_finished(serve, table), table, "no folder")
    refused(tiny_run_finished(serve, "serve.port=0"), "serve.port=0: expected a number", lines=3)
    refused(tiny_run_finished(serve, f"run_dir={tmp_path}/none"), "does not exist", "export")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = tiny_run_finished(serve, "serve.policy=fixed", f"serve.port={port}")
    assert ended.status == 1
    assert f"serve.port={port}: could not listen there" in ended.err


@pytest.mark.parametrize("stage", ["serve", "bench_serving"])
def test_a_package_that_is_missing_is_named(
    tiny_run_finished: Run, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    for name in [n for n in sys.modules if n.startswith(("dspark_train.serving", "uvicorn"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, f"dspark_train.stages.{stage}", raising=False)
    monkeypatch.delitem(sys.modules, "dspark_train.stages.serve", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    refused(tiny_run_finished(f"stages=[{stage}]"), f"stage {stage} needs the package uvicorn")
