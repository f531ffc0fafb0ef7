"""The feature store: what is written is read back bit by bit, and damage is noticed."""

import pickle
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from dspark_train.artifacts import Artifact, ArtifactWriter
from dspark_train.data.store import FeatureStore, FeatureWriter
from dspark_train.target import Target
from tests import tiny_language

WIDTH, HIDDEN = 12, 4
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


def store(directory: Path, documents: Iterable[Row], **settings: object) -> FeatureStore:
    writer = artifact_writer(directory)
    features = FeatureWriter(writer, **settings)
    for document in documents:
        features.add(*document)
    return FeatureStore(writer.finish(counts=features.close(), facts={}))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shard_bytes", [1, 1000, 2**20])
def test_what_is_written_is_read(tmp_path: Path, dtype: str, shard_bytes: int) -> None:
    """Fault 24: stored and read features are bit-equal to the captured ones in that dtype."""
    documents = rows(20)
    read = store(tmp_path / "capture", documents, dtype=dtype, shard_bytes=shard_bytes)
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


def test_shards_are_closed_by_bytes_and_counted(tmp_path: Path) -> None:
    one = rows(1)[0]
    documents = [one] * 10
    size = sum(t.nbytes for t in (one[1].int(), one[2].byte(), one[3])) + 16 * one[2][1:].sum()
    directory = tmp_path / "capture"
    read = store(directory, documents, dtype="float32", shard_bytes=int(size) * 3)
    shards = sorted(directory.glob("*.safetensors"))
    assert [shard.name for shard in shards] == [f"features-0000{i}.safetensors" for i in range(4)]
    counts = Artifact.open(directory).counts
    assert counts == {
        "documents": 10,
        "tokens": read.num_tokens,
        "label_rows": 10 * int(one[2][1:].sum()),
        "shards": 4,
        "bytes": sum(shard.stat().st_size for shard in shards),
    }


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
    features = FeatureWriter(writer, dtype="float32")
    identity, ids, mask, states, hidden = rows(1)[0]
    expected = states.clone()
    features.add(identity, ids, mask, states, hidden)
    states.zero_()
    read = FeatureStore(writer.finish(counts=features.close(), facts={}))
    assert torch.equal(read.document(0).features, expected)


@pytest.mark.parametrize("killed_after", [0, 1, 7, 12, 19])
def test_interrupted_work_ends_with_the_same_files(tmp_path: Path, killed_after: int) -> None:
    documents = rows(20)
    whole = store(tmp_path / "whole", documents, shard_bytes=800)
    directory = tmp_path / "capture"
    killed = FeatureWriter(artifact_writer(directory), shard_bytes=800)
    for document in documents[:killed_after]:
        killed.add(*document)
    writer = artifact_writer(directory)
    resumed = FeatureWriter(writer, shard_bytes=800)
    assert resumed.done <= killed_after
    for document in documents[resumed.done :]:
        resumed.add(*document)
    again = FeatureStore(writer.finish(counts=resumed.close(), facts={}))
    assert again.identities == whole.identities
    expected, found = Artifact.open(tmp_path / "whole"), Artifact.open(directory)
    assert found.manifest["files"] == expected.manifest["files"]
    assert found.counts == expected.counts


def test_nan_and_inf_are_refused_by_name(tmp_path: Path) -> None:
    """Fault 47."""
    writer = FeatureWriter(artifact_writer(tmp_path / "capture"))
    ids, mask = torch.arange(5), torch.tensor([0, 0, 1, 1, 1])
    features, hidden = torch.randn(5, WIDTH), torch.randn(5, HIDDEN)
    bad = features.clone()
    bad[3, 2] = float("nan")
    with pytest.raises(ValueError, match="document p7: features at position 3, column 2 is nan"):
        writer.add("p7", ids, mask, bad, hidden)
    bad = hidden.clone()
    bad[2, 1] = float("-inf")
    with pytest.raises(ValueError, match="p7: last_hidden at position 2, column 1 is -inf"):
        writer.add("p7", ids, mask, features, bad)
    assert writer.close()["documents"] == 0


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    artifact = artifact_writer(tmp_path / "capture")
    with pytest.raises(ValueError, match=r"capture\.dtype='int8'"):
        FeatureWriter(artifact, dtype="int8")
    writer = FeatureWriter(artifact)
    identity, ids, mask, features, hidden = rows(1)[0]
    with pytest.raises(ValueError, match=r"prompt-0: .* must have one row a token"):
        writer.add(identity, ids[:-1], mask, features, hidden)
    with pytest.raises(ValueError, match="has no feature shards"):
        FeatureStore(artifact.finish(counts=writer.close(), facts={}))


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
