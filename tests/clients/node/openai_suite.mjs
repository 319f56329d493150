// The official OpenAI client for Node against a running server.

import assert from "node:assert/strict";
import OpenAI from "openai";
import { check, failure, idle, main, onceBusy, prompt, url } from "./checks.mjs";

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0, timeout: 60_000 });
const names = [];
for await (const model of client.models.list()) names.push(model.id);
const [routed, ...models] = names;
const messages = [{ role: "user", content: prompt }];
const base = { model: routed, max_tokens: 24, temperature: 0, seed: 1 };

const chat = (extra, options) => client.chat.completions.create({ ...base, messages, ...extra }, options);
const text = (extra, options) => client.completions.create({ ...base, prompt, ...extra }, options);

async function all(stream) {
  const chunks = [];
  for await (const chunk of await stream) chunks.push(chunk);
  return chunks;
}

function addsUp(usage) {
  assert.equal(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens);
  const byModel = Object.entries(usage.completion_tokens_details.by_model);
  assert.equal(byModel.reduce((sum, [, made]) => sum + made, 0), usage.completion_tokens);
  assert(byModel.every(([name]) => models.includes(name)), JSON.stringify(usage));
}

async function refused(call, kind, fields) {
  const error = await failure(call);
  assert(error instanceof kind, `${error}`);
  for (const [name, value] of Object.entries(fields)) assert.equal(error[name], value, name);
  assert(error.requestID, "x-request-id is missing");
  return error;
}

check("models", async () => {
  assert(names.length >= 2 && new Set(names).size === names.length, names.join());
  const card = await client.models.retrieve(routed);
  assert.deepEqual([card.id, card.object], [routed, "model"]);
  await refused(client.models.retrieve("no-such-model"), OpenAI.NotFoundError, { status: 404, code: "model_not_found" });
});

check("chat", async () => {
  for (const model of names) {
    const answer = await chat({ model });
    assert.deepEqual([answer.object, answer.model], ["chat.completion", model]);
    const [choice] = answer.choices;
    assert.equal(choice.message.role, "assistant");
    assert.equal(typeof choice.message.content, "string");
    assert(["stop", "length"].includes(choice.finish_reason), choice.finish_reason);
    addsUp(answer.usage);
  }
});

check("a chat stream is the chat", async () => {
  const whole = await chat({});
  const chunks = await all(chat({ stream: true, stream_options: { include_usage: true } }));
  const last = chunks.pop();
  assert.deepEqual(last.choices, []);
  assert.equal(last.usage.completion_tokens, whole.usage.completion_tokens);
  addsUp(last.usage);
  assert.equal(new Set(chunks.map((chunk) => `${chunk.id} ${chunk.created} ${chunk.model} ${chunk.object}`)).size, 1);
  const said = chunks.map((chunk) => chunk.choices[0].delta.content ?? "").join("");
  assert.equal(said, whole.choices[0].message.content);
  assert.equal(chunks.at(-1).choices[0].finish_reason, whole.choices[0].finish_reason);
});

check("the helper that gathers a stream", async () => {
  const whole = await chat({});
  const runner = client.chat.completions.stream({ ...base, messages });
  const gathered = await runner.finalChatCompletion();
  assert.equal(gathered.choices[0].message.content, whole.choices[0].message.content);
  assert.equal(gathered.choices[0].finish_reason, whole.choices[0].finish_reason);
});

check("a text stream is the text", async () => {
  const whole = await text({});
  assert.equal(whole.object, "text_completion");
  addsUp(whole.usage);
  const chunks = await all(text({ stream: true }));
  assert.equal(chunks.map((chunk) => chunk.choices[0].text).join(""), whole.choices[0].text);
  assert.equal(chunks.at(-1).choices[0].finish_reason, whole.choices[0].finish_reason);
});

check("prompts as ids and lists, choices", async () => {
  const lists = await text({ prompt: [[1, 2, 3], [4]], max_tokens: 2, n: 2 });
  assert.deepEqual(lists.choices.map((choice) => choice.index), [0, 1, 2, 3]);
  assert.equal(lists.usage.prompt_tokens, 4);
});

check("log-probabilities", async () => {
  const answer = await chat({ logprobs: true, top_logprobs: 3, max_tokens: 4 });
  const entries = answer.choices[0].logprobs.content;
  assert.equal(entries.length, answer.usage.completion_tokens);
  for (const entry of entries) {
    assert(entry.logprob <= 0 && entry.top_logprobs.length === 3 && Array.isArray(entry.bytes));
  }
  const lists = (await text({ logprobs: 2, max_tokens: 4 })).choices[0].logprobs;
  assert.equal(lists.tokens.length, lists.token_logprobs.length);
  assert.equal(lists.tokens.length, lists.text_offset.length);
});

const number = { type: "integer", minimum: 0, maximum: 99 };
const sum = { type: "object", properties: { a: number, b: number }, required: ["a", "b"], additionalProperties: false };
const tools = [{ type: "function", function: { name: "add", description: "Adds.", parameters: sum, strict: true } }];
const held = { tools, tool_choice: "required", parallel_tool_calls: false, max_tokens: 120 };

check("tools", async () => {
  const [{ message, finish_reason: reason }] = (await chat(held)).choices;
  assert.deepEqual([reason, message.content, message.tool_calls.length], ["tool_calls", null, 1]);
  const [call] = message.tool_calls;
  const made = JSON.parse(call.function.arguments);
  assert.deepEqual([call.type, call.function.name, Object.keys(made)], ["function", "add", ["a", "b"]]);
  const named = await chat({ ...held, tool_choice: { type: "function", function: { name: "add" } } });
  assert.deepEqual(JSON.parse(named.choices[0].message.tool_calls[0].function.arguments), made);
  const result = { role: "tool", tool_call_id: call.id, content: String(made.a + made.b) };
  const last = await chat({ messages: [...messages, message, result] });
  assert.equal(typeof last.choices[0].message.content, "string");
  await refused(chat({ tools, tool_choice: { type: "function", function: { name: "take" } } }), OpenAI.BadRequestError, {
    param: "tool_choice",
  });
});

check("a stream of calls", async () => {
  const whole = (await chat(held)).choices[0].message.tool_calls[0].function;
  const gathered = await client.chat.completions.stream({ ...base, messages, ...held }).finalChatCompletion();
  const [{ message, finish_reason: reason }] = gathered.choices;
  assert.deepEqual([reason, message.content, message.tool_calls.length], ["tool_calls", null, 1]);
  const { name, arguments: text } = message.tool_calls[0].function;
  assert.deepEqual([name, text], [whole.name, whole.arguments]);
});

check("the helper that runs tools", async () => {
  const seen = [];
  const run = ({ a, b }) => (seen.push([a, b]), String(a + b));
  const callable = { type: "function", function: { ...tools[0].function, function: run, parse: JSON.parse } };
  const choice = { type: "function", function: { name: "add" } };
  const runner = client.chat.completions.runTools({ ...base, ...held, messages, tools: [callable], tool_choice: choice });
  await runner.done();
  assert.equal(seen.length, 1);
  assert.equal(await runner.finalFunctionToolCallResult(), String(seen[0][0] + seen[0][1]));
});

check("JSON of a schema", async () => {
  const form = { type: "json_schema", json_schema: { name: "sum", schema: sum, strict: true } };
  const whole = (await chat({ response_format: form, max_tokens: 120 })).choices[0].message.content;
  assert.deepEqual(Object.keys(JSON.parse(whole)), ["a", "b"]);
  const chunks = await all(chat({ response_format: form, max_tokens: 120, stream: true }));
  assert.equal(chunks.map((chunk) => chunk.choices[0].delta.content ?? "").join(""), whole);
});

check("errors", async () => {
  const bad = OpenAI.BadRequestError;
  await refused(chat({ temperature: 9 }), bad, { status: 400, param: "temperature", type: "invalid_request_error" });
  await refused(chat({ messages: [] }), bad, { param: "messages" });
  await refused(chat({ temprature: 1 }), bad, { param: "temprature" });
  await refused(chat({ model: "gpt-9" }), OpenAI.NotFoundError, { param: "model", code: "model_not_found" });
  for (const stream of [false, true]) {
    const long = Array(100_000).fill(1);
    await refused(text({ prompt: long, stream }), bad, { code: "context_length_exceeded" });
  }
  await chat({});
});

check("abort of a stream", async () => {
  const stream = await chat({ stream: true, max_tokens: 400, ignore_eos: true });
  for await (const _ of stream) break;
  await idle();
  const signalled = new AbortController();
  let seen = 0;
  const running = (async () => {
    for await (const _ of await chat({ stream: true, max_tokens: 400, ignore_eos: true }, { signal: signalled.signal })) {
      if ((seen += 1) === 2) signalled.abort();
    }
  })();
  await running.catch((error) => assert(error instanceof OpenAI.APIUserAbortError, `${error}`));
  assert(seen >= 2);
  await idle();
});

check("abort of a whole answer", async () => {
  const left = new AbortController();
  const asked = chat({ n: 48, max_tokens: 400, ignore_eos: true }, { signal: left.signal });
  const [error] = await Promise.all([failure(asked), onceBusy(() => left.abort())]);
  assert(error instanceof OpenAI.APIUserAbortError, `${error}`);
  await idle();
});

await main();
