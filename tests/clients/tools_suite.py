"""Tools with the official OpenAI client, over a model that is held to call: calls, streams of calls, the way back of
results, cut calls, refusals.

    python tools_suite.py --url http://127.0.0.1:8000 --prompt "12 + 30"

It asks nothing of what the models say, only that calls follow their schemas and come in the form the client's types promise.
"""

import asyncio
import json
import sys

import openai
from openai.lib._tools import pydantic_function_tool
from pydantic import BaseModel, Field

from checks import Place, check, main, raises

NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
ADD = {
    "type": "object",
    "properties": {"a": NUMBER, "b": NUMBER},
    "required": ["a", "b"],
    "additionalProperties": False,
}
COLOUR = {"type": "object", "properties": {"name": {"enum": ["red", "green", "blue"]}}, "required": ["name"]}


class Sum(BaseModel):
    """Numbers to add."""

    first: int = Field(ge=0, le=9)
    second: int = Field(ge=0, le=9)


def tool(name, parameters, **extra):
    return {"type": "function", "function": {"name": name, "parameters": parameters} | extra}


def one(name):
    return {"type": "function", "function": {"name": name}}


TOOLS = [tool("add", ADD, description="Adds two numbers.", strict=True), tool("paint", COLOUR)]


class Suite:
    def __init__(self, place: Place):
        self.place = place
        self.names = place.names()
        options = {"base_url": place.base_url, "api_key": "none", "max_retries": 0, "timeout": 60}
        self.client, self.waiting = openai.OpenAI(**options), openai.AsyncOpenAI(**options)
        self.asked = [{"role": "user", "content": place.prompt}]

    def fields(self, extra):
        fields = {"model": self.names[0], "max_tokens": 120, "temperature": 0, "seed": 1, "messages": self.asked}
        return fields | {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False} | extra

    def chat(self, **extra):
        return self.client.chat.completions.create(**self.fields(extra))


def follows(call):
    """The arguments of a call, which are what its tool takes."""
    assert call.type == "function" and call.id.startswith("call_"), call
    arguments = json.loads(call.function.arguments)
    if call.function.name == "add":
        assert set(arguments) == {"a", "b"}, arguments
        assert all(isinstance(number, int) and 0 <= number <= 99 for number in arguments.values()), arguments
    else:
        assert call.function.name == "paint" and arguments["name"] in ("red", "green", "blue"), call
        assert set(arguments) == {"name"}, arguments
    return arguments


@check
def a_required_call_follows_its_schema(suite: Suite):
    seen = set()
    for name in suite.names:
        for seed in range(4):
            answer = suite.chat(model=name, seed=seed, temperature=1)
            (choice,) = answer.choices
            assert choice.finish_reason == "tool_calls" and choice.message.content is None, choice
            (call,) = choice.message.tool_calls
            follows(call)
            seen.add(call.id)
            usage = answer.usage
            assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, usage
    assert len(seen) == 4 * len(suite.names), "ids are unique"


@check
def a_named_call_is_of_that_tool(suite: Suite):
    for name in ("add", "paint"):
        (choice,) = suite.chat(tool_choice=one(name)).choices
        assert choice.finish_reason == "tool_calls", choice
        (call,) = choice.message.tool_calls
        assert call.function.name == name, call
        follows(call)


@check
def choices_call_each_for_itself(suite: Suite):
    answer = suite.chat(n=4, temperature=1, logprobs=True)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for choice in answer.choices:
        follows(choice.message.tool_calls[0])
        assert all(entry.logprob <= 0 for entry in choice.logprobs.content), choice
    ids = {choice.message.tool_calls[0].id for choice in answer.choices}
    assert len(ids) == 4, ids


def gathered(chunks):
    """The calls of a stream by index, each started once with id, type and name."""
    calls = {}
    for chunk in chunks:
        for choice in chunk.choices:
            assert not choice.delta.content, choice
            for part in choice.delta.tool_calls or []:
                if part.index not in calls:
                    assert part.id and part.type == "function" and part.function.name, part
                    calls[part.index] = [part.function.name, part.function.arguments]
                else:
                    assert part.id is None and part.type is None and part.function.name is None, part
                    calls[part.index][1] += part.function.arguments
    return [tuple(calls[index]) for index in range(len(calls))]


@check
def a_stream_of_calls_is_the_answer(suite: Suite):
    for choice in ("required", one("add"), one("paint")):
        whole = suite.chat(tool_choice=choice)
        chunks = list(suite.chat(tool_choice=choice, stream=True, stream_options={"include_usage": True}))
        expected = [(call.function.name, call.function.arguments) for call in whole.choices[0].message.tool_calls]
        assert gathered(chunks) == expected, (chunks, expected)
        reasons = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
        assert reasons == ["tool_calls"], reasons
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens, chunks[-1]
        parts = [c for c in chunks if c.choices and c.choices[0].delta.tool_calls]
        assert len(parts) > 2, "arguments come as they are made"


@check
def the_helper_that_gathers_a_stream(suite: Suite):
    fields = suite.fields({"tools": [pydantic_function_tool(Sum)], "tool_choice": one("Sum")})
    with suite.client.chat.completions.stream(**fields) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in events and "tool_calls.function.arguments.done" in events, events
    (call,) = final.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Sum), call
    parsed = suite.client.chat.completions.parse(**fields).choices[0].message.tool_calls[0].function.parsed_arguments
    assert parsed == call.function.parsed_arguments, (parsed, call)


@check
def a_result_goes_back(suite: Suite):
    message = suite.chat(tool_choice=one("add")).choices[0].message
    (call,) = message.tool_calls
    arguments = follows(call)
    result = {"role": "tool", "tool_call_id": call.id, "content": str(arguments["a"] + arguments["b"])}
    for said in (message, message.model_dump(), {"role": "assistant", "tool_calls": [call.model_dump()]}):
        for tools in ({"tools": openai.omit, "tool_choice": openai.omit}, {"tool_choice": "none"}):
            answer = suite.chat(messages=[*suite.asked, said, result], **tools)
            assert isinstance(answer.choices[0].message.content, str), answer
            assert answer.choices[0].message.tool_calls is None, answer
            assert answer.choices[0].finish_reason in ("stop", "length"), answer
    shorter = suite.chat(messages=suite.asked, tool_choice="none", max_tokens=1).usage.prompt_tokens
    assert answer.usage.prompt_tokens > shorter + 10, "the model reads the call and its result"


@check
def a_cut_call_says_so(suite: Suite):
    whole = suite.chat(tool_choice=one("add")).choices[0].message.tool_calls[0].function
    for limit in (1, 12, 24, 30):
        fields = {"tool_choice": one("add"), "max_tokens": limit}
        (choice,) = suite.chat(**fields).choices
        chunks = list(suite.chat(stream=True, **fields))
        calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
        assert gathered(chunks) == calls, (chunks, calls)
        if choice.finish_reason == "tool_calls":
            assert calls == [(whole.name, whole.arguments)], calls
        else:
            assert choice.finish_reason == chunks[-1].choices[0].finish_reason == "length", choice
            assert all(name == whole.name and whole.arguments.startswith(cut) for name, cut in calls), calls


@check
def tasks_call_side_by_side(suite: Suite):
    async def ask(seed):
        return await suite.waiting.chat.completions.create(**suite.fields({"seed": seed, "temperature": 1}))

    async def stream():
        calls = suite.waiting.chat.completions.create(**suite.fields({"stream": True}))
        return [chunk async for chunk in await calls]

    async def both():
        return await asyncio.gather(*(ask(seed) for seed in range(6)), stream())

    *answers, chunks = asyncio.run(both())
    for answer in answers:
        follows(answer.choices[0].message.tool_calls[0])
    (call,) = suite.chat().choices[0].message.tool_calls
    assert gathered(chunks) == [(call.function.name, call.function.arguments)]


@check
def refusals_name_the_field(suite: Suite):
    def refused(param, **extra):
        for stream in (False, True):
            error = raises(openai.BadRequestError, lambda: suite.chat(stream=stream, **extra))
            assert error.param == param and error.body["type"] == "invalid_request_error", (param, error)

    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    refused("tools[0].type", tools=[{"type": "web_search"}])
    refused("tools[0].function.name", tools=[tool("no spaces", {})])
    refused("tools[1].function.name", tools=[TOOLS[0], TOOLS[0]])
    refused("tools[0].function.parameters.type", tools=[tool("f", {"type": "string"})])
    refused("tools", tools=[tool(f"f{at}", {}) for at in range(129)])
    refused("tool_choice", tool_choice=one("absent"))
    refused("tool_choice", tools=openai.omit)
    refused("response_format", response_format={"type": "json_object"})
    refused("messages[1].tool_call_id", messages=[*suite.asked, {"role": "tool", "content": "x", "tool_call_id": "1"}])
    refused("messages[0].role", messages=[{"role": "function", "name": "f", "content": "x"}])
    refused("messages[0].tool_calls", messages=[{"role": "user", "content": "x", "tool_calls": [call]}])
    refused("tools[1].function.parameters", tools=[TOOLS[0], tool("f", {"properties": {"a": {"type": "strange"}}})])
    suite.chat()


@check
def a_stream_that_is_left_ends_its_request(suite: Suite):
    endless = tool("say", {"type": "object", "properties": {"text": {"type": "string", "minLength": 300}}, "required": ["text"]})
    fields = {"tools": [endless], "max_tokens": 350}
    stream = suite.chat(stream=True, **fields)
    next(stream)
    stream.close()
    suite.place.idle()


if __name__ == "__main__":
    sys.exit(main(Suite))
