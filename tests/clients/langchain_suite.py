"""LangChain's OpenAI classes against a running server: messages, streams, batches, callbacks, errors."""

import asyncio
import sys

import openai
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.messages import ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

from checks import Place, check, main, raises

# LangChain keeps one asynchronous client for all, and that one lives with its loop.
LOOP = asyncio.new_event_loop()


class Suite:
    def __init__(self, place: Place):
        self.place = place
        self.names = place.names()

    def fields(self, extra: dict) -> dict:
        fields = {"base_url": self.place.base_url, "api_key": "none", "model": self.names[0], "max_retries": 0}
        fields |= {"temperature": 0, "max_tokens": 24, "timeout": 60}
        return fields | extra

    def chat(self, **extra) -> ChatOpenAI:
        return ChatOpenAI(**self.fields({"seed": 1, "stream_usage": True} | extra))

    def text(self, **extra) -> OpenAI:
        return OpenAI(**self.fields(extra))


def adds_up(message):
    usage = message.usage_metadata
    assert usage["input_tokens"] > 0 and usage["output_tokens"] > 0, usage
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"], usage


@check
def chat(suite: Suite):
    for name in suite.names:
        answer = suite.chat(model=name).invoke(suite.place.prompt)
        assert isinstance(answer, AIMessage) and isinstance(answer.content, str), answer
        assert answer.response_metadata["finish_reason"] in ("stop", "length"), answer
        assert answer.response_metadata["model_name"] == name, answer
        adds_up(answer)


@check
def a_stream_is_the_answer(suite: Suite):
    whole = suite.chat().invoke(suite.place.prompt)
    chunks = list(suite.chat().stream(suite.place.prompt))
    gathered = chunks[0]
    for chunk in chunks[1:]:
        gathered += chunk
    assert gathered.content == whole.content, (gathered, whole)
    assert gathered.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"], gathered
    assert gathered.response_metadata["finish_reason"] == whole.response_metadata["finish_reason"], gathered


@check
def turns(suite: Suite):
    prompt = suite.place.prompt
    turns = [HumanMessage(prompt), AIMessage(prompt), HumanMessage([{"type": "text", "text": prompt}])]
    adds_up(suite.chat().invoke(turns))


@check
def batches_and_tasks(suite: Suite):
    one = suite.chat().invoke(suite.place.prompt).content
    assert [answer.content for answer in suite.chat().batch([suite.place.prompt] * 6)] == [one] * 6
    assert LOOP.run_until_complete(suite.chat().ainvoke(suite.place.prompt)).content == one


@check
def logprobs(suite: Suite):
    answer = suite.chat(logprobs=True, top_logprobs=2, max_tokens=4).invoke(suite.place.prompt)
    entries = answer.response_metadata["logprobs"]["content"]
    assert len(entries) == answer.usage_metadata["output_tokens"], entries
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries), entries


@check
def text_completions(suite: Suite):
    whole = suite.text().invoke(suite.place.prompt)
    assert isinstance(whole, str)
    assert "".join(suite.text().stream(suite.place.prompt)) == whole


@check
def stops(suite: Suite):
    whole = suite.chat().invoke(suite.place.prompt).content
    stop = whole.strip()[2:4]
    assert suite.chat(stop=[stop]).invoke(suite.place.prompt).content == whole[: whole.index(stop)]


class Sum(BaseModel):
    """Two numbers to add."""

    a: int = Field(ge=0, le=99)
    b: int = Field(ge=0, le=99)


@tool(args_schema=Sum)
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@check
def tools(suite: Suite):
    for choice in ("any", "add"):
        bound = suite.chat(max_tokens=120).bind_tools([add], tool_choice=choice, parallel_tool_calls=False)
        answer = bound.invoke(suite.place.prompt)
        assert not answer.invalid_tool_calls and answer.response_metadata["finish_reason"] == "tool_calls", answer
        (call,) = answer.tool_calls
        assert call["name"] == "add" and set(call["args"]) == {"a", "b"}, call
        gathered = None
        for chunk in bound.stream(suite.place.prompt):
            gathered = chunk if gathered is None else gathered + chunk
        assert [(made["name"], made["args"]) for made in gathered.tool_calls] == [("add", call["args"])], gathered
        result = add.invoke(call)
        assert isinstance(result, ToolMessage), result
        last = suite.chat().invoke([HumanMessage(suite.place.prompt), answer, result])
        assert isinstance(last.content, str) and not last.tool_calls, last
        assert LOOP.run_until_complete(bound.ainvoke(suite.place.prompt)).tool_calls[0]["args"] == call["args"]


@check
def structured_output(suite: Suite):
    for method in ("function_calling", "json_schema"):
        model = suite.chat(max_tokens=120).with_structured_output(Sum, method=method)
        made = model.invoke(suite.place.prompt)
        assert isinstance(made, Sum), (method, made)
        assert list(model.stream(suite.place.prompt))[-1] == made, method


@check
def errors(suite: Suite):
    error = raises(openai.BadRequestError, lambda: suite.chat(temperature=9).invoke(suite.place.prompt))
    assert (error.status_code, error.param) == (400, "temperature"), error
    raises(openai.BadRequestError, lambda: list(suite.chat(temperature=9).stream(suite.place.prompt)))
    raises(openai.NotFoundError, lambda: suite.chat(model="gpt-9").invoke(suite.place.prompt))
    suite.chat().invoke(suite.place.prompt)


@check
def a_stream_that_is_left_ends_its_request(suite: Suite):
    endless = suite.chat(max_tokens=400, extra_body={"ignore_eos": True})
    stream = endless.stream(suite.place.prompt)
    next(stream)
    stream.close()
    suite.place.idle()


if __name__ == "__main__":
    sys.exit(main(Suite))
