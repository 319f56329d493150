"""Tools with the official OpenAI client, over a model that is left the choice and repeats what it is asked: text, calls,
text and calls.

    python choice_suite.py --url http://127.0.0.1:8000 --prompt "some text"
"""

import json
import sys

import openai

from checks import Place, check, main

NUMBER = {"type": "integer"}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {"a": NUMBER}}}}
    for name in ("add", "take")
]


def written(name, **arguments):
    """A call as the model of this server writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


class Suite:
    def __init__(self, place: Place):
        self.place = place
        self.name = place.names()[0]
        self.client = openai.OpenAI(base_url=place.base_url, api_key="none", max_retries=0, timeout=60)

    def chat(self, text, **extra):
        fields = {"model": self.name, "temperature": 0, "max_tokens": 400, "tools": TOOLS}
        # What the model repeats ends with a zero byte.
        fields["messages"] = [{"role": "user", "content": text + "\0"}]
        return self.client.chat.completions.create(**fields | extra)

    def said(self, text, **extra):
        """Content, calls and finish reason, whole and streamed."""
        (choice,) = self.chat(text, **extra).choices
        calls = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls or []]
        content, parts, reasons = None, {}, []
        for chunk in self.chat(text, stream=True, **extra):
            delta = chunk.choices[0].delta
            if delta.content is not None:
                content = (content or "") + delta.content
            for part in delta.tool_calls or []:
                parts.setdefault(part.index, [part.function.name, ""])[1] += part.function.arguments
            reasons += [chunk.choices[0].finish_reason] if chunk.choices[0].finish_reason else []
        streamed = [(name, json.loads(arguments)) for name, arguments in parts.values()]
        assert (content or None, streamed, reasons) == (choice.message.content or None, calls, [choice.finish_reason])
        return choice.message.content, calls, choice.finish_reason


@check
def text_stays_text(suite: Suite):
    for text in (suite.place.prompt, "a < b, <tool> <tool_ ", '{"name": "add"}', "é" * 20):
        assert suite.said(text) == (text, [], "stop"), text


@check
def a_call_alone_has_no_content(suite: Suite):
    assert suite.said(written("add", a=1)) == (None, [("add", {"a": 1})], "tool_calls")


@check
def text_may_come_before_calls(suite: Suite):
    text = "Let me see.\n" + written("add", a=1) + "\n" + written("take", a=-20)
    assert suite.said(text) == ("Let me see.", [("add", {"a": 1}), ("take", {"a": -20})], "tool_calls")


@check
def one_call_at_most_when_asked(suite: Suite):
    text = written("add", a=1) + "\n" + written("take", a=2)
    assert suite.said(text, parallel_tool_calls=False) == (None, [("add", {"a": 1})], "tool_calls")


@check
def nothing_but_what_the_schema_allows(suite: Suite):
    # The model would write text where the grammar wants a number; it gets to write something that is one.
    content, calls, reason = suite.said(written("add", a="x"), max_tokens=60)
    assert content is None and calls[0][0] == "add" if calls else reason == "length", (content, calls, reason)


@check
def without_a_choice_the_markers_are_text(suite: Suite):
    text = written("add", a=1)
    assert suite.said(text, tool_choice="none") == (text, [], "stop")
    assert suite.said(text, tools=openai.omit) == (text, [], "stop")


if __name__ == "__main__":
    sys.exit(main(Suite))
