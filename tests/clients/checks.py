"""What the suites share: options, the list of checks, and the run that counts them.

    python SUITE.py --url http://127.0.0.1:8000 --prompt "12 + 30"

Prints one line a check and exits with 1 if any failed.
"""

import argparse
import json
import time
import traceback
import urllib.request
from dataclasses import dataclass

CHECKS = []


def check(function):
    CHECKS.append(function)
    return function


@dataclass
class Place:
    """The server and what to ask it."""

    url: str
    prompt: str

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    def get(self, path: str) -> dict:
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            return json.load(answer)

    def names(self) -> list[str]:
        """The routed name first, then each model."""
        return [card["id"] for card in self.get("/v1/models")["data"]]

    def live(self) -> int:
        """Requests that the server has."""
        return self.get("/health")["live_requests"]

    def idle(self):
        """Waits until the server has no request left."""
        deadline = time.monotonic() + 20
        while self.live() > 0:
            assert time.monotonic() < deadline, "a request is still alive"
            time.sleep(0.02)


def raises(kind, call):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


def main(make) -> int:
    """Runs the checks on what `make` makes of the place; the number of failed ones decides the exit code."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--url", required=True)
    arguments.add_argument("--prompt", required=True, help="what to ask; the answer should have a few tokens")
    options = arguments.parse_args()
    subject = make(Place(options.url.rstrip("/"), options.prompt))
    failed = 0
    for function in CHECKS:
        try:
            function(subject)
            print(f"ok      {function.__name__}")
        except Exception:
            failed += 1
            print(f"FAILED  {function.__name__}\n{traceback.format_exc()}")
    print(f"{len(CHECKS) - failed} of {len(CHECKS)} checks passed")
    return 1 if failed else 0
