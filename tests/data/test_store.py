"""The feature store: what is written is read back bit by bit, and damage is noticed."""

import pickle
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dspark_train.artifacts import Artifact, ArtifactWriter
from dspark_train.data.encoding import STORED, decode, encode, token_bytes
from dspark_train.data.layout import document_bytes
from dspark_train.data.shard import label_rows
from dspark_train.data.store import FeatureStore
from dspark_train.data.writer import FeatureWriter, shard_name
from dspark_train.target import Target
from tests import tiny_language

WIDTH, HIDDEN, TAPS = 12, 4, 2
Row = tuple[str, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def rows(count: int, seed: int = 0) -> list[Row]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for i in range(count):
        length = int(torch.randint(1, 9, (), generator=generator))
        made.append(
            (
                f"prompt-{i // 2}",
                torch.randint(1000, (length,), generator=generator),
                torch.randint(2, (length,), generator=generator),
                torch.randn(length, WIDTH, generator=generator),
                torch.randn(length, HIDDEN, generator=generator),
            )
        )
    return made


def artifact_writer(directory: Path) -> ArtifactWriter:
    return ArtifactWriter(directory, "capture", {"taps": [1]}, {"rollout": "abc"})


def fill(
    writer: ArtifactWriter, documents: list[Row], dtype: str = "bfloat16", per_shard: int = 100
) -> None:
    """Write documents, so many to a shard, apart from the shards that are there."""
    with FeatureWriter(writer, dtype=dtype, taps=TAPS) as features:
        for number, start in enumerate(range(0, len(documents), per_shard)):
            if not writer.has(shard_name(number)):
                members = documents[start : start + per_shard]
                labels = [len(label_rows(mask)) for _, _, mask, *_ in members]
                features.begin(number, [len(ids) for _, ids, *_ in members], labels)
                for document in members:
                    features.add(*document)


def store(directory: Path, documents: list[Row], **settings: Any) -> FeatureStore:
    writer = artifact_writer(directory)
    fill(writer, documents, **settings)
    return FeatureStore(writer.finish(counts={}, facts={}))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("per_shard", [1, 7, 20])
def test_what_is_written_is_read(tmp_path: Path, dtype: str, per_shard: int) -> None:
    """Fault 24: stored and read features are bit-equal to the captured ones in that dtype."""
    documents = rows(20)
    read = store(tmp_path / "capture", documents, dtype=dtype, per_shard=per_shard)
    assert len(read) == 20
    assert read.identities == [identity for identity, *_ in documents]
    assert read.lengths == [len(ids) for _, ids, *_ in documents]
    assert read.num_tokens == sum(read.lengths)
    kind = getattr(torch, dtype)
    assert read.dtype == kind
    for number, (_, ids, mask, features, hidden) in enumerate(documents):
        document = read.document(number)
        assert torch.equal(document.input_ids.long(), ids)
        assert torch.equal(document.loss_mask.long(), mask)
        assert torch.equal(document.features, features.to(kind))
        wanted = [p for p in range(len(ids) - 1) if mask[p + 1]]
        assert document.label_rows.tolist() == wanted
        assert torch.equal(document.last_hidden, hidden[wanted].to(kind))
    read.verify()


@pytest.mark.parametrize(("dtype", "most"), [("fp8", 2**-4), ("int8", 0.5 / 127)])
def test_eight_bits_are_as_exact_as_their_format(tmp_path: Path, dtype: str, most: float) -> None:
    """A scale per row and tap: a huge value in one layer costs the other layers nothing.

    fp8 has three bits behind the point, so numbers are off by at most 1/16 of themselves; int8 by
    half a step of 1/127 of the largest in the row and tap. bfloat16, into which both are decoded,
    adds 1/256.
    """
    documents = rows(20)
    for _, _, _, features, _ in documents:
        features[:, 0] *= 1e7
    read = store(tmp_path / "capture", documents, dtype=dtype, per_shard=7)
    for number, (_, ids, mask, features, hidden) in enumerate(documents):
        document = read.document(number)
        assert document.features.dtype == document.last_hidden.dtype == torch.bfloat16
        wanted = [p for p in range(len(ids) - 1) if mask[p + 1]]
        for found, true, groups in (
            (document.features, features, TAPS),
            (document.last_hidden, hidden[wanted], 1),
        ):
            found, true = (x.float().unflatten(-1, (groups, -1)) for x in (found, true))
            largest = true.abs().amax(-1, keepdim=True)
            of = true.abs().clamp(min=2**-6 / 448 * largest) if dtype == "fp8" else largest
            assert ((found - true).abs() <= most * of + true.abs() / 256).all()
        # the planted fault: one scale for the whole row would lose the second layer
        spoilt = decode(*encode(features, dtype, 1)).float()[:, WIDTH // TAPS :]
        assert (spoilt - features[:, WIDTH // TAPS :]).norm() > 0.2 * spoilt.norm()


def test_bytes_of_the_file_are_those_that_were_planned(tmp_path: Path) -> None:
    documents = rows(50)
    lengths = [len(ids) for _, ids, *_ in documents]
    labels = [len(label_rows(mask)) for _, _, mask, *_ in documents]
    for dtype in STORED:
        store(tmp_path / dtype, documents, dtype=dtype)
        planned = sum(
            document_bytes(t, n, dtype=dtype, hidden_size=HIDDEN, taps=TAPS)
            for t, n in zip(lengths, labels, strict=True)
        )
        # of shape [T, M·D] with M = 2 taps of 6 columns here, where D is 4
        planned += sum(lengths) * STORED[dtype].itemsize * (WIDTH - TAPS * HIDDEN)
        tensors = load_file(tmp_path / dtype / "features-00000.safetensors")
        splits = tensors["row_splits"].nbytes + tensors["hidden_splits"].nbytes
        assert sum(t.nbytes for t in tensors.values()) - splits == planned


def test_qwen3_4b_takes_less_than_half_of_what_others_store() -> None:
    """30,726 bytes a token: five taps and the last hidden state of every token in bfloat16."""
    assert token_bytes("bfloat16", 2560, 5, supervised=1.0) + 1 == 30_726
    # at most 98 of 100 tokens are supervised: a prompt has a template at least
    assert token_bytes("fp8", 2560, 5, supervised=0.98) <= 30_726 // 2
    assert token_bytes("int8", 2560, 5, supervised=0.98) <= 30_726 // 2


def test_a_shard_is_an_ordinary_safetensors_file(tmp_path: Path) -> None:
    store(tmp_path / "capture", rows(3))
    with safe_open(tmp_path / "capture" / "features-00000.safetensors", "pt") as file:
        assert file.get_slice("features").get_shape()[1] == WIDTH
        assert file.get_tensor("row_splits").dtype == torch.int64


def test_documents_are_views_and_writes_do_not_reach_the_file(tmp_path: Path) -> None:
    read = store(tmp_path / "capture", rows(4), dtype="float32")
    shard = tmp_path / "capture" / "features-00000.safetensors"
    before = shard.read_bytes()
    first, second = read.document(0).features, read.document(1).features
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    first.zero_()
    assert shard.read_bytes() == before


def test_a_pickled_store_holds_no_data(tmp_path: Path) -> None:
    documents = [
        ("a", torch.arange(5000), torch.ones(5000), torch.randn(5000, 64), torch.randn(5000, 8))
    ]
    read = store(tmp_path / "capture", documents)
    sent = pickle.dumps(read)
    assert len(sent) < 10_000
    again = pickle.loads(sent)
    assert torch.equal(again.document(0).features, read.document(0).features)


def test_the_caller_may_reuse_its_tensors(tmp_path: Path) -> None:
    writer = artifact_writer(tmp_path / "capture")
    identity, ids, mask, states, hidden = rows(1)[0]
    expected = states.clone()
    with FeatureWriter(writer, dtype="float32", taps=TAPS) as features:
        features.begin(0, [len(ids)] * 2, [len(label_rows(mask))] * 2)
        features.add(identity, ids, mask, states, hidden)
        states.zero_()
        features.add(identity, ids, mask, states, hidden)
    read = FeatureStore(writer.finish(counts={}, facts={}))
    assert torch.equal(read.document(0).features, expected)


@pytest.mark.parametrize("killed_after", [0, 1, 7, 12, 19])
def test_interrupted_work_ends_with_the_same_files(tmp_path: Path, killed_after: int) -> None:
    documents = rows(20)
    store(tmp_path / "whole", documents, per_shard=4)
    directory = tmp_path / "capture"
    fill(artifact_writer(directory), documents[: killed_after // 4 * 4], per_shard=4)
    store(directory, documents, per_shard=4)
    expected, found = Artifact.open(tmp_path / "whole"), Artifact.open(directory)
    assert found.manifest == {**expected.manifest, "seconds": found.seconds}


def test_two_shards_are_in_memory_never_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third shard is not begun before the first is on disk, however slow that is."""
    written, ahead = [], []

    def slow(path: Path, *_: Any) -> None:
        time.sleep(0.02)
        path.write_bytes(b"x")
        written.append(path)

    monkeypatch.setattr("dspark_train.data.writer.write_shard", slow)
    with FeatureWriter(artifact_writer(tmp_path / "c"), dtype="float32", taps=TAPS) as features:
        for number, (identity, ids, mask, states, hidden) in enumerate(rows(8)):
            features.begin(number, [len(ids)], [len(label_rows(mask))])
            features.add(identity, ids, mask, states, hidden)
            ahead.append(number + 1 - len(written))
    assert len(written) == 8
    assert max(ahead) == 1  # handed over and not yet written, beside the one that is filled


def test_what_goes_wrong_on_the_thread_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fills up between two shards: the first stays usable, the message says what to do."""
    documents, writer = rows(3), artifact_writer(tmp_path / "capture")
    usage, free = shutil.disk_usage(tmp_path), [10**9, 10, 10]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free.pop(0)))
    with pytest.raises(ValueError, match=r"the next shard needs .* free some space"):
        fill(writer, documents, per_shard=1)
    assert writer.has(shard_name(0))
    assert not writer.has(shard_name(1))
    monkeypatch.undo()
    read = store(tmp_path / "capture", documents, per_shard=1)
    assert read.identities == [identity for identity, *_ in documents]


def test_nan_and_inf_are_refused_by_name(tmp_path: Path) -> None:
    """Fault 47."""
    ids, mask = torch.arange(5), torch.tensor([0, 0, 1, 1, 1])
    features, hidden = torch.randn(5, WIDTH), torch.randn(5, HIDDEN)
    with FeatureWriter(artifact_writer(tmp_path / "c"), dtype="bfloat16", taps=TAPS) as writer:
        writer.begin(0, [5], [3])
        bad = features.clone()
        bad[3, 2] = float("nan")
        with pytest.raises(ValueError, match="document p7: features at position 3, column 2 is na"):
            writer.add("p7", ids, mask, bad, hidden)
        bad = hidden.clone()
        bad[2, 1] = float("-inf")
        with pytest.raises(ValueError, match="p7: last_hidden at position 2, column 1 is -inf"):
            writer.add("p7", ids, mask, features, bad)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_what_was_not_planned_is_refused(tmp_path: Path) -> None:
    writer = artifact_writer(tmp_path / "capture")
    identity, ids, mask, features, hidden = rows(1)[0]
    labels = len(label_rows(mask))
    with FeatureWriter(writer, dtype="fp8", taps=TAPS) as store_writer:
        store_writer.begin(0, [len(ids)], [labels])
        with pytest.raises(ValueError, match=r"prompt-0: rows of input_ids.* planned were"):
            store_writer.add(identity, ids[:-1], mask, features, hidden)
        with pytest.raises(ValueError, match=r"prompt-0: rows of input_ids.* planned were"):
            store_writer.add(identity, ids, mask.zero_(), features, hidden)
        with pytest.raises(ValueError, match="shard 0 still waits"):
            store_writer.begin(1, [1], [1])
    with pytest.raises(ValueError, match="has no feature shards"):
        FeatureStore(writer.finish(counts={}, facts={}))


def damaged(directory: Path, change: str) -> bytes:
    shard = directory / "features-00000.safetensors"
    whole = bytearray(shard.read_bytes())
    header_bytes = int.from_bytes(whole[:8], "little")
    if change == "truncated":
        return whole[:-10]
    if change == "longer":
        return whole + b"x"
    if change == "empty":
        return b""
    if change == "header length":
        whole[7] = 0x7F
    elif change == "header text":
        whole[12] ^= 0xFF
    elif change == "splits":
        whole[8 + header_bytes + 8] ^= 0x40
    return whole


@pytest.mark.parametrize(
    "change", ["truncated", "longer", "empty", "header length", "header text", "splits"]
)
def test_a_damaged_shard_is_refused_by_name(tmp_path: Path, change: str) -> None:
    directory = tmp_path / "capture"
    store(directory, rows(4))
    artifact = Artifact.open(directory)
    content = damaged(directory, change)
    (directory / "features-00000.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"features-00000\.safetensors is damaged"):
        FeatureStore(artifact)


def test_a_foreign_file_is_refused_by_name(tmp_path: Path) -> None:
    directory = tmp_path / "capture"
    store(directory, rows(4))
    artifact = Artifact.open(directory)
    save_file({"a": torch.zeros(3)}, directory / "features-00000.safetensors")
    with pytest.raises(ValueError, match=r"features-00000\.safetensors is damaged"):
        FeatureStore(artifact)


def test_one_flipped_bit_is_found(tmp_path: Path) -> None:
    directory = tmp_path / "capture"
    read = store(directory, rows(4))
    shard = directory / "features-00000.safetensors"
    whole = bytearray(shard.read_bytes())
    whole[-5] ^= 1
    shard.write_bytes(whole)
    with pytest.raises(ValueError, match=r"features-00000\.safetensors is damaged .*SHA-256"):
        read.verify()


def test_a_mask_that_contradicts_the_labels_is_refused(tmp_path: Path) -> None:
    ids, states, hidden = torch.arange(6), torch.randn(6, WIDTH), torch.randn(6, HIDDEN)
    read = store(tmp_path / "capture", [("p1", ids, torch.ones(6), states, hidden)])
    read.document(0).loss_mask[3] = 0
    with pytest.raises(ValueError, match="document p1 has 4 labels but 5 last hidden states"):
        read.document(0)


def test_no_such_document(tmp_path: Path) -> None:
    read = store(tmp_path / "capture", rows(2))
    for number in (-1, 2):
        with pytest.raises(IndexError, match=f"document {number} of 2"):
            read.document(number)


def test_stored_last_hidden_gives_the_targets_own_logits(
    tmp_path: Path, tiny_target: Target
) -> None:
    """Fault 33: the row stored for label position t gives the target's distribution of token t."""
    [messages] = tiny_language.prompts(1)
    prompt = tiny_target.encode_chat(messages)
    ids = torch.tensor(prompt + tiny_target.tokenizer.encode("of course , i will")).unsqueeze(0)
    mask = torch.zeros(ids.shape[1])
    mask[len(prompt) :] = 1
    output = tiny_target.forward(ids, taps=(1, 3))
    read = store(
        tmp_path / "capture",
        [("p", ids[0], mask, output.features[0], output.last_hidden[0])],
        dtype="float32",
    )
    document = read.document(0)
    assert (document.label_rows + 1).tolist() == list(range(len(prompt), ids.shape[1]))
    own = tiny_target.model(input_ids=ids).logits[0, document.label_rows]
    torch.testing.assert_close(tiny_target.head.logits(document.last_hidden), own)
