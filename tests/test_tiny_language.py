"""The tiny language does what the end-to-end tests need of it."""

import random

import torch

from dspark_train.target import Target
from tests import tiny_language


def answers(target: Target, count: int, **sampling: object) -> list[tuple[str, str]]:
    prompts = tiny_language.prompts(count, seed=99)
    ids = torch.tensor([target.encode_chat(messages) for messages in prompts])
    torch.manual_seed(0)
    generated = target.model.generate(ids, max_new_tokens=40, **sampling)[:, ids.shape[1] :]
    texts = [target.tokenizer.decode(row).split(" <|im_end|>")[0] for row in generated]
    questions = [messages[0]["content"] for messages in prompts]
    return list(zip(questions, texts, strict=True))


def possible_answers(question: str) -> set[str]:
    return {tiny_language.answer(question, random.Random(i)) for i in range(200)}


def test_trained_target_answers_unseen_requests(tiny_target: Target) -> None:
    asked = answers(tiny_target, 40, do_sample=True, top_k=0)
    right = sum(text in possible_answers(question) for question, text in asked)
    assert right >= 36, asked
    assert tiny_language.mixed_phrases([w for _, text in asked for w in text.split()]) == 0


def test_both_alternatives_of_a_choice_are_likely(tiny_target: Target) -> None:
    openings = [text.split()[0] for _, text in answers(tiny_target, 100, do_sample=True, top_k=0)]
    assert 25 <= openings.count("of") <= 75
    assert openings.count("of") + openings.count("no") >= 98


def test_mixed_phrases_are_counted() -> None:
    assert len(possible_answers("please clean the red door")) == 16
    assert tiny_language.mixed_phrases(["of", "course", ",", "very", "soon"]) == 0
    assert tiny_language.mixed_phrases(["no", "course", ",", "very", "away"]) == 2
