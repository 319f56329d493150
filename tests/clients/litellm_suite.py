"""LiteLLM against a running server: it reads every answer into types of its own and maps every error to a class."""

import asyncio
import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would ask the network for prices

import litellm

from checks import Place, check, main, raises

litellm.telemetry = False
litellm.suppress_debug_info = True


class Suite:
    def __init__(self, place: Place):
        self.place = place
        self.names = place.names()

    def fields(self, extra: dict) -> dict:
        name = extra.pop("name", self.names[0])
        provider = extra.pop("provider", "openai")
        fields = {"model": f"{provider}/{name}", "api_base": self.place.base_url, "api_key": "none", "max_retries": 0}
        fields |= {"temperature": 0, "seed": 1, "max_tokens": 24, "timeout": 60}
        return fields | extra

    def chat(self, **extra):
        extra.setdefault("messages", [{"role": "user", "content": self.place.prompt}])
        return litellm.completion(**self.fields(extra))

    def text(self, **extra):
        extra.setdefault("prompt", self.place.prompt)
        return litellm.text_completion(**self.fields({"provider": "text-completion-openai"} | extra))


def adds_up(usage):
    assert usage.prompt_tokens > 0 and usage.completion_tokens > 0, usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, usage


@check
def chat(suite: Suite):
    for name in suite.names:
        for provider in ("openai", "hosted_vllm"):
            answer = suite.chat(name=name, provider=provider)
            (choice,) = answer.choices
            assert choice.message.role == "assistant" and isinstance(choice.message.content, str), choice
            assert choice.finish_reason in ("stop", "length"), choice
            adds_up(answer.usage)


@check
def a_chat_stream_is_the_chat(suite: Suite):
    whole = suite.chat()
    chunks = list(suite.chat(stream=True, stream_options={"include_usage": True}))
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert said == whole.choices[0].message.content, (said, whole)
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason]
    assert reasons == [whole.choices[0].finish_reason], reasons
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens, chunks[-1]
    rebuilt = litellm.stream_chunk_builder(chunks)
    assert rebuilt.choices[0].message.content == said, rebuilt


@check
def a_text_stream_is_the_text(suite: Suite):
    whole = suite.text()
    adds_up(whole.usage)
    chunks = list(suite.text(stream=True))
    said = "".join(chunk.choices[0].text or "" for chunk in chunks if chunk.choices)
    assert said == whole.choices[0].text, (said, whole)


@check
def choices_and_logprobs(suite: Suite):
    answer = suite.chat(n=2, logprobs=True, top_logprobs=2, max_tokens=4)
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        entries = choice.logprobs.content
        assert entries and all(entry.logprob <= 0 and len(entry.top_logprobs) == 2 for entry in entries), entries


NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
ADD = {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": ADD}}]


@check
def tools(suite: Suite):
    fields = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 120}
    for provider in ("openai", "hosted_vllm"):
        (choice,) = suite.chat(provider=provider, **fields).choices
        assert choice.finish_reason == "tool_calls" and choice.message.content is None, choice
        (call,) = choice.message.tool_calls
        arguments = json.loads(call.function.arguments)
        assert call.function.name == "add" and set(arguments) == {"a", "b"}, call
        chunks = list(suite.chat(provider=provider, stream=True, **fields))
        (built,) = litellm.stream_chunk_builder(chunks).choices
        assert built.finish_reason == "tool_calls", built
        made = [(made.function.name, json.loads(made.function.arguments)) for made in built.message.tool_calls]
        assert made == [("add", arguments)], built
        result = {"role": "tool", "tool_call_id": call.id, "content": str(sum(arguments.values()))}
        messages = [{"role": "user", "content": suite.place.prompt}, choice.message.model_dump(), result]
        answer = suite.chat(provider=provider, messages=messages)
        assert isinstance(answer.choices[0].message.content, str), answer
    named = {"type": "function", "function": {"name": "add"}}
    (choice,) = suite.chat(**fields | {"tool_choice": named}).choices
    assert choice.message.tool_calls[0].function.name == "add", choice


@check
def json_of_a_schema(suite: Suite):
    form = {"type": "json_schema", "json_schema": {"name": "sum", "schema": ADD, "strict": True}}
    whole = suite.chat(response_format=form, max_tokens=120).choices[0].message.content
    assert set(json.loads(whole)) == {"a", "b"}, whole
    chunks = suite.chat(response_format=form, max_tokens=120, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole


@check
def errors(suite: Suite):
    error = raises(litellm.BadRequestError, lambda: suite.chat(temperature=9))
    assert error.status_code == 400 and "temperature" in str(error), error
    error = raises(litellm.BadRequestError, lambda: suite.chat(temperature=9, stream=True))
    assert "temperature" in str(error), error
    error = raises(litellm.NotFoundError, lambda: suite.chat(name="gpt-9"))
    assert error.status_code == 404 and suite.names[0] in str(error), error
    long = raises(litellm.BadRequestError, lambda: suite.text(prompt=[[1] * 100_000]))
    assert "context" in str(long), long
    suite.chat()


@check
def a_cancelled_task_ends_its_request(suite: Suite):
    messages = [{"role": "user", "content": suite.place.prompt}]
    endless = {"messages": messages, "n": 48, "max_tokens": 400, "extra_body": {"ignore_eos": True}}

    async def whole():
        task = asyncio.ensure_future(litellm.acompletion(**suite.fields(dict(endless))))
        while not task.done() and await asyncio.to_thread(suite.place.live) == 0:
            await asyncio.sleep(0)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            return
        raise AssertionError("the answer came before it was cancelled")

    asyncio.run(whole())
    suite.place.idle()


@check
def many_at_once(suite: Suite):
    messages = [{"role": "user", "content": suite.place.prompt}]

    async def ask():
        calls = [litellm.acompletion(**suite.fields({"messages": messages})) for _ in range(8)]
        return await asyncio.gather(*calls)

    answers = asyncio.run(ask())
    assert len({answer.choices[0].message.content for answer in answers}) == 1, answers


if __name__ == "__main__":
    sys.exit(main(Suite))
