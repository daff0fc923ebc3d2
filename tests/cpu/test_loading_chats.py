"""Loss on the assistant's tokens alone: for several templates the kept tokens, decoded, are what
the assistant says and the token that ends its turn, and nothing else.
"""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_chat_template import CHATML, GEMMA, LLAMA3, MISTRAL, PHI3, QWEN3
from tiny_tokenizers import byte_level_json, demo, sentencepiece_metadata
from transformers import PreTrainedTokenizerFast

from ridgeline.data import Tokenizer, chat_template
from ridgeline.data.loading import read_tokens
from ridgeline.data.loading.conversations import learned_spans, learned_tokens
from ridgeline.data.vocabulary import Vocabulary
from ridgeline.errors import UsageError

TAGS = (
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
    "<|end|>",
)
# As DeepSeek's: the prompt opens a thought, and of earlier answers the thought is dropped.
OPENING = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{ '<|user|>' + message.content }}
    {%- else %}{{ '<|assistant|>' + message.content.split('</think>')[-1] + eos_token }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|><think>\n' }}{% endif %}
"""
# No token ends a turn: words alone.
PLAIN = """\
{%- for message in messages %}
    {{- ('Q: ' if message.role == 'user' else 'A: ') + message.content + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'A:' }}{% endif %}
"""
# The whole history is written differently once it is history.
REWRITING = """\
{%- for message in messages %}
    {{- ('* ' if loop.last else '- ') + message.role + ': ' + message.content + '<|end|>' }}
{%- endfor %}
"""
MARKED = """\
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|assistant|>' }}
        {%- generation %}{{ message.content | trim + '<|end|>' }}{% endgeneration %}
    {%- else %}
        {{- '<|user|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
"""
CHAT = [
    {"role": "user", "content": "What is 2 + 2? été 日本"},
    {"role": "assistant", "content": "Four, ünd 日本 👩‍👧."},
    {"role": "user", "content": "And then?\n"},
    {"role": "assistant", "content": "Nothing\n\nmore"},
]
ANSWERS = ["Four, ünd 日本 👩‍👧.", "Nothing\n\nmore"]


def tokenizer_with(template: str) -> Tokenizer:
    backend = byte_level_json()
    backend.add_special_tokens(list(TAGS))
    ends = ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>")
    return Tokenizer(
        Vocabulary(
            backend,
            vocab_size=backend.get_vocab_size(),
            bos_id=1,
            eos_ids=tuple(backend.token_to_id(text) for text in ends),
            prefix_ids=(),
            suffix_ids=(),
            special_texts={"bos_token": "<|im_start|>", "eos_token": "<|endoftext|>"},
            chat_templates={"default": template},
        )
    )


def kept_texts(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> list[str]:
    """Runs of tokens that are learned, decoded."""
    conversation = learned_spans(tokenizer, messages)
    ((ids, offsets),) = tokenizer.encode_with_offsets([conversation.text])
    written = tokenizer.decode(ids, skip_special_tokens=False)
    # sentencepiece puts a space before words that follow a special token
    assert written.replace("> ", ">") == conversation.text.replace("> ", ">")
    learned = learned_tokens(conversation, ids, offsets, tokenizer.eos_ids)
    texts, run = [], []
    for token, is_learned in zip([*ids, 0], [*learned.tolist(), False], strict=True):
        if is_learned:
            run.append(token)
        elif run:
            texts.append(tokenizer.decode(run, skip_special_tokens=False))
            run = []
    return texts


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, "{}<|im_end|>"),
        (LLAMA3, "{}<|eot_id|>"),
        (GEMMA, "{}<end_of_turn>"),
        (MISTRAL, " {}<|endoftext|>"),
        (PHI3, "{}<|end|>"),
        (QWEN3, "{}<|im_end|>"),
        (OPENING, "{}<|endoftext|>"),
        (MARKED, "{}<|end|>"),
        (PLAIN, " {}\n"),
    ],
    ids=["chatml", "llama3", "gemma", "mistral", "phi3", "qwen3", "opening", "marked", "plain"],
)
def test_the_kept_tokens_are_the_assistant_s(template: str, expected: str) -> None:
    texts = kept_texts(tokenizer_with(template), CHAT)
    assert texts == [expected.format(answer) for answer in ANSWERS]


def test_thoughts_of_the_last_answer_are_learned_and_earlier_ones_are_gone() -> None:
    thinking = [
        CHAT[0],
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nFour."},
        CHAT[2],
        {"role": "assistant", "content": "<think>\nso\n</think>\n\nNo."},
    ]
    texts = kept_texts(tokenizer_with(QWEN3), thinking)
    assert texts == ["Four.<|im_end|>", "<think>\nso\n</think>\nNo.<|im_end|>"]


def test_an_empty_answer_is_its_end() -> None:
    messages = [CHAT[0], {"role": "assistant", "content": ""}]
    assert kept_texts(tokenizer_with(CHATML), messages) == ["<|im_end|>"]


def test_two_answers_in_a_row() -> None:
    messages = [
        CHAT[0],
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]
    assert kept_texts(tokenizer_with(CHATML), messages) == ["a<|im_end|>", "b<|im_end|>"]


def test_tool_calls_are_learned_and_results_are_not() -> None:
    template = CHATML.replace(
        "message['content']", "(message['content'] or message.calls | tojson)"
    )
    messages = [
        {"role": "user", "content": "warm?"},
        {"role": "assistant", "content": "", "calls": [{"name": "temperature"}]},
        {"role": "tool", "content": "20"},
        {"role": "assistant", "content": "Yes."},
    ]
    texts = kept_texts(tokenizer_with(template), messages)
    assert texts == ['[{"name": "temperature"}]<|im_end|>', "Yes.<|im_end|>"]


def test_a_sentencepiece_vocabulary() -> None:
    metadata = sentencepiece_metadata(**{"tokenizer.chat_template": GEMMA_ENDS})
    messages = [CHAT[0], {"role": "assistant", "content": "Four."}]
    assert kept_texts(Tokenizer.from_gguf(metadata), messages) == ["Four.<end_of_turn>"]


GEMMA_ENDS = """\
{%- for message in messages %}
    {{- message.role + ':\n' + message.content + '<end_of_turn>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'assistant:\n' }}{% endif %}
"""


def test_the_demo_s_own_template() -> None:
    texts = kept_texts(demo(), [{"role": "system", "content": "Be brief."}, *CHAT])
    assert texts == [f"{answer}<|im_end|>" for answer in ANSWERS]


def test_marks_are_those_of_transformers() -> None:
    tokenizer = tokenizer_with(MARKED)
    backend = byte_level_json()
    backend.add_special_tokens(list(TAGS))
    peer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
    expected = peer.apply_chat_template(
        CHAT, chat_template=MARKED, return_dict=True, return_assistant_tokens_mask=True
    )
    conversation = learned_spans(tokenizer, CHAT)
    ((ids, offsets),) = tokenizer.encode_with_offsets([conversation.text])
    assert ids == expected["input_ids"]
    learned = learned_tokens(conversation, ids, offsets, tokenizer.eos_ids)
    assert learned.astype(int).tolist() == expected["assistant_masks"]


def test_a_template_that_rewrites_history_is_refused() -> None:
    with pytest.raises(UsageError, match=r"cannot tell the assistant's words.*generation"):
        learned_spans(tokenizer_with(REWRITING), CHAT)


def test_words_that_a_template_refuses_are_quarantined(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [{"messages": CHAT}, {"messages": CHAT[2:3] + CHAT[2:]}, {"messages": CHAT[:2]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = read_tokens([path], tokenizer_with(GEMMA))
    assert data.store.num_documents == 2
    ((origin, reason),) = data.quarantine.rows
    assert origin.line == 2
    assert "roles must alternate" in reason


def test_tokens_do_not_depend_on_the_day(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    dated = "{{ strftime_now('%d %B %Y') }}\n" + CHATML
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": CHAT}))
    digests = set()
    for day in (1, 2):

        class Clock(datetime):
            @classmethod
            def now(cls, tz: Any = None) -> datetime:
                return datetime(2026, 1, day)  # noqa: B023

        monkeypatch.setattr(chat_template, "datetime", Clock)
        tokenizer = tokenizer_with(dated)
        assert f"0{day} January" in tokenizer.chat_text(CHAT)
        digests.add(read_tokens([path], tokenizer).store.digest)
    assert len(digests) == 1


def test_marks_in_a_message_are_refused() -> None:
    messages = [{"role": "user", "content": "a\ufdd0b"}, CHAT[1]]
    with pytest.raises(UsageError, match="message 1 has the special token"):
        learned_spans(tokenizer_with(MARKED), messages)


def test_targets_of_a_conversation(tmp_path: Path) -> None:
    """Through the whole chain: what a batch's targets spell."""
    from ridgeline.data.loading import IGNORED, split_data

    tokenizer = tokenizer_with(LLAMA3)
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"messages": CHAT}) + "\n" for _ in range(3)))
    store = read_tokens([path], tokenizer).store
    data = split_data(store, sequence_length=300, vocab_size=tokenizer.vocab_size)
    batch = data.train.batch(np.arange(data.train.num_windows))
    kept = batch.targets[batch.targets != IGNORED].tolist()
    text = tokenizer.decode(kept, skip_special_tokens=False)
    assert text == 3 * "".join(f"{answer}<|eot_id|>" for answer in ANSWERS)
