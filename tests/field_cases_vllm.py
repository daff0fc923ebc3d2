"""Cases for fields that clients of vLLM send: forms of the output in its words, ids of tokens, and
how a prompt begins and ends. See tests/cpu/test_every_field.py.
"""

from __future__ import annotations

from field_audit import BASES, OPENAI, TEXT, Api, case


@case(OPENAI, "guided_json", "guided_regex", "guided_choice", "guided_grammar")
@case(OPENAI, "structured_outputs")
@case(("StructuredOutputs",), "json", "regex", "choice", "grammar", "json_object")
@case(("StructuredOutputs",), "disable_fallback")
def _(api: Api, owner: str) -> None:
    forms = {"json": {"const": 5}, "regex": "5", "choice": ["5"], "grammar": 'root ::= "5"'}
    for route in OPENAI if owner == "StructuredOutputs" else (owner,):
        for name, form in forms.items():
            assert api.ask(route, **{f"guided_{name}": form}).text == "5"
            options = {name: form, "disable_fallback": True}
            assert api.ask(route, structured_outputs=options).text == "5"
        text = api.ask(route, structured_outputs={"json_object": True}).text
        assert text.lstrip().startswith("{")


@case(TEXT, "skip_special_tokens")
def _(api: Api, owner: str) -> None:
    special = {"logit_bias": {"1": 100}}
    assert api.ask(owner, **special).num_output == 8
    shown = api.ask(owner, **special, skip_special_tokens=False)
    assert shown.text == "<|im_start|>" * 8
    assert "im_start" not in api.ask(owner, **special).response.text


@case(("chat",), "add_generation_prompt", "continue_final_message")
def _(api: Api) -> None:
    messages = [*BASES["chat"]["messages"], {"role": "assistant", "content": "it is"}]
    plain = api.in_chat(*messages)
    bare = api.in_chat(*messages, add_generation_prompt=False)
    assert bare.num_prompt < plain.num_prompt
    on = {"continue_final_message": True, "add_generation_prompt": False}
    assert api.in_chat(*messages, **on).num_prompt < bare.num_prompt


@case(("completions",), "add_special_tokens")
def _(api: Api, owner: str) -> None:
    plain = api.ask(owner).num_prompt
    assert api.ask(owner, add_special_tokens=False).num_prompt == plain - 1


@case(("chat", "completions"), "return_token_ids")
def _(api: Api, owner: str) -> None:
    answer = api.ask(owner, return_token_ids=True, logit_bias={"70": 100})
    holder = answer.json if owner == "chat" else answer.choices[0]
    assert len(holder["prompt_token_ids"]) == answer.num_prompt
    assert answer.choices[0]["token_ids"] == [70] * 8
    assert "token_ids" not in api.ask(owner).response.text


@case(("StreamOptions",), "continuous_usage_stats")
def _(api: Api) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for route in ("chat", "completions"):
        events = api.ask(route, stream=True, stream_options=options).events
        counts = [event["usage"]["completion_tokens"] for event in events]
        assert counts == sorted(counts)
        assert counts[-1] == 8
