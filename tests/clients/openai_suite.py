"""The official OpenAI client against a running server: shapes, streams, choices, stops, log-probabilities, errors,
metrics.

    python openai_suite.py --url http://127.0.0.1:8000 --prompt "12 + 30"

Prints one line a check and exits with 1 if any failed. It asks nothing of what the models say, only that answers are
whole, consistent with each other and in the form the client's types promise.
"""

import argparse
import asyncio
import json
import sys
import time
import traceback
import urllib.request

import openai
from prometheus_client.parser import text_string_to_metric_families

CHECKS = []


def check(function):
    CHECKS.append(function)
    return function


class Suite:
    def __init__(self, url: str, prompt: str, max_tokens: int):
        self.url = url
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
        self.prompt = prompt
        self.max_tokens = max_tokens
        self.names = [model.id for model in self.client.models.list()]
        self.routed, self.models = self.names[0], self.names[1:]

    def chat(self, **extra):
        fields = {"model": self.routed, "max_tokens": self.max_tokens, "temperature": 0, "seed": 1} | extra
        fields.setdefault("messages", [{"role": "user", "content": self.prompt}])
        return self.client.chat.completions.create(**fields)

    def text(self, **extra):
        fields = {"model": self.routed, "prompt": self.prompt, "max_tokens": self.max_tokens, "temperature": 0, "seed": 1} | extra
        return self.client.completions.create(**fields)

    def post(self, path: str, **body) -> dict:
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)

    def get(self, path: str) -> dict:
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            return json.load(answer)

    def health(self) -> dict:
        return self.get("/health")


def raises(kind, call):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


def refused(kind, call, param=None, code=None):
    error = raises(kind, call)
    assert isinstance(error.body, dict), error.body
    assert error.body["message"] and error.body["type"], error.body
    if param is not None:
        assert error.param == param, (error.param, param)
    if code is not None:
        assert error.code == code, (error.code, code)
    return error


def usage_adds_up(usage, models):
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, usage
    by_model = usage.completion_tokens_details.model_extra["by_model"]
    assert sum(by_model.values()) == usage.completion_tokens, usage
    assert set(by_model) <= set(models), by_model
    assert 0 <= usage.prompt_tokens_details.cached_tokens <= usage.prompt_tokens, usage


@check
def models(suite: Suite):
    assert len(suite.names) >= 2 and len(set(suite.names)) == len(suite.names), suite.names
    assert suite.client.models.retrieve(suite.routed).id == suite.routed
    refused(openai.NotFoundError, lambda: suite.client.models.retrieve("no-such-model"), code="model_not_found")


@check
def chat(suite: Suite):
    for model in suite.names:
        answer = suite.chat(model=model)
        assert answer.object == "chat.completion" and answer.model == model and answer.id.startswith("chatcmpl-")
        (choice,) = answer.choices
        assert choice.message.role == "assistant" and isinstance(choice.message.content, str)
        assert choice.finish_reason in ("stop", "length"), choice.finish_reason
        assert choice.logprobs is None
        usage_adds_up(answer.usage, suite.models)
        if model != suite.routed:
            assert list(answer.usage.completion_tokens_details.model_extra["by_model"]) == [model]


@check
def chat_stream_equals_chat(suite: Suite):
    whole = suite.chat()
    chunks = list(suite.chat(stream=True, stream_options={"include_usage": True}))
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1
    *chunks, last = chunks
    assert last.choices == [] and all(chunk.usage is None for chunk in chunks)
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    usage_adds_up(last.usage, suite.models)
    deltas = [chunk.choices[0] for chunk in chunks]
    assert deltas[0].delta.role == "assistant" and deltas[0].delta.content == ""
    assert all(choice.delta.role is None for choice in deltas[1:])
    assert [choice.finish_reason for choice in deltas if choice.finish_reason] == [whole.choices[0].finish_reason]
    assert deltas[-1].finish_reason
    assert "".join(choice.delta.content or "" for choice in deltas) == whole.choices[0].message.content


@check
def text_stream_equals_text(suite: Suite):
    whole = suite.text()
    assert whole.object == "text_completion" and whole.id.startswith("cmpl-")
    usage_adds_up(whole.usage, suite.models)
    chunks = list(suite.text(stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )


@check
def continuous_usage(suite: Suite):
    chunks = list(suite.chat(stream=True, extra_body={"stream_options": {"continuous_usage_stats": True}}))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[0] == 0 and counts[-1] == suite.chat().usage.completion_tokens, counts


@check
def prompts_in_every_form(suite: Suite):
    one = suite.text()
    two = suite.text(prompt=[suite.prompt, suite.prompt], n=2)
    assert [choice.index for choice in two.choices] == [0, 1, 2, 3]
    first, second, third, fourth = [choice.text for choice in two.choices]
    assert first == third == one.choices[0].text and second == fourth
    assert two.usage.prompt_tokens == 2 * one.usage.prompt_tokens
    assert suite.text(prompt=[1, 2, 3], max_tokens=1).usage.prompt_tokens == 3
    lists = suite.text(prompt=[[1, 2, 3], [4]], max_tokens=1)
    assert len(lists.choices) == 2 and lists.usage.prompt_tokens == 4
    echoed = suite.text(echo=True)
    assert echoed.choices[0].text == suite.prompt + one.choices[0].text


@check
def choices_have_their_own_seeds(suite: Suite):
    sampled = lambda **extra: [
        choice.message.content for choice in suite.chat(temperature=1.5, max_tokens=8, seed=7, **extra).choices
    ]
    three = sampled(n=3)
    assert len(three) == 3 and three == sampled(n=3)
    assert three[0] == sampled()[0], "the first of n choices is the only one of n = 1"
    chunks = [chunk for chunk in suite.chat(temperature=1.5, max_tokens=8, seed=7, n=3, stream=True)]
    for index in range(3):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert "".join(choice.delta.content or "" for choice in own) == three[index]
        assert sum(choice.finish_reason is not None for choice in own) == 1


@check
def stops(suite: Suite):
    whole = suite.chat(max_tokens=12).choices[0].message.content
    assert len(whole) >= 4, f"the prompt should make a longer answer than {whole!r}"
    stop = whole[len(whole) // 2 :][:2]
    expected = whole[: whole.index(stop)]
    cut = suite.chat(max_tokens=12, stop=stop)
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == (expected, "stop")
    assert cut.choices[0].model_extra["stop_reason"] == stop
    kept = suite.chat(max_tokens=12, stop=["\u2603", stop], extra_body={"include_stop_str_in_output": True})
    assert kept.choices[0].message.content == expected + stop
    streamed = suite.chat(max_tokens=12, stop=[stop], stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == expected
    one = suite.chat(max_tokens=1, extra_body={"ignore_eos": True})
    assert (one.choices[0].finish_reason, one.usage.completion_tokens) == ("length", 1)
    long = suite.chat(max_tokens=9, extra_body={"ignore_eos": True})
    assert (long.choices[0].finish_reason, long.usage.completion_tokens) == ("length", 9)
    more = suite.chat(max_completion_tokens=3, max_tokens=openai.omit, extra_body={"min_tokens": 3})
    assert more.usage.completion_tokens == 3


@check
def chat_logprobs(suite: Suite):
    answer = suite.chat(logprobs=True, top_logprobs=3, max_tokens=6)
    choice = answer.choices[0]
    entries = choice.logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    for entry in entries:
        assert entry.logprob <= 0 and len(entry.top_logprobs) == 3
        scores = [top.logprob for top in entry.top_logprobs]
        assert scores == sorted(scores, reverse=True)
        assert entry.token == entry.top_logprobs[0].token, "greedy takes the most probable"
        assert entry.token == bytes(entry.bytes).decode() or entry.token.startswith("bytes:")
    said = b"".join(bytes(entry.bytes) for entry in entries).decode(errors="replace")
    assert said.startswith(choice.message.content), (said, choice.message.content)
    chunks = suite.chat(logprobs=True, top_logprobs=3, max_tokens=6, stream=True)
    streamed = [entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    assert streamed == entries
    assert suite.chat(logprobs=True, max_tokens=2).choices[0].logprobs.content[0].top_logprobs == []


@check
def text_logprobs(suite: Suite):
    answer = suite.text(logprobs=2, max_tokens=6)
    lists = answer.choices[0].logprobs
    size = answer.usage.completion_tokens
    assert [len(lists.tokens), len(lists.token_logprobs), len(lists.top_logprobs), len(lists.text_offset)] == [size] * 4
    assert lists.text_offset[0] == 0 and lists.text_offset == sorted(lists.text_offset)
    for token, logprob, top in zip(lists.tokens, lists.token_logprobs, lists.top_logprobs):
        assert top[token] == logprob and len(top) in (2, 3)
    assert suite.text(logprobs=0, max_tokens=2).choices[0].logprobs.tokens


@check
def prompt_logprobs(suite: Suite):
    for model in suite.names:
        answer = suite.text(model=model, prompt=[1, 2, 3], echo=True, logprobs=1, max_tokens=1)
        lists = answer.choices[0].logprobs
        sizes = [len(lists.tokens), len(lists.token_logprobs), len(lists.top_logprobs), len(lists.text_offset)]
        assert sizes == [4] * 4 and answer.usage.completion_tokens == 1, sizes
        assert lists.token_logprobs[0] is None and lists.top_logprobs[0] is None
        for token, logprob, top in list(zip(lists.tokens, lists.token_logprobs, lists.top_logprobs))[1:]:
            assert logprob <= 0 and top[token] == logprob and logprob <= max(top.values()) and len(top) in (1, 2)
    for echoed in (suite.prompt, [suite.prompt, [1, 2, 3]]):
        whole = suite.text(prompt=echoed, echo=True, logprobs=2, n=2)
        chunks = list(suite.text(prompt=echoed, echo=True, logprobs=2, n=2, stream=True))
        for choice in whole.choices:
            own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == choice.index]
            assert "".join(chunk.text for chunk in own) == choice.text
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                streamed = [entry for chunk in own if chunk.logprobs for entry in getattr(chunk.logprobs, name)]
                assert streamed == getattr(choice.logprobs, name), name
        first = whole.choices[0]
        assert first.text.startswith(suite.prompt)
        assert first.logprobs.text_offset[0] == 0 and first.logprobs.text_offset == sorted(first.logprobs.text_offset)


@check
def makers_of_tokens(suite: Suite):
    answer = suite.chat(extra_body={"return_token_models": True})
    makers = answer.choices[0].model_extra["token_models"]
    counts = {name: makers.count(name) for name in makers}
    assert counts == answer.usage.completion_tokens_details.model_extra["by_model"]
    chunks = suite.chat(stream=True, extra_body={"return_token_models": True})
    streamed = [name for chunk in chunks for name in chunk.choices[0].model_extra.get("token_models") or []]
    assert streamed == makers


@check
def details_of_tokens(suite: Suite):
    ask = {"extra_body": {"return_token_details": True, "return_token_models": True}}
    began = time.monotonic()
    whole = suite.chat(**ask).choices[0]
    took = 1000 * (time.monotonic() - began)
    details = whole.model_extra["token_details"]
    assert [detail["model"] for detail in details] == whole.model_extra["token_models"]
    assert all(0 <= detail["entropy"] <= 1 for detail in details), "a number even where the router reads none"
    assert all(detail["ms"] >= 0 for detail in details) and 0 < sum(detail["ms"] for detail in details) <= took
    chunks = suite.chat(stream=True, **ask)
    streamed = [detail for chunk in chunks for detail in chunk.choices[0].model_extra.get("token_details") or []]
    known = ("text", "model", "entropy")
    assert [[detail[name] for name in known] for detail in streamed] == [[detail[name] for name in known] for detail in details]


@check
def every_message_form(suite: Suite):
    parts = [{"type": "text", "text": suite.prompt}]
    plain = suite.chat().choices[0].message.content
    assert suite.chat(messages=[{"role": "user", "content": parts}]).choices[0].message.content == plain
    turns = [{"role": "user", "content": suite.prompt}, {"role": "assistant", "content": plain}]
    suite.chat(messages=[*turns, {"role": "user", "content": suite.prompt}])
    harmless = {"user": "u", "metadata": {"a": "b"}, "store": False, "parallel_tool_calls": True}
    assert suite.chat(**harmless).choices[0].message.content == plain


@check
def tokens_and_text(suite: Suite):
    made = suite.post("/tokenize", prompt=suite.prompt, return_token_strs=True)
    assert made["count"] == len(made["tokens"]) == len(made["token_strs"]), made
    assert suite.text(max_tokens=1).usage.prompt_tokens == made["count"], made
    assert suite.post("/detokenize", tokens=made["tokens"])["prompt"].endswith(suite.prompt)
    info = suite.get("/tokenizer_info")
    assert all(token < info["vocab_size"] for token in made["tokens"]), info
    for name in filter(None, (info["bos_token"], info["eos_token"])):
        assert suite.post("/tokenize", prompt=name, add_special_tokens=False)["count"] == 1, name
    chat = suite.post("/tokenize", messages=[{"role": "user", "content": suite.prompt}])
    whole = suite.chat()
    assert whole.usage.prompt_tokens == chat["count"] <= chat["max_model_len"], chat
    assert suite.text(prompt=chat["tokens"]).choices[0].text == whole.choices[0].message.content


@check
def bad_requests(suite: Suite):
    bad = openai.BadRequestError
    refused(bad, lambda: suite.chat(temperature=9), param="temperature")
    refused(bad, lambda: suite.chat(messages=[]), param="messages")
    refused(bad, lambda: suite.chat(logit_bias={"99999999": 1}), param="logit_bias")
    refused(bad, lambda: suite.chat(stop=["a", "b", "c", "d", "e"]), param="stop")
    refused(bad, lambda: suite.chat(stop=""), param="stop")
    refused(bad, lambda: suite.chat(top_logprobs=2), param="top_logprobs")
    refused(bad, lambda: suite.chat(extra_body={"temprature": 0.5}), param="temprature")
    refused(bad, lambda: suite.chat(extra_body={"stop_token_ids": [-1]}), param="stop_token_ids")
    refused(bad, lambda: suite.chat(stream_options={"include_usage": True}), param="stream_options")
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    refused(bad, lambda: suite.chat(tools=[tool]), param="tools")
    refused(bad, lambda: suite.chat(response_format={"type": "xml"}), param="response_format.type")
    image = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
    refused(bad, lambda: suite.chat(messages=[{"role": "user", "content": image}]), param="messages[0].content[0].type")
    refused(bad, lambda: suite.text(prompt=[-1]), param="prompt")
    for stream in (False, True):
        error = refused(bad, lambda: suite.text(prompt=[1] * 100_000, stream=stream), code="context_length_exceeded")
        assert error.body["n_prompt_tokens"] == 100_000 and error.body["n_ctx"] > 0
    suite.chat()


@check
def unknown_names(suite: Suite):
    error = refused(openai.NotFoundError, lambda: suite.chat(model="gpt-9"), param="model", code="model_not_found")
    assert all(name in error.body["message"] for name in suite.names), error.body
    refused(openai.NotFoundError, lambda: suite.client.embeddings.create(model=suite.routed, input="x"))


@check
def tasks_of_the_waiting_client(suite: Suite):
    waiting = openai.AsyncOpenAI(base_url=f"{suite.url}/v1", api_key="none", max_retries=0, timeout=60)
    fields = {"model": suite.routed, "max_tokens": suite.max_tokens, "temperature": 0, "seed": 1}
    fields["messages"] = [{"role": "user", "content": suite.prompt}]
    whole = suite.chat().choices[0].message.content

    async def streamed():
        chunks = await waiting.chat.completions.create(stream=True, **fields)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    async def all_at_once():
        asked = [waiting.chat.completions.create(**fields) for _ in range(4)]
        text = await waiting.completions.create(model=suite.routed, prompt=suite.prompt, max_tokens=2)
        names = [model.id async for model in waiting.models.list()]
        try:
            await waiting.chat.completions.create(**fields | {"temperature": 9})
            raise AssertionError("it was not refused")
        except openai.BadRequestError as error:
            assert error.param == "temperature", error
        answers = await asyncio.gather(*asked, streamed())
        await waiting.close()
        return answers, text, names

    (*answers, stream), text, names = asyncio.run(all_at_once())
    assert [answer.choices[0].message.content for answer in answers] == [whole] * 4
    assert stream == whole and names == suite.names and isinstance(text.choices[0].text, str)


@check
def a_raw_stream_that_is_left(suite: Suite):
    fields = {"model": suite.routed, "prompt": suite.prompt, "max_tokens": 400, "stream": True}
    fields["extra_body"] = {"ignore_eos": True}
    with suite.client.completions.with_streaming_response.create(**fields) as response:
        assert response.headers["content-type"].startswith("text/event-stream"), response.headers
        lines = response.iter_lines()
        first = next(lines)
        assert first.startswith("data: ") and json.loads(first[6:])["object"] == "text_completion", first
    deadline = time.monotonic() + 5
    while suite.health()["live_requests"] > 0:
        assert time.monotonic() < deadline, "the request is still alive"
        time.sleep(0.01)


@check
def request_ids(suite: Suite):
    raw = suite.client.models.with_raw_response.list(extra_headers={"x-request-id": "mine"})
    assert raw.headers["x-request-id"] == "mine"
    assert suite.chat()._request_id


@check
def metrics(suite: Suite):
    def scrape():
        with urllib.request.urlopen(f"{suite.url}/metrics", timeout=10) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        assert len({family.name for family in families}) == len(families), "a family comes twice"
        return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}

    before = scrape()
    answer = suite.chat()
    after = scrape()
    label = (("engine", "0"), ("model_name", suite.routed))
    grown = lambda name, labels=label: after[name, labels] - before.get((name, labels), 0)
    assert grown("vllm:generation_tokens_total") == answer.usage.completion_tokens
    assert grown("vllm:prompt_tokens_total") == answer.usage.prompt_tokens
    assert grown("vllm:time_to_first_token_seconds_count") == 1
    reason = (label[0], ("finished_reason", answer.choices[0].finish_reason), label[1])
    assert grown("vllm:request_success_total", reason) == 1
    by_model = answer.usage.completion_tokens_details.model_extra["by_model"]
    committed = lambda name: grown("tokenrouter:committed_tokens_total", (("model_name", name),))
    deadline = time.monotonic() + 2  # a model may say so just after the answer has left
    while any(committed(name) < made for name, made in by_model.items()):
        assert time.monotonic() < deadline, (by_model, after)
        after = scrape()
    assert all(after[key] >= value for key, value in before.items() if key[0].endswith("_total"))


@check
def a_closed_stream_ends_its_request(suite: Suite):
    stream = suite.chat(max_tokens=40, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    deadline = time.monotonic() + 5
    while suite.health()["live_requests"] > 0:
        assert time.monotonic() < deadline, "the request is still alive"
        time.sleep(0.01)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--url", required=True)
    arguments.add_argument("--prompt", required=True, help="what to ask; the answer should have a few tokens")
    arguments.add_argument("--max-tokens", type=int, default=24)
    options = arguments.parse_args()
    suite = Suite(options.url.rstrip("/"), options.prompt, options.max_tokens)
    failed = []
    for function in CHECKS:
        name = function.__name__
        try:
            function(suite)
            print(f"ok      {name}")
        except Exception:
            failed.append(name)
            print(f"FAILED  {name}\n{traceback.format_exc()}")
    print(f"{len(CHECKS) - len(failed)} of {len(CHECKS)} checks passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
