"""Conversations answered turn by turn, ready-made ones masked, loops noticed."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from dspark_train.artifacts import Artifact
from dspark_train.data.answers import Answer
from dspark_train.data.conversation import answer_all
from dspark_train.data.given import given_turns
from dspark_train.data.prompts import PromptReader, UnusableError
from dspark_train.data.repetition import is_degenerate, loop_length
from dspark_train.data.rollouts import RolloutDocuments
from dspark_train.stages.rollout import responses
from dspark_train.target import Target
from tests import tiny_language
from tests.tiny_pipeline import Run, refused

TALK = [
    {"role": "user", "content": "please mend the old boat"},
    {"role": "assistant", "content": "of course"},
    {"role": "user", "content": "please paint the red door"},
    {"role": "assistant", "content": "no problem , i will"},
]
# the tiny template with markers around what the assistant says; its EOS stays outside
MARKED = (
    "{% for m in messages %}<|im_start|> {{ m['role'] }} {% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}"
    " <|im_end|> {% endfor %}{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"prompts.source={path}"


def rollout_of(folder: Path, *rows: dict[str, Any]) -> Any:
    """As much of a rollout's artifact as its documents need."""
    write(folder / "rollouts-00000.jsonl", *rows)
    facts = {"shards": ["rollouts-00000.jsonl"]}
    return SimpleNamespace(directory=folder, facts=facts, file=lambda name: folder / name)


def test_readers_of_conversations(tmp_path: Path) -> None:
    source = write(tmp_path / "p.jsonl", {"messages": TALK}).split("=")[1]
    asked = {mode: next(iter(PromptReader(source, turns=mode))) for mode in ("last", "every")}
    assert asked["last"].messages == TALK[:3]
    assert asked["every"].messages == TALK[:1]
    assert asked["every"].later == (TALK[2]["content"],)
    assert next(iter(PromptReader(source, turns="given"))).messages == TALK
    turns = write(tmp_path / "q.jsonl", {"turns": ["one", "two", "three"]}).split("=")[1]
    prompt = next(iter(PromptReader(turns, turns="every", system_prompt="Be brief.")))
    assert [m["content"] for m in prompt.messages] == ["Be brief.", "one"]
    assert prompt.later == ("two", "three")
    reader = PromptReader(write(tmp_path / "r.jsonl", {"prompt": "x"}).split("=")[1], turns="given")
    with pytest.raises(ValueError, match="'no answer': 1"):
        list(reader)


def test_every_turn_is_answered_after_the_answers_before(
    tiny_run: Run, tiny_target: Target, tmp_path: Path
) -> None:
    talks = [
        {"id": str(i), "turns": [m[0]["content"] for m in tiny_language.prompts(3, seed=i)]}
        for i in range(6)
    ]
    source = write(tmp_path / "talks.jsonl", *talks)
    given = ("rollout.turns=every", "prompts.calibration=0", "prompts.held_out=0")
    ended = tiny_run("stages=[rollout,capture]", source, "rollout.max_new_tokens=40", *given)
    assert ended.status == 0, ended
    run = tmp_path / "run"
    rollout = Artifact.open(run / "rollout")
    rows = list(responses(run / "rollout", rollout.facts["shards"]))
    left = rollout.counts["unanswered_turns"]
    assert len(rows) + left == 3 * len(talks)
    for row in rows:
        assert row["prompt"] == tiny_target.encode_chat(
            tiny_target_history(tiny_target, rows, talks, row)
        )
    # of every conversation one document, with a supervised part for every answer
    documents = RolloutDocuments(rollout, max_length=4096)
    assert sorted(set(documents.identities)) == sorted(documents.identities)
    assert sum(documents.labels) == sum(len(row["response"]) for row in rows)
    one = documents.document(0)
    parts = [row for row in rows if row["id"] == one.identity]
    assert len(parts) > 1
    for row in parts:
        start, end = len(row["prompt"]), len(row["prompt"]) + len(row["response"])
        assert one.input_ids[start:end].tolist() == row["response"]
        assert one.loss_mask[start:end].all()
        assert not one.loss_mask[start - 1]
    assert Artifact.open(run / "capture").counts["documents"] == len(documents)


def tiny_target_history(
    target: Target, rows: list[dict[str, Any]], talks: list[dict[str, Any]], row: dict[str, Any]
) -> list[dict[str, str]]:
    """What was said before a turn, from the texts."""
    said = [r for r in rows if r["id"] == row["id"]]
    asked = next(talk["turns"] for talk in talks if talk["id"] == row["id"])
    messages = []
    for turn in range(row["turn"] + 1):
        messages.append({"role": "user", "content": asked[turn]})
        if turn < row["turn"]:
            text = target.tokenizer.decode(said[turn]["response"], skip_special_tokens=True)
            messages.append({"role": "assistant", "content": text})
    return messages


class Letters:
    """As much of a target as a conversation needs: "ab" is one token, unless it was two."""

    words: ClassVar[dict[str, int]] = {"a": 1, "b": 2, "ab": 3, "?": 4, "$": 9}
    eos_ids, max_positions = (9,), 100

    @property
    def tokenizer(self) -> "Letters":
        return self

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [self.words[word] for word in re.findall("ab|.", text)]

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        text = "".join(word for i in ids for word, number in self.words.items() if number == i)
        return text.replace("$", "") if skip_special_tokens else text

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        return self.encode("".join(f"{message['content']}$" for message in messages))


def test_ids_as_generated_stay_in_the_history() -> None:
    """A text may be tokenised otherwise than it was generated: the ids of the answer are kept."""
    asked = []

    def answers(prompts: list[list[int]], seeds: list[int], _: Any) -> list[Answer]:
        asked.append(seeds[0])
        return [Answer([1, 2, 9], "stop")]  # "ab" in two tokens

    row = {"id": "a", "messages": [{"content": "?"}], "later": ["b?"], "prompt": [4, 9]}
    first, second = answer_all(
        Letters(), answers, [(row, 0)], seed=0, template={}, progress=lambda _: None
    )
    assert first["response"] == [1, 2, 9]
    assert second["prompt"] == [4, 9, 1, 2, 9, 2, 4, 9]
    assert asked[0] != asked[1]


def test_a_conversation_ends_where_it_cannot_go_on(tiny_target: Target) -> None:
    row = {"id": "a", "messages": TALK[:1], "later": ["x", "y"], "prompt": [1, 2]}
    cut = [Answer([5, 6], "length")]
    [line] = answer_all(
        tiny_target, lambda *_: cut, [(row, 0)], seed=0, template={}, progress=lambda _: None
    )
    assert line["unanswered"] == 2


@pytest.mark.parametrize("template", [tiny_language.CHAT_TEMPLATE, MARKED])
def test_given_answers_are_supervised_with_their_eos(
    tiny_target: Target, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    tokenizer, [eos] = tiny_target.tokenizer, tiny_target.eos_ids
    monkeypatch.setattr(tokenizer, "chat_template", template)
    turns = given_turns(tiny_target, TALK, {})
    assert len(turns) == 2
    for (prompt, answer), place in zip(turns, (1, 3), strict=True):
        content = tokenizer.encode(TALK[place]["content"], add_special_tokens=False)
        assert answer == [*content, eos]
        assert prompt == tiny_target.encode_chat(TALK[:place])


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (MARKED.replace("{{ m['content'] }}{% endgen", "{% endgen"), "mask all zeros"),
        ("{% generation %}x {% endgeneration %}<|im_end|> ", "mask all ones"),
        (MARKED.replace("== 'assistant'", "== 'user'"), "mask does not fit the turns"),
        (tiny_language.CHAT_TEMPLATE.replace("<|im_end|>", ","), "answer without EOS"),
        (
            "{% if messages | length > 1 %}of {% endif %}" + tiny_language.CHAT_TEMPLATE,
            "renders beginnings otherwise",
        ),
        (
            "{% generation %}of {% endgeneration %}" + tiny_language.CHAT_TEMPLATE,
            "mask all ones",
        ),
        (MARKED.replace("== 'assistant'", "!= 'system'"), "mask does not fit the turns"),
    ],
)
def test_masks_that_cannot_be_right_are_refused(
    tiny_target: Target, monkeypatch: pytest.MonkeyPatch, template: str, reason: str
) -> None:
    """Fault 34."""
    monkeypatch.setattr(tiny_target.tokenizer, "chat_template", template)
    with pytest.raises(UnusableError, match=reason):
        given_turns(tiny_target, TALK, {})


def test_learning_from_given_answers(tiny_run: Run, tiny_target: Target, tmp_path: Path) -> None:
    rows = [{"id": str(i), "messages": TALK[: 4 - 2 * (i % 2)]} for i in range(8)]
    rows.append({"id": "unanswered", "messages": TALK[:1]})
    rows.append({"id": "tool", "messages": [{"role": "tool", "content": "x"}, *TALK]})
    source = write(tmp_path / "talks.jsonl", *rows)
    given = ("rollout.turns=given", "prompts.calibration=0", "prompts.held_out=0")
    ended = tiny_run("stages=[rollout,capture]", source, *given)
    assert ended.status == 0, ended
    run = tmp_path / "run"
    counts = Artifact.open(run / "rollout").counts
    assert counts["dropped"] == {"bad role": 1, "duplicate": 6, "no answer": 1}
    assert counts["finish_reasons"] == {"given": 3}
    documents = RolloutDocuments(Artifact.open(run / "rollout"), max_length=4096)
    whole, single = documents.document(0), documents.document(1)
    answers = [turn["content"].split() for turn in TALK[1::2]]
    assert documents.labels.tolist() == [sum(len(a) + 1 for a in answers), len(answers[0]) + 1]
    said = tiny_target.tokenizer.decode(whole.input_ids[whole.loss_mask])
    assert said == "of course <|im_end|> no problem , i will <|im_end|>"
    assert torch.equal(whole.input_ids[: len(single.input_ids)], single.input_ids)
    assert tiny_run("stages=[rollout]", source, *given, "rollout.samples_per_prompt=2").status == 1


def test_roles_the_template_refuses_are_counted(
    tiny_run: Run, tiny_target_folder: Path, tmp_path: Path
) -> None:
    """Fault 44: one row that the template refuses does not end the run."""
    target = Target.load(str(tiny_target_folder), dtype="float32", pack=False)
    refuse = "{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    target.tokenizer.chat_template = MARKED.replace("messages %}", "messages %}" + refuse, 1)
    folder = tmp_path / "strict"
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    system = {"role": "system", "content": "please"}
    rows = [{"messages": m} for m in tiny_language.prompts(6)]
    source = write(tmp_path / "p.jsonl", {"messages": [system, *TALK[:1]]}, *rows)
    given = (f"target.name={folder}", "prompts.calibration=0", "prompts.held_out=0")
    ended = tiny_run("stages=[rollout]", source, *given)
    assert ended.status == 0, ended
    assert "1 refused by the template" in ended.out
    source = write(tmp_path / "q.jsonl", {"messages": [system, *TALK[:1]]})
    refused(tiny_run("stages=[rollout]", source, *given), "the template says: ", "no system")


def test_loops_are_noticed() -> None:
    text = list(range(100))
    assert loop_length(text) == 0
    assert loop_length(text + [7] * 40) == 40
    assert loop_length(text + [7, 8, 9] * 20) == 60
    assert loop_length(text + [7] * 31) == 0  # less than 32
    assert loop_length(text + list(range(30)) * 3) == 0  # three rounds may be a list
    assert loop_length(text + list(range(30)) * 4) == 120
    assert loop_length([1, 2] * 30 + [3]) == 0  # it got out
    assert is_degenerate(text + [7] * 40 + [2], eos_ids=[2])
    assert not is_degenerate([], eos_ids=[2])


def test_loops_are_reported_and_dropped_by_switch(tmp_path: Path) -> None:
    row = {"id": "a", "sample": 0, "prompt": [1], "response": [5, 6], "finish_reason": "stop"}
    rows = [row, {**row, "id": "b", "degenerate": True}, {**row, "id": "c", "origin": "differs"}]
    rollout = rollout_of(tmp_path, *rows)
    assert RolloutDocuments(rollout, max_length=9).dropped == {"no_round_trip": 1}
    documents = RolloutDocuments(rollout, max_length=9, drop_degenerate=True)
    assert documents.dropped == {"no_round_trip": 1, "degenerate": 1}
    assert documents.identities == ["a"]
    assert documents.read == documents.kept + 2


def test_turns_of_a_template_that_rewrites_history_are_documents_of_their_own(
    tmp_path: Path,
) -> None:
    first = {"id": "a", "sample": 0, "turn": 0, "prompt": [1, 2], "response": [3, 4, 9]}
    kept = {**first, "turn": 1, "prompt": [1, 2, 3, 4, 9, 5], "response": [6, 9]}
    rewritten = {**first, "turn": 1, "prompt": [1, 2, 4, 9, 5], "response": [6, 9]}
    other = {**first, "sample": 1}
    short = {**kept, "response": [6]}
    for rows, lengths, labels in (
        ((first, kept), [8], [5]),
        ((first, rewritten), [5, 7], [3, 2]),
        ((first, other), [5, 5], [3, 3]),
        ((first, short, {**kept, "turn": 2}), [5, 8], [3, 2]),
    ):
        reasons = [{**row, "finish_reason": "stop"} for row in rows]
        documents = RolloutDocuments(rollout_of(tmp_path, *reasons), max_length=99)
        assert documents.lengths.tolist() == lengths
        assert documents.labels.tolist() == labels
        assert [int(documents.document(n).loss_mask.sum()) for n in range(len(lengths))] == labels
