"""Rounds whose passes were compiled: the same output, and every different piece compiled once."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import JetMoeConfig, JetMoeForCausalLM

from dspark_train.decoding import compiling
from dspark_train.decoding.compiling import compiled
from dspark_train.decoding.engine import Engine
from dspark_train.decoding.proposers import PlainProposer
from dspark_train.decoding.request import Request
from dspark_train.decoding.sampling import SamplingSettings
from dspark_train.target import Target
from dspark_train.target.cpu import PackedLinear, can_pack
from tests.decoding.test_fixed_pass import outputs
from tests.decoding.test_windows import CASES, make_target


@pytest.fixture
def counted() -> Iterator[mock.Mock]:
    """Every compilation, from none on."""
    with (
        mock.patch.dict(compiling._COMPILED, clear=True),
        mock.patch.object(compiling, "_compile", side_effect=compiling._compile) as calls,
    ):
        yield calls


@pytest.fixture
def traced() -> Iterator[None]:
    """Pieces run as they were traced: what a compiler makes of them is another matter, and slow."""
    with (
        mock.patch.dict(compiling._COMPILED, clear=True),
        mock.patch.object(compiling, "_compile", lambda piece, args: piece),
    ):
        yield


def compare(target, kind: str, sampling=()) -> None:
    expected, _ = outputs(target, kind, False, sampling, count=6)
    target.compiles = True
    found, engine = outputs(target, kind, True, sampling, count=6)
    assert found == expected
    assert engine.fixed.recorder.layers is target.layers


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("sampling", [(), (0.8,)])
@pytest.mark.parametrize("kind", ["plain", "dflash", "dspark"])
def test_traced_rounds_give_the_same_tokens(random_target, kind, sampling) -> None:
    compare(random_target(), kind, sampling)


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(("family", "attention"), CASES)
def test_families(family, attention) -> None:
    compare(make_target(family, attention), "dspark")


def test_compiled_rounds_give_the_same_tokens(random_target) -> None:
    target = random_target()
    expected, _ = outputs(target, "plain", False, rows=1, count=4)
    target.compiles = True
    assert outputs(target, "plain", True, rows=1, count=4)[0] == expected


@pytest.mark.slow
def test_compiled_drafts_give_the_same_tokens(random_target) -> None:
    target = random_target()
    expected, _ = outputs(target, "dspark", False, (0.8,), rows=1, count=4)
    target.compiles = True
    assert outputs(target, "dspark", True, (0.8,), rows=1, count=4)[0] == expected


class Layers(nn.Module):
    """Products with a residual between them, packed or not."""

    def __init__(self, count: int, packed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        linears = [nn.Linear(8, 8).requires_grad_(False) for _ in range(count)]
        self.layers = nn.ModuleList(map(PackedLinear, linears) if packed else linears)
        self.held = [torch.zeros(2, 8) for _ in linears]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = x + layer(x).tanh()
            self.held[i].copy_(x)
        return sum(self.held), None, x


@pytest.mark.parametrize("packed", [False, True])
@torch.inference_mode()
def test_layers_are_one_piece(counted, packed) -> None:
    """Five layers with weights of their own: the first of them, and what the others repeat."""
    if packed and not can_pack(torch.float32, torch.device("cpu")):
        pytest.skip("no packed products on this machine")
    model, x = Layers(5, packed), torch.randn(2, 8)
    work = compiled(lambda: model(x), model.layers)
    assert counted.call_count <= 4
    x.copy_(torch.randn(2, 8))
    expected = model(x)
    held = [x.clone() for x in model.held]
    for written in model.held:
        written.zero_()
    found = work()
    assert found[1] is None
    torch.testing.assert_close(found[0], expected[0])
    torch.testing.assert_close(found[2], expected[2])
    torch.testing.assert_close(model.held, held)
    compiled(lambda: model(x), model.layers)
    assert counted.call_count <= 4


@torch.inference_mode()
def test_pieces_of_other_work_are_not_taken() -> None:
    """What differs in an operation, a number or a shape is another piece."""
    x = torch.randn(2, 8)
    for work in (lambda: x * 2, lambda: x * 3, lambda: x + 2, lambda: x[:1] * 2, lambda: x.T * 2):
        torch.testing.assert_close(compiled(work, [])(), work())


@torch.inference_mode()
def test_passes_of_other_threads_do_not_matter() -> None:
    model, x = Layers(2, False), torch.randn(2, 8)

    def work() -> torch.Tensor:
        thread = threading.Thread(target=model.layers[1], args=(x,))
        thread.start()
        thread.join()
        return model(x)[0]

    expected = work()
    torch.testing.assert_close(compiled(work, model.layers)(), expected)


@pytest.mark.usefixtures("traced")
def test_two_threads_may_trace() -> None:
    """Each has a model of its own, and one model is shared."""
    shared, x, wrong = Layers(3, False), torch.randn(2, 8), []

    @torch.inference_mode()
    def trace(seed: int) -> None:
        for model in (Layers(3, False), shared):
            given = x + seed
            found = compiled(lambda model=model, given=given: model(given)[2], model.layers)()
            if not torch.equal(found, model(given)[2]):
                wrong.append(seed)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(trace, range(6)))
    assert not wrong


def test_a_model_that_reads_on_the_host_is_refused() -> None:
    """Of JetMoe's experts the host reads the sizes: what they were once would stay in the trace."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "kv_channels": 8, "num_hidden_layers": 2}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}
    config = JetMoeConfig(vocab_size=11, max_position_embeddings=64, **sizes, **experts)
    target = Target.wrap(JetMoeForCausalLM(config))
    target.graphs = target.compiles = True
    engine = Engine(target, PlainProposer())
    engine.add([Request([1, 2], SamplingSettings(), 4)])
    with pytest.raises(ValueError, match=r"HostReadError: tolist.*take target\.compile=false"):
        engine.step()


@torch.inference_mode()
def test_what_could_not_be_repeated_is_refused() -> None:
    x = torch.randn(3)
    reads = (
        lambda: x.numpy().sum(),
        lambda: x * x.sum().item(),
        lambda: x * float(x[0]),
        lambda: x[x > 0],
        lambda: x if x[0] > 0 else -x,
    )
    for work in reads:
        with pytest.raises(ValueError, match=r"HostReadError|tracing tensor"):
            compiled(work, [])


@torch.inference_mode()
def test_an_error_without_words_is_told_by_its_name(counted) -> None:
    counted.side_effect = AssertionError()
    x = torch.randn(3)
    with pytest.raises(ValueError, match=r"compiled here \(AssertionError"):
        compiled(lambda: x + 1, [])


@torch.inference_mode()
def test_a_machine_that_cannot_compile_is_told(counted) -> None:
    from torch._inductor import config

    x = torch.randn(3)
    with (
        config.patch({"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True}),
        pytest.raises(ValueError, match=r"cannot be compiled.*target\.compile=false"),
    ):
        compiled(lambda: x.sin() * 5.125, [])
