"""What the official OpenAI client makes of a server with keys and bounds: each refusal is the exception its users expect.

    python limits_suite.py --url http://127.0.0.1:8000 --key KEY

The server takes KEY, 50 prompt tokens at once and a few seconds a request, in which a thousand tokens cannot be made.
"""

import argparse
import asyncio

import openai

LONG = {"model": "pair", "max_tokens": 1000, "temperature": 0}


def raised(kind, call):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--url", required=True)
    arguments.add_argument("--key", required=True)
    options = arguments.parse_args()

    def client(key: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{options.url}/v1", api_key=key, max_retries=0, timeout=60)

    checks = 0

    def check(holds: bool, what) -> None:
        nonlocal checks
        assert holds, what
        checks += 1

    wrong = raised(openai.AuthenticationError, client("another-key").models.list)
    check(wrong.code == "invalid_api_key", wrong.body)
    right = client(options.key)
    check([model.id for model in right.models.list()][0] == "pair", "the key opens")

    late = raised(openai.InternalServerError, lambda: right.completions.create(prompt=[1, 2, 3], **LONG))
    check((late.status_code, late.code) == (504, "request_timeout"), late.body)

    tokens = []
    stream = right.completions.create(prompt=[1, 2, 3], stream=True, **LONG)
    late = raised(openai.APIError, lambda: tokens.extend(stream))
    check("did not end within" in late.message, late)
    check(len(tokens) > 0 and all(chunk.choices[0].finish_reason is None for chunk in tokens), "tokens came before")

    first = right.completions.create(prompt=[1] * 40, stream=True, **LONG)
    busy = raised(openai.RateLimitError, lambda: right.completions.create(prompt=[1] * 40, **LONG))
    check(busy.code == "overloaded" and 1 <= int(busy.response.headers["retry-after"]) <= 60, busy.response.headers)
    first.close()
    patient = openai.OpenAI(base_url=f"{options.url}/v1", api_key=options.key, max_retries=8, timeout=60)
    again = patient.completions.create(prompt=[1] * 40, model="pair", max_tokens=2)
    check(again.usage.completion_tokens == 2, "who comes again is served")

    async def patiently():
        waiting = openai.AsyncOpenAI(base_url=f"{options.url}/v1", api_key=options.key, max_retries=8, timeout=60)
        asked = [waiting.completions.create(prompt=[1] * 40, model="pair", max_tokens=2) for _ in range(3)]
        return await asyncio.gather(*asked)

    made = [answer.usage.completion_tokens for answer in asyncio.run(patiently())]
    check(made == [2] * 3, "three that fit only one at a time are served one after the other")
    print(f"{checks} of {checks} checks passed")


if __name__ == "__main__":
    main()
