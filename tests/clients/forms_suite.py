"""Answers in a form with the official OpenAI client: schemas, pydantic models, any JSON, streams, cut answers, refusals.

    python forms_suite.py --url http://127.0.0.1:8000 --prompt "12 + 30"

It asks nothing of what the models say, only that answers follow their schemas.
"""

import json
import sys
from enum import Enum
from typing import Literal, Optional

import openai
from pydantic import BaseModel, Field, TypeAdapter

from checks import Place, check, main, raises


class Kind(Enum):
    SUM = "sum"
    PRODUCT = "product"


class Step(BaseModel):
    text: str = Field(max_length=6)
    right: bool


class Answer(BaseModel):
    """What is asked, taken apart."""

    kind: Kind
    first: int = Field(ge=0, le=99)
    steps: list[Step] = Field(min_length=1, max_length=2)
    note: Optional[Literal["easy", "hard"]]


class Suite:
    def __init__(self, place: Place):
        self.place = place
        self.names = place.names()
        self.client = openai.OpenAI(base_url=place.base_url, api_key="none", max_retries=0, timeout=60)

    def fields(self, extra):
        fields = {"model": self.names[0], "temperature": 0, "seed": 1, "max_tokens": 250}
        fields["messages"] = [{"role": "user", "content": self.place.prompt}]
        return fields | extra

    def chat(self, **extra):
        return self.client.chat.completions.create(**self.fields(extra))


def form(schema, **extra):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema} | extra}


@check
def pydantic_models_are_parsed(suite: Suite):
    for model in suite.names:
        for temperature in (0, 1, 2):
            fields = suite.fields({"model": model, "temperature": temperature, "response_format": Answer})
            (choice,) = suite.client.chat.completions.parse(**fields).choices
            assert isinstance(choice.message.parsed, Answer) and choice.finish_reason == "stop", choice
            assert choice.message.refusal is None and choice.message.tool_calls is None, choice


@check
def the_older_name_of_parse(suite: Suite):
    if hasattr(suite.client, "beta") and hasattr(suite.client.beta, "chat"):
        parsed = suite.client.beta.chat.completions.parse(**suite.fields({"response_format": Answer}))
        assert isinstance(parsed.choices[0].message.parsed, Answer), parsed


@check
def a_stream_is_the_whole_answer(suite: Suite):
    with suite.client.chat.completions.stream(**suite.fields({"response_format": Answer})) as stream:
        kinds = {event.type for event in stream}
        streamed = stream.get_final_completion().choices[0].message
    assert {"content.delta", "content.done"} <= kinds, kinds
    whole = suite.client.chat.completions.parse(**suite.fields({"response_format": Answer})).choices[0].message
    assert streamed.content == whole.content and streamed.parsed == whole.parsed, (streamed, whole)


@check
def schemas_as_they_are(suite: Suite):
    schema = TypeAdapter(list[Literal["red", "blue"]]).json_schema() | {"minItems": 2, "maxItems": 3}
    said = suite.chat(response_format=form(schema, strict=True, description="colours"), n=3, temperature=1)
    for choice in said.choices:
        value = json.loads(choice.message.content)
        assert 2 <= len(value) <= 3 and set(value) <= {"red", "blue"}, value
    assert json.loads(suite.chat(response_format=form({"const": {"a": [1, None, "ü"]}})).choices[0].message.content) == {
        "a": [1, None, "ü"]
    }


@check
def any_object_is_an_object_when_it_ends(suite: Suite):
    for seed in range(4):
        said = suite.chat(response_format={"type": "json_object"}, temperature=1, seed=seed).choices[0]
        assert said.message.content.startswith("{"), said
        if said.finish_reason == "stop":
            assert isinstance(json.loads(said.message.content), dict), said
        else:
            assert said.finish_reason == "length", said


@check
def text_is_free(suite: Suite):
    free = suite.chat().choices[0].message.content
    assert suite.chat(response_format={"type": "text"}).choices[0].message.content == free


@check
def completions_have_forms_too(suite: Suite):
    extra = {"response_format": form({"type": "integer", "minimum": 10, "maximum": 99})}
    fields = {"model": suite.names[0], "prompt": [suite.place.prompt, "x"], "max_tokens": 30, "extra_body": extra}
    for choice in suite.client.completions.create(**fields).choices:
        assert 10 <= int(choice.text) <= 99 and choice.finish_reason == "stop", choice


@check
def a_cut_answer_says_so(suite: Suite):
    whole = suite.chat(response_format=form(Answer.model_json_schema())).choices[0].message.content
    cut = suite.chat(response_format=form(Answer.model_json_schema()), max_tokens=5).choices[0]
    assert cut.finish_reason == "length" and whole.startswith(cut.message.content), (cut, whole)
    error = raises(
        openai.LengthFinishReasonError,
        lambda: suite.client.chat.completions.parse(**suite.fields({"response_format": Answer, "max_tokens": 5})),
    )
    assert error.completion.choices[0].finish_reason == "length", error


@check
def refusals_name_the_field(suite: Suite):
    def refused(param, response_format, **extra):
        for stream in (False, True):
            asked = lambda: suite.chat(response_format=response_format, stream=stream, **extra)  # noqa: E731
            error = raises(openai.BadRequestError, asked)
            assert error.param == param and error.body["type"] == "invalid_request_error", (param, error)

    schema = "response_format.json_schema.schema"
    refused("response_format.type", {"type": "grammar"})
    refused("response_format.json_schema", {"type": "json_schema"})
    refused("response_format.json_schema.name", {"type": "json_schema", "json_schema": {"schema": {}}})
    refused(schema, form([1]))
    refused(schema, form({"type": "strange"}))
    refused(schema, form({"type": "string", "pattern": "("}))
    refused(schema, form({"$ref": "https://example.com/schema"}))
    refused(schema, form({"$ref": "#/$defs/absent"}))
    refused(schema, form({"type": "integer", "minimum": 3, "maximum": 2}))
    refused(schema, form({"const": "x" * 300_000}))
    number = form({"type": "integer", "minimum": 0, "maximum": 9})
    refused("ignore_eos", number, extra_body={"ignore_eos": True})
    refused("min_tokens", number, extra_body={"min_tokens": 3})
    assert json.loads(suite.chat(response_format=number).choices[0].message.content) in range(10)


if __name__ == "__main__":
    sys.exit(main(Suite))
