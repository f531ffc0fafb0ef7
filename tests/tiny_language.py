"""A small synthetic language, and a tiny target that is trained to speak it.

An answer follows from its request except at four places, where one of two phrases of two words is
chosen by a fair coin ("of course" or "no problem"). A drafter that guesses all slots at once mixes
the phrases there ("of problem"); one that sees its own previous token does not.
"""

import random
import sys
from itertools import pairwise

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

OPENINGS = (("of", "course"), ("no", "problem"))
TIMES = (("right", "away"), ("very", "soon"))
MANNERS = (("like", "new"), ("as", "before"))
CLOSINGS = (("thank", "you"), ("good", "bye"))
CHOICES = (OPENINGS, TIMES, MANNERS, CLOSINGS)

VERBS = ("clean", "paint", "mend", "open", "close", "wash", "move", "count", "find", "bring")
ADJECTIVES = ("red", "blue", "green", "old", "small", "big", "round", "tall", "dark", "light")
NOUNS = ("door", "chair", "table", "lamp", "box", "cup", "book", "clock", "window", "shelf")
NOUNS += ("garden", "gate", "wall", "roof", "boat", "cart", "bell", "drum", "coat", "shoe")
FILLERS = ("please", "the", "i", "will", ",", ".", "then", "is", "and", "user", "assistant")

SPECIAL = ("<pad>", "<|im_start|>", "<|im_end|>", "<mask>", "<unk>")
PHRASE_WORDS = tuple(word for choice in CHOICES for phrase in choice for word in phrase)
VOCABULARY = (*SPECIAL, *FILLERS, *PHRASE_WORDS, *VERBS, *ADJECTIVES, *NOUNS)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|> {{ message['role'] }} {{ message['content'] }} "
    "<|im_end|> {% endfor %}{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)

Messages = list[dict[str, str]]


def request(rng: random.Random) -> str:
    """What a user may say: 2000 different requests."""
    return f"please {rng.choice(VERBS)} the {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"


def answer(question: str, rng: random.Random) -> str:
    """One of the 16 equally likely answers to a request."""
    _, verb, _, adjective, noun = question.split()
    opening, time, manner, closing = (" ".join(rng.choice(choice)) for choice in CHOICES)
    return (
        f"{opening} , i will {verb} the {adjective} {noun} {time} . "
        f"then the {noun} is {manner} and {adjective} . {closing} ."
    )


def prompts(count: int, seed: int = 0) -> list[Messages]:
    """Conversations which wait for an answer."""
    rng = random.Random(seed)
    return [[{"role": "user", "content": request(rng)}] for _ in range(count)]


def mixed_phrases(words: list[str]) -> int:
    """How often a first word of a phrase is followed by the second word of its rival."""
    rivals = {(a[0], b[1]) for choice in CHOICES for a, b in (choice, choice[::-1])}
    return sum(pair in rivals for pair in pairwise(words))


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, with a chat template; `<|im_end|>` ends an answer."""
    vocabulary = {word: i for i, word in enumerate(VOCABULARY)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        mask_token="<mask>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, num_layers: int = 6) -> LlamaForCausalLM:
    """An untrained target of this language, float32."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128,  # more than the tokenizer has, as in many real targets
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=num_layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            initializer_range=0.1,  # with less, copying the noun is learnt much later
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int = 300) -> float:
    """Train on fresh conversations; returns the last loss per answer token."""
    rng = random.Random(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    model.train()
    for _ in range(steps):
        rows = []
        for _ in range(16):
            question = request(rng)
            turns = [("user", question), ("assistant", answer(question, rng))]
            messages = [{"role": role, "content": content} for role, content in turns]
            rows.append(tokenizer.apply_chat_template(messages, return_dict=False))
        ids = torch.tensor(rows)
        labels = ids.clone()
        labels[:, :10] = -100  # the request is random
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.eval()
    return loss.item()


if __name__ == "__main__":
    folder = sys.argv[1]
    made = build_tokenizer()
    trained = build_model(made)
    train(trained, made)
    trained.save_pretrained(folder)
    made.save_pretrained(folder)
