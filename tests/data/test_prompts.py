"""Prompts from every kind of source, counts that reconcile, splits that hold."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from dspark_train.data.prompts import Prompt, PromptReader, split


def load_prompts(source: str, **settings: Any) -> tuple[list[Prompt], dict[str, Any]]:
    reader = PromptReader(source, **settings)
    return list(reader), reader.counts


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def write(path: Path, *rows: Any) -> str:
    path.write_text(
        "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)
    )
    return str(path)


def test_all_three_forms(tmp_path: Path) -> None:
    conversation = [user("Hi"), assistant("Hello"), user("Who are you?"), assistant("A model")]
    source = write(
        tmp_path / "p.jsonl",
        {"id": "a", "category": "chat", "messages": conversation},
        {"id": 7, "prompt": "Add 1 and 2"},
        {"turns": ["First", "Second"]},
    )
    prompts, counts = load_prompts(source)
    assert [p.id for p in prompts[:2]] == ["a", "7"]
    assert prompts[0].messages == conversation[:3]  # the answer is ours to generate
    assert prompts[0].category == "chat"
    assert prompts[1].messages == [user("Add 1 and 2")]
    assert prompts[2].messages == [user("First")]
    assert counts == {"read": 3, "kept": 3, "dropped": {}}


def test_identity_is_stable_and_without_the_system_prompt(tmp_path: Path) -> None:
    source = write(tmp_path / "p.jsonl", {"prompt": "Hi"}, {"prompt": "Ho"})
    plain, _ = load_prompts(source)
    [first, _], _ = load_prompts(source, system_prompt="Be brief.")
    assert first.id == plain[0].id != plain[1].id
    assert first.messages == [{"role": "system", "content": "Be brief."}, user("Hi")]
    again, _ = load_prompts(write(tmp_path / "q.jsonl", {"turns": ["Hi"]}))
    assert again[0].id == plain[0].id


def test_a_conversation_keeps_its_own_system_prompt(tmp_path: Path) -> None:
    own = {"role": "system", "content": "Rhyme."}
    source = write(tmp_path / "p.jsonl", {"messages": [own, user("Hi")]})
    assert load_prompts(source, system_prompt="Be brief.")[0][0].messages == [own, user("Hi")]


def test_counts_reconcile_by_reason(tmp_path: Path) -> None:
    """Fault 44: nothing is dropped silently."""
    source = write(
        tmp_path / "p.jsonl",
        {"id": "a", "prompt": "one"},
        "{not json",
        "",
        {"id": "a", "prompt": "two"},
        {"id": "b", "prompt": "one"},
        {"id": "c", "prompt": "   "},
        {"id": "d", "turns": []},
        {"id": "e", "messages": [{"role": "narrator", "content": "It rains."}]},
        {"id": "f", "messages": [user("Hi"), {"role": "system", "content": "late"}]},
        {"id": "g", "messages": [assistant("only an answer")]},
        {"id": "h", "messages": "text"},
        {"id": "i", "text": "unknown column"},
        '"a string"',
        {"id": "j", "prompt": "last"},
    )
    prompts, counts = load_prompts(source)
    assert [p.id for p in prompts] == ["a", "j"]
    assert counts["dropped"] == {
        "bad role": 2,
        "duplicate": 2,
        "empty": 3,
        "malformed": 3,
        "no prompt column": 1,
    }
    assert counts["malformed_lines"] == [2, 11, 13]
    assert counts["read"] == counts["kept"] + sum(counts["dropped"].values()) == 13


def test_limit_counts_what_is_kept(tmp_path: Path) -> None:
    rows = [{"prompt": text} for text in ("one", "one", "two", "three")]
    prompts, counts = load_prompts(write(tmp_path / "p.jsonl", *rows), limit=2)
    assert [p.messages[0]["content"] for p in prompts] == ["one", "two"]
    assert counts == {"read": 3, "kept": 2, "dropped": {"duplicate": 1}}


def test_categories_are_chosen_by_name(tmp_path: Path) -> None:
    rows = [{"prompt": str(i), "kind": kind} for i, kind in enumerate(("a", "b", "a", None, "c"))]
    source = write(tmp_path / "p.jsonl", *rows)
    prompts, counts = load_prompts(source, columns={"category": "kind"}, categories=["a", "c"])
    assert [p.messages[0]["content"] for p in prompts] == ["0", "2", "4"]
    assert counts == {"read": 5, "kept": 3, "dropped": {"other category": 2}}
    others = r"\['None', 'a', 'b', 'c'\]"
    with pytest.raises(ValueError, match=rf"categories=\['d'\]: none .* some of {others}"):
        load_prompts(source, columns={"category": "kind"}, categories=["d"])


def test_column_mapping(tmp_path: Path) -> None:
    source = write(tmp_path / "p.jsonl", {"uid": "x", "question": "Why?", "prompt": "not this"})
    prompts, _ = load_prompts(source, columns={"prompt": "question", "id": "uid"})
    assert (prompts[0].id, prompts[0].messages) == ("x", [user("Why?")])
    with pytest.raises(ValueError, match=r"unknown keys \['question'\]"):
        load_prompts(source, columns={"question": "prompt"})
    with pytest.raises(
        ValueError, match=r"\{'no prompt column': 1\}.*one of the columns \['ask'\]"
    ):
        load_prompts(source, columns={"prompt": "ask"})


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    rows = [{"id": str(i), "messages": [user(f"question {i}")]} for i in range(5)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    prompts, counts = load_prompts(str(path))
    assert [p.id for p in prompts] == list("01234")
    assert prompts[3].messages == [user("question 3")]
    assert counts["read"] == 5
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"p\.parquet is not a readable Parquet file"):
        load_prompts(str(path))


def test_a_dataset_folder(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", *({"question": f"question {i}"} for i in range(4)))
    prompts, counts = load_prompts(str(tmp_path), columns={"prompt": "question"}, limit=3)
    assert prompts[2].messages == [user("question 2")]
    assert counts["kept"] == 3


def test_a_dataset_name_with_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(*args: object, **kwargs: object) -> list[dict[str, str]]:
        asked.append((args, kwargs))
        return [{"question": "Why?"}]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    load_prompts("openai/gsm8k:main", dataset_split="test", columns={"prompt": "question"})
    assert asked == [(("openai/gsm8k", "main"), {"split": "test", "streaming": True})]


def test_an_unreachable_dataset_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("Couldn't reach the hub")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    with pytest.raises(ValueError, match=r"prompts\.source=some/name .*Couldn't reach.*or give a"):
        load_prompts("some/name")


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_an_empty_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"empty\.jsonl has no usable prompt, it is empty"):
        load_prompts(str(path))


def test_missing_and_foreign_files_are_refused(tmp_path: Path) -> None:
    for name in ("absent.jsonl", "absent.parquet", "absent_folder"):
        with pytest.raises(ValueError, match=rf"{name} does not exist"):
            load_prompts(str(tmp_path / name))
    (tmp_path / "table.csv").write_text("a,b")
    with pytest.raises(ValueError, match=r"table\.csv: expected a \.jsonl or \.parquet file"):
        load_prompts(str(tmp_path / "table.csv"))
    with pytest.raises(ValueError, match=r"prompts\.limit=0"):
        load_prompts(str(tmp_path / "p.jsonl"), limit=0)


def test_split_by_identity() -> None:
    """Fault 39: a prompt's part depends on nothing but its identity and the shares."""
    names = [f"prompt-{i}" for i in range(4000)]
    parts = {name: split(name, calibration=0.1, held_out=0.2) for name in names}
    sizes = Counter(parts.values())
    assert abs(sizes["held_out"] - 800) < 100
    assert abs(sizes["calibration"] - 400) < 80
    # a larger calibration share takes prompts from training alone
    for name in names:
        part = split(name, calibration=0.3, held_out=0.2)
        assert part == parts[name] or (parts[name], part) == ("train", "calibration")
    assert {split(name, calibration=0.0, held_out=0.0) for name in names} == {"train"}


@pytest.mark.parametrize(("calibration", "held_out"), [(0.5, 0.5), (-0.1, 0.2)])
def test_split_refuses_impossible_shares(calibration: float, held_out: float) -> None:
    with pytest.raises(ValueError, match="must not be negative and must add up"):
        split("a", calibration=calibration, held_out=held_out)
