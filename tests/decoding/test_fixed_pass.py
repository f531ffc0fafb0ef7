"""Rounds at fixed shapes, recorded: the same output as rounds of any shape."""

from unittest import mock

import pytest
import torch

from dspark_train.decoding import SpeculativeDecoder
from dspark_train.decoding.audit import audit
from dspark_train.decoding.engine import Engine
from dspark_train.decoding.fixed_pass import FixedPasses
from dspark_train.decoding.proposers import BlockProposer, LookupProposer, PlainProposer
from dspark_train.decoding.recording import Recorder, tier
from dspark_train.decoding.request import Request
from dspark_train.decoding.sampling import SamplingSettings
from tests.decoding.tape import taped
from tests.decoding.test_windows import CASES, make_target
from tests.random_drafter import make_drafter

PROMPTS = [[1, 2, 3], [4], [0, 0, 1, 2, 3, 3, 1], [2, 1], [3]]


@pytest.fixture(autouse=True)
def recorded():
    """What CUDA would record is recorded."""
    with mock.patch.object(Recorder, "_capture", lambda self, work: taped(work)):
        yield


def proposer_of(kind: str, target):
    if kind == "plain":
        return PlainProposer()
    if kind == "lookup":
        return LookupProposer(4, shortest=1)
    sample_from_anchor, head = (False, None) if kind == "dflash" else (True, "vanilla")
    drafter = make_drafter(target, 4, sample_from_anchor, head)
    return BlockProposer(drafter, target.head, recorder=Recorder.of(target, drafter.layers))


def outputs(target, kind: str, graphs: bool, sampling=(), rows: int = 3, count: int = 18):
    """New tokens of all prompts, which come and go in `rows` rows, and the engine."""
    target.graphs = graphs
    engine = Engine(target, proposer_of(kind, target), rows=rows, reads_ahead=True)
    requests = [
        Request(prompt, SamplingSettings(*sampling, seed=i), count + 3 * i)
        for i, prompt in enumerate(PROMPTS)
    ]
    waiting = list(requests)
    while waiting or engine.requests:
        while waiting and engine.free:
            engine.add([waiting.pop(0)])
        engine.step()
        assert audit(engine) < 1e-4
        engine.take_finished()
    return [request.new_tokens for request in requests], engine


@pytest.mark.parametrize("kind", ["plain", "lookup", "dflash", "dspark"])
@pytest.mark.parametrize("sampling", [(), (0.8,)])
def test_the_same_tokens_whatever_the_shape(random_target, kind, sampling) -> None:
    """Rows join and leave, tiers change, storage grows: caches are what a fresh reading gives."""
    target = random_target()
    expected, _ = outputs(target, kind, False, sampling)
    found, engine = outputs(target, kind, True, sampling)
    assert found == expected
    shapes = set(engine.fixed.recorder.recorded)
    assert {n for n, _, _ in shapes} == {1, 2, 3}
    assert len({q for _, q, _ in shapes}) > (kind != "plain")


def test_work_is_recorded_once_a_shape(random_target) -> None:
    with mock.patch.object(
        FixedPasses, "_masks", autospec=True, side_effect=FixedPasses._masks
    ) as ran:
        _, engine = outputs(random_target(), "dspark", True)
    assert ran.call_count == len(engine.fixed.recorder.recorded) < 12


@pytest.mark.parametrize(("family", "attention"), CASES)
def test_windows(family, attention) -> None:
    target = make_target(family, attention)
    expected, _ = outputs(target, "dspark", False)
    found, _ = outputs(target, "dspark", True)
    assert found == expected


def test_storage_that_has_grown_is_recorded_anew(random_target) -> None:
    target = random_target(max_position_embeddings=1024)
    target.graphs = True
    engine = Engine(target, proposer_of("dspark", target), rows=2)
    first = Request([1, 2], SamplingSettings(), 40)
    engine.add([first])
    engine.step()
    before = dict(engine.fixed.recorder.recorded)
    engine.add([Request([1] * 300, SamplingSettings(), 40)])
    engine.step()
    assert not set(map(id, before.values())) & set(map(id, engine.fixed.recorder.recorded.values()))
    assert audit(engine) < 1e-4


def test_a_host_read_is_found() -> None:
    """The tape refuses what a graph would."""
    x = torch.arange(3)
    reads = (
        lambda: x.max().item(),
        lambda: x.tolist(),
        lambda: x[x > 1],
        lambda: x.clone().index_put_((x > 1,), x[:1]),
        lambda: x.unique(),
        lambda: torch.tensor([1, 2]),
    )
    for wrong in reads:
        with pytest.raises(RuntimeError, match="within recorded work"):
            taped(wrong)
    assert taped(lambda: x * 2)().tolist() == [0, 2, 4]


def test_a_replay_reads_what_lies_there_now() -> None:
    x = torch.arange(3)
    work = taped(lambda: (x * 2, x[1:] + 1))
    x += 10
    assert [part.tolist() for part in work()] == [[20, 22, 24], [12, 13]]


def test_tiers() -> None:
    assert [tier(n) for n in range(1, 10)] == [1, 2, 3, 4, 6, 6, 8, 8, 12]
    assert [tier(n) for n in (12, 13, 17, 25)] == [12, 16, 24, 32]
    assert tier(9, 10) == 10
    assert tier(3, 6) == 3


def test_recurrent_targets_are_refused(random_target) -> None:
    target = random_target()
    target.recurrent = True
    with pytest.raises(ValueError, match=r"recurrent layers.*take target\.graphs=false"):
        FixedPasses(target, None, 1, ())
    target.compiles = True
    with pytest.raises(ValueError, match=r"take target\.compile=false"):
        FixedPasses(target, None, 1, ())


def test_positions_that_the_host_reads_are_refused(random_target) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    target = random_target(rope_parameters=rope)
    target.graphs = True
    with pytest.raises(ValueError, match=r"\['dynamic'\].*take target\.graphs=false"):
        Engine(target, PlainProposer())


def test_a_prompt_that_is_read_in_pieces_stays_whole(random_target) -> None:
    """Rounds of the others go on between its pieces, in as many rows as there are."""
    target = random_target()
    target.graphs = True
    engine = Engine(target, proposer_of("dspark", target), rows=3, reads_ahead=True)
    engine.add([Request(prompt, SamplingSettings(), 30) for prompt in PROMPTS[:2]])
    engine.begin(Request(PROMPTS[2], SamplingSettings(), 30))
    while not engine.read(2):
        engine.step()
    engine.step()
    assert len(engine.requests) == 3
    assert audit(engine) < 1e-4


def test_rounds_of_fixed_shapes_count_as_padded(random_target) -> None:
    target = random_target()
    target.pack_rows()
    assert not Engine(target, PlainProposer()).pads
    target.graphs = True
    assert Engine(target, PlainProposer()).pads


def test_a_decoder_records_a_shape_once(random_target) -> None:
    """`run` and `generate` find what an earlier call of theirs has recorded."""
    target = random_target()
    target.graphs = True
    decoder = SpeculativeDecoder(target, proposer_of("dspark", target))
    with mock.patch.object(
        FixedPasses, "_make", autospec=True, side_effect=FixedPasses._make
    ) as made:

        def run(rows: int) -> list[list[int]]:
            requests = [decoder.request(p, 8) for p in PROMPTS]
            return [result.tokens for result in decoder.run(requests, rows)]

        expected, counts = run(3), []
        for _ in range(3):
            assert run(2) == [decoder.generate(p, 8).tokens for p in PROMPTS] == run(3) == expected
            counts.append(made.call_count)
    assert decoder.engine.rows == 3
    assert 0 < counts[0] == counts[1] == counts[2]


def test_no_more_rows_at_a_time_than_asked_for(random_target) -> None:
    target = random_target()
    target.graphs = True
    decoder = SpeculativeDecoder(target, PlainProposer())
    decoder.run([decoder.request(p, 8) for p in PROMPTS], rows=4)
    seen, step = [], Engine.step
    with mock.patch.object(
        Engine, "step", autospec=True, side_effect=lambda e: seen.append(len(e.requests)) or step(e)
    ):
        decoder.run([decoder.request(p, 8) for p in PROMPTS], rows=2)
    assert max(seen) == 2


def test_memory_of_a_batch_is_let_go_without_graphs(random_target) -> None:
    decoder = SpeculativeDecoder(random_target(), PlainProposer())
    decoder.run([decoder.request(p, 8) for p in PROMPTS], rows=3)
    assert decoder.engine.rows == 1
    assert decoder.engine.cache.nbytes == 0
