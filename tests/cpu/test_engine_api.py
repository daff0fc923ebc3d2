"""What users call: texts in and out, streams, embeddings, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from engines import assert_idle, engine_for, naive_outputs, prompts_of, tiny
from tiny_models import save_model
from tiny_tokenizers import byte_level_metadata

import ridgeline
from ridgeline.data import Tokenizer
from ridgeline.engine import Delta, Engine, Output, Sampling, reference_generate
from ridgeline.engine.loading.draft_loading import Draft
from ridgeline.engine.loading.load_plan import planned
from ridgeline.engine.naive import OneSequence
from ridgeline.errors import (
    ContextLengthError,
    OutOfMemoryError,
    RequestError,
    UnsupportedError,
    UsageError,
)
from ridgeline.models import Transformer, build_model, fill_random
from ridgeline.recipe import KV, Limits, Recipe, with_auto

TEXTS = ["The sky", "a value of", "Import statements are"]


@cache
def writer() -> tuple[Transformer, Tokenizer]:
    """A random model that speaks a real vocabulary."""
    tokenizer = Tokenizer.from_gguf(byte_level_metadata("smollm"))
    config = replace(tiny("llama-mha").config, vocab_size=tokenizer.vocab_size)
    return fill_random(build_model(config, torch.float32, "cpu"), seed=4), tokenizer


def text_engine(**changes: object) -> Engine:
    model, tokenizer = writer()
    engine = engine_for(model, **changes)  # type: ignore[arg-type]
    engine.tokenizer = tokenizer
    return engine


def test_texts_are_the_plain_loops() -> None:
    model, tokenizer = writer()
    sampling = Sampling(temperature=0.9, seed=8, max_tokens=40)
    for text, output in zip(TEXTS, text_engine().generate(TEXTS, sampling), strict=True):
        expected = reference_generate(model, tokenizer, text, sampling)
        assert output.text == expected.text
        assert output.tokens == expected.tokens
        assert output.finish_reason == expected.finish_reason
        assert output.num_prompt_tokens == expected.num_prompt_tokens
        assert output.first_token_s is not None
        assert 0 < output.first_token_s <= output.total_s


@pytest.mark.parametrize("overlap", [True, False])
def test_stop_strings_end_where_the_plain_loop_does(overlap: bool) -> None:
    model, tokenizer = writer()
    free = [
        reference_generate(model, tokenizer, text, Sampling(max_tokens=40)).text for text in TEXTS
    ]
    stops = [text[len(text) // 2 :][:3] for text in free]
    samplings = [Sampling(max_tokens=40, stop=(stop,)) for stop in stops]
    engine = text_engine(overlap=overlap)
    for text, sampling, output in zip(
        TEXTS, samplings, engine.generate(TEXTS, samplings), strict=True
    ):
        expected = reference_generate(model, tokenizer, text, sampling)
        assert expected.finish_reason == "stop"
        assert (output.text, output.tokens) == (expected.text, expected.tokens)
        assert output.finish_reason == "stop"
    assert_idle(engine)


def test_one_output_may_stop_while_others_go_on() -> None:
    engine = text_engine()
    sampling = Sampling(temperature=1.0, seed=2, n=3, max_tokens=30)
    (free,) = engine.generate(TEXTS[0], sampling)
    stop = free.completions[1].text[10:13]
    (output,) = engine.generate(TEXTS[0], replace(sampling, stop=(stop,)))
    assert output.completions[1].finish_reason == "stop"
    assert stop not in output.completions[1].text
    assert output.completions[1].text == free.completions[1].text.split(stop)[0]
    for found, right in zip(output.completions, free.completions, strict=True):
        assert right.text.startswith(found.text)


def test_a_stream_is_the_text_in_pieces() -> None:
    engine = text_engine()
    sampling = Sampling(max_tokens=20, logprobs=1)
    (whole,) = engine.generate(TEXTS[:1], sampling)
    deltas = list(engine.stream(TEXTS[0], sampling))
    assert "".join(delta.text for delta in deltas) == whole.text
    assert tuple(token for delta in deltas for token in delta.tokens) == whole.tokens
    assert [len(delta.logprobs) for delta in deltas] == [1] * 20
    assert [delta.finish_reason for delta in deltas] == [None] * 19 + ["length"]


def test_a_stream_that_is_left_frees_everything() -> None:
    engine = text_engine()
    for delta in engine.stream(TEXTS[0], Sampling(max_tokens=50)):
        assert delta.tokens
        break
    assert_idle(engine)


def test_a_request_cancelled_under_a_stream_is_an_error() -> None:
    engine = text_engine()
    stream = engine.stream(TEXTS[0], Sampling(max_tokens=50))
    first = next(stream)
    engine.cancel(first.request_id)
    with pytest.raises(RequestError, match="cancelled"):
        list(stream)


def test_requests_by_hand() -> None:
    engine = text_engine()
    request_id = engine.add(TEXTS[1], Sampling(max_tokens=6))
    other = engine.generate(TEXTS[0], Sampling(max_tokens=3))  # takes nothing of the first one's
    events = []
    while engine.has_work:
        events += engine.step()
    assert {event.request_id for event in events} == {request_id}
    deltas = [event for event in events if isinstance(event, Delta)]
    (output,) = [event for event in events if isinstance(event, Output)]
    assert "".join(delta.text for delta in deltas) == output.text
    assert isinstance(events[-1], Output)
    assert len(other[0].tokens) == 3


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("num_pages", [64, 10])
def test_embeddings_are_the_models_hidden_states(pooling: str, num_pages: int) -> None:
    model, prompts = tiny("qwen2"), prompts_of([3, 40, 17, 60, 50])
    engine = engine_for(model, budget=16, num_pages=num_pages)
    found = engine.embed(prompts, pooling=pooling)  # type: ignore[arg-type]
    for prompt, embedding in zip(prompts, found, strict=True):
        cache = OneSequence(model, len(prompt))
        cache.begin(len(prompt), len(prompt))
        with torch.inference_mode():
            states = model(torch.tensor(prompt), cache)
        state = states[-1] if pooling == "last" else states.mean(0)
        torch.testing.assert_close(embedding, state / state.norm(), atol=1e-4, rtol=1e-4)
    assert_idle(engine)


def test_a_model_is_loaded_by_its_path(tmp_path: Path) -> None:
    """And obeys the recipe that lies beside it."""
    save_model("llama-mha", tmp_path)
    for name, content in Tokenizer.from_gguf(byte_level_metadata("smollm")).files().items():
        (tmp_path / name).write_bytes(content)
    limits = Limits(max_batch=4, token_budget=32)
    Recipe(dtype="fp32", kv=KV(page_size=32), limits=limits).save(tmp_path)
    engine = ridgeline.Engine(tmp_path, device="cpu", num_pages=40)
    assert engine.recipe.kv.page_size == 32
    (prompt,) = prompts_of([20])
    (output,) = engine.generate([prompt], Sampling(max_tokens=5, ignore_eos=True))
    assert [output.tokens] == naive_outputs(engine.model, prompt, Sampling(max_tokens=5))


def test_what_does_not_fit_is_refused_before_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model("llama-mha", tmp_path)
    monkeypatch.setattr(
        "ridgeline.engine.loading.sources.available_memory", lambda device: 20 << 20
    )
    monkeypatch.setattr("ridgeline.engine.loading.sources.load_model", None)  # must not be reached
    with pytest.raises(OutOfMemoryError, match=r"needs .* may be used of") as raised:
        Engine(tmp_path, Recipe(dtype="fp32"), device="cpu")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(scheme="int8", deterministic=True),
    ],
)
def test_what_the_engine_cannot_do_yet_is_refused(recipe: Recipe) -> None:
    with pytest.raises(UnsupportedError, match="does not do yet"):
        Engine(tiny("llama-mha"), recipe)


def test_wrong_prompts_are_errors_before_anything_runs() -> None:
    engine = engine_for(tiny("llama-mha"))
    with pytest.raises(UsageError, match="no tokenizer"):
        engine.generate([[5, 6], "text"])
    with pytest.raises(UsageError, match="empty"):
        engine.generate([[]])
    with pytest.raises(UsageError, match="token id 131"):
        engine.generate([[5, 131]])
    with pytest.raises(ContextLengthError, match="leaves no room"):
        engine.generate([[5] * 128])
    with pytest.raises(UsageError, match="2 samplings for 1 prompts"):
        engine.generate([[5]], [Sampling(), Sampling()])
    with pytest.raises(UsageError, match="stop strings need a tokenizer"):
        engine.generate([[5]], Sampling(stop=("x",)))
    assert not engine.has_work


def test_no_way_in_takes_tokens_that_the_model_lacks() -> None:
    """On a GPU one such id would end the process."""
    engine = engine_for(tiny("llama-mha"))
    ways: list[Callable[[list[int]], object]] = [
        engine.add,
        engine.embed,
        engine.generate,
        lambda prompt: list(engine.stream(prompt)),
    ]
    for way in ways:
        for wrong in (131, -1):
            with pytest.raises(UsageError, match=f"token id {wrong} of the prompt"):
                way([5, wrong])
    assert not engine.has_work


def test_ends_that_the_model_lacks_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer may have more tokens than the model; what they end is ruled out by their id."""
    model, tokenizer = writer()
    known = tokenizer.eos_ids
    monkeypatch.setattr(tokenizer, "eos_ids", (*known, model.config.vocab_size + 3))
    engine = text_engine()
    sampling = Sampling(max_tokens=6, min_tokens=4)
    assert engine.job("The sky", sampling).stop_ids == set(known)
    (output,) = engine.generate("The sky", sampling)
    assert output.status == "finished", output.reason
    assert output.tokens == reference_generate(model, tokenizer, "The sky", sampling).tokens


@pytest.mark.parametrize("head_dim", [257, 320])
def test_heads_that_a_gpu_cannot_take_are_refused_before_loading(head_dim: int) -> None:
    config = replace(tiny("llama-mha").config, head_dim=head_dim)
    recipe = with_auto(Recipe(), config, torch.bfloat16, "cuda:0")
    with pytest.raises(UnsupportedError, match=f"heads of {head_dim} dims.* 2 to 256") as raised:
        planned(config, Recipe(), recipe, "cuda:0", 80 << 30)
    assert "\n" not in str(raised.value)
    small = Draft("small", Path("small"), config)
    with pytest.raises(UnsupportedError, match=f"heads of {head_dim} dims"):
        planned(tiny("llama-mha").config, Recipe(), recipe, "cuda:0", 80 << 30, small)
    on_cpu = with_auto(Recipe(), config, torch.bfloat16, "cpu")
    assert planned(config, Recipe(), on_cpu, "cpu", 80 << 30)[1].fits


def test_a_prompt_beyond_max_context_names_the_setting() -> None:
    model = tiny("llama-mha")
    limits = Limits(max_context=32, max_batch=2, token_budget=32)
    engine = Engine(model, Recipe(kv=KV(page_size=16), limits=limits), num_pages=8)
    with pytest.raises(ContextLengthError, match="max_context is 32"):
        engine.generate([[5] * 40])


def test_a_request_that_can_never_run_is_refused_in_words() -> None:
    engine = engine_for(tiny("llama-mha"), num_pages=3)
    outputs = engine.generate(prompts_of([100, 10]), Sampling(max_tokens=4))
    assert [output.status for output in outputs] == ["refused", "finished"]
    assert "pages" in outputs[0].reason


def test_a_draw_is_repeated_by_its_seed() -> None:
    engine, (prompt,) = engine_for(tiny("llama-mha")), prompts_of([9])
    (first,) = engine.generate([prompt], Sampling(temperature=1.0, max_tokens=12))
    (again,) = engine.generate([prompt], Sampling(temperature=1.0, max_tokens=12, seed=first.seed))
    assert again.tokens == first.tokens


def test_the_recipes_dtype_must_be_the_models() -> None:
    with pytest.raises(UsageError, match="bf16"):
        Engine(tiny("llama-mha"), Recipe(dtype="bf16"))


MESSAGES = [{"role": "user", "content": "Why is the sky blue?"}]
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ note }}"


def test_chat_is_the_template_and_then_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = text_engine()
    tokenizer = writer()[1]
    monkeypatch.setattr(tokenizer, "template_for", lambda *, has_tools: TEMPLATE)
    sampling = Sampling(max_tokens=9)
    prompt = tokenizer.encode("user: Why is the sky blue?\n", add_special_tokens=False)
    (expected,) = engine.generate([prompt], sampling)
    (output,) = engine.chat(MESSAGES, sampling)
    assert output.tokens == expected.tokens
    assert [each.tokens for each in engine.chat([MESSAGES, MESSAGES], sampling)] == [
        expected.tokens
    ] * 2
    assert "".join(map(str, engine.stream_chat(MESSAGES, sampling))) == str(output) == output.text
    noted = engine.chat(MESSAGES, sampling, template_variables={"note": "short"})
    assert noted[0].num_prompt_tokens > output.num_prompt_tokens
    for wrong in ([], "Why?", MESSAGES[0]):
        with pytest.raises(UsageError, match="role"):
            engine.chat(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "options", "answer"),
    [
        (Sampling, {"max_token": 5}, "Sampling has no option 'max_token'; did you mean 'max_toke"),
        (Recipe, {"dtypes": "fp32"}, "did you mean 'dtype'"),
        (Recipe, {"page_size": 32}, "it belongs to KV: KV(page_size=...)"),
        (KV, {"pagesize": 32}, "did you mean 'page_size'"),
        (Limits, {"width": 3}, "Limits has no option 'width'; it has max_context, "),
        (Engine, {"divice": "cpu"}, "Engine has no option 'divice'; did you mean 'device'"),
        (Engine, {"max_context": 9}, "it belongs to Limits"),
        (Engine.supervised, {"dtype": "fp32"}, "it belongs to Recipe"),
        (Engine.generate, {"max_tokens": 3}, "it belongs to Sampling: Sampling(max_tokens=...)"),
    ],
)
def test_a_wrong_keyword_is_answered_with_the_near_one(
    call: Callable[..., object], options: dict[str, object], answer: str
) -> None:
    with pytest.raises(TypeError, match=re.escape(answer)) as raised:
        call(**options)
    assert isinstance(raised.value, UsageError)


def test_outputs_print_their_text() -> None:
    (output,) = text_engine().generate("The sky", Sampling(max_tokens=6))
    assert str(output) == str(output.completions[0]) == output.text
    assert "tokens=" in repr(output)
    (both,) = text_engine().generate("The sky", Sampling(max_tokens=6, n=2, temperature=1.0))
    assert str(both) == "\n".join(
        f"[{number}] {each.text}" for number, each in enumerate(both.completions)
    )
    assert str(replace(output, status="failed", reason="lost")).endswith("[failed: lost]")


def test_progress_is_told() -> None:
    told: list[tuple[str, int, int]] = []
    engine, short = text_engine(), Sampling(max_tokens=2)
    engine.generate(["a", "b"], short, progress=lambda *each: told.append(each))
    assert told == [("requests", 1, 2), ("requests", 2, 2)]
    engine.generate("a", short, progress=True)  # no terminal: nothing is drawn
