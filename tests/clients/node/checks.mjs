// What the suites share: options, the list of checks, and the run that counts them.
//
//     node SUITE.mjs --url http://127.0.0.1:8000 --prompt "12 + 30"
//
// Prints one line a check and exits with 1 if any failed.

import assert from "node:assert/strict";
import { parseArgs } from "node:util";

const { values } = parseArgs({ options: { url: { type: "string" }, prompt: { type: "string" } } });
assert(values.url && values.prompt, "usage: node SUITE.mjs --url URL --prompt TEXT");
export const url = values.url.replace(/\/+$/, "");
export const prompt = values.prompt;

const checks = [];

export function check(name, run) {
  checks.push([name, run]);
}

/** The error that a promise ends with. */
export async function failure(promise) {
  try {
    await promise;
  } catch (error) {
    return error;
  }
  throw new assert.AssertionError({ message: "it did not fail" });
}

async function until(what, holds) {
  const deadline = Date.now() + 20_000;
  for (;;) {
    const { live_requests: live } = await (await fetch(`${url}/health`)).json();
    if (holds(live)) return;
    assert(Date.now() < deadline, `${what}: ${live} requests are alive`);
    await new Promise((wake) => setTimeout(wake, 5));
  }
}

/** Waits until the server has no request left. */
export const idle = () => until("not idle", (live) => live === 0);

/** Waits until the server has a request, and then has `leave` called. */
export async function onceBusy(leave) {
  await until("not busy", (live) => live > 0);
  leave();
}

export async function main() {
  let failed = 0;
  for (const [name, run] of checks) {
    try {
      await run();
      console.log(`ok      ${name}`);
    } catch (error) {
      failed += 1;
      console.log(`FAILED  ${name}\n${error.stack ?? error}`);
    }
  }
  console.log(`${checks.length - failed} of ${checks.length} checks passed`);
  process.exit(failed > 0 ? 1 : 0);
}
