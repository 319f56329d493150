// The AI SDK with its provider for OpenAI-compatible servers against a running server. It checks every chunk against
// schemas of its own.

globalThis.AI_SDK_LOG_WARNINGS = false;

import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateObject, generateText, jsonSchema, stepCountIs, streamObject, streamText, tool } from "ai";
import { check, failure, idle, main, onceBusy, prompt, url } from "./checks.mjs";

const provider = createOpenAICompatible({ name: "tokenrouter", baseURL: `${url}/v1`, apiKey: "none", includeUsage: true });
const names = (await (await fetch(`${url}/v1/models`)).json()).data.map((card) => card.id);
const [routed] = names;
const base = { prompt, temperature: 0, seed: 1, maxOutputTokens: 24, maxRetries: 0 };

function counted(usage) {
  assert(usage.inputTokens > 0 && usage.outputTokens > 0, JSON.stringify(usage));
  assert.equal(usage.totalTokens, usage.inputTokens + usage.outputTokens);
}

/** The parts of a stream; an error in it is thrown. */
async function parts(result) {
  const seen = [];
  for await (const part of result.stream) {
    if (part.type === "error") throw part.error;
    seen.push(part);
  }
  return seen;
}

check("chat", async () => {
  for (const name of names) {
    const answer = await generateText({ ...base, model: provider.chatModel(name) });
    assert(answer.text.length > 0);
    assert(["stop", "length"].includes(answer.finishReason), answer.finishReason);
    assert.equal(answer.response.modelId, name);
    counted(answer.usage);
  }
});

check("a chat stream is the chat", async () => {
  const whole = await generateText({ ...base, model: provider.chatModel(routed) });
  const result = streamText({ ...base, model: provider.chatModel(routed), onError: () => {} });
  const deltas = (await parts(result)).filter((part) => part.type === "text-delta");
  assert(deltas.length > 1, "the answer came in one piece");
  assert.equal(deltas.map((part) => part.text).join(""), whole.text);
  assert.equal(await result.finishReason, whole.finishReason);
  assert.deepEqual((await result.usage).outputTokens, whole.usage.outputTokens);
  counted(await result.usage);
});

check("instructions and turns", async () => {
  const messages = [
    { role: "user", content: prompt },
    { role: "assistant", content: prompt },
    { role: "user", content: [{ type: "text", text: prompt }] },
  ];
  const answer = await generateText({ ...base, prompt: undefined, messages, model: provider.chatModel(routed) });
  assert.equal(typeof answer.text, "string");
  counted(answer.usage);
});

check("stop sequences and penalties", async () => {
  const whole = await generateText({ ...base, model: provider.chatModel(routed) });
  const stop = whole.text.trim().slice(2, 4);
  const cut = await generateText({ ...base, model: provider.chatModel(routed), stopSequences: [stop] });
  assert.equal(cut.text, whole.text.slice(0, whole.text.indexOf(stop)));
  assert.equal(cut.finishReason, "stop");
  const penalised = { topP: 0.9, presencePenalty: 0.5, frequencyPenalty: 0.5 };
  await generateText({ ...base, ...penalised, model: provider.chatModel(routed) });
});

const number = { type: "integer", minimum: 0, maximum: 99 };
const sum = { type: "object", properties: { a: number, b: number }, required: ["a", "b"], additionalProperties: false };
const add = tool({ description: "Adds.", inputSchema: jsonSchema(sum), execute: async ({ a, b }) => a + b });
const held = { maxOutputTokens: 120, tools: { add }, toolChoice: "required" };

check("tools", async () => {
  const model = provider.chatModel(routed);
  const answer = await generateText({ ...base, ...held, model });
  assert.equal(answer.finishReason, "tool-calls");
  const [call] = answer.toolCalls;
  assert.deepEqual([answer.toolCalls.length, call.toolName, Object.keys(call.input)], [1, "add", ["a", "b"]]);
  assert.equal(answer.toolResults[0].output, call.input.a + call.input.b);
  counted(answer.usage);
  const named = await generateText({ ...base, ...held, model, toolChoice: { type: "tool", toolName: "add" } });
  assert.deepEqual(named.toolCalls[0].input, call.input);
});

check("results go back", async () => {
  const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" });
  const answer = await generateText({
    ...base, ...held, model: provider.chatModel(routed), stopWhen: stepCountIs(2), prepareStep,
  });
  assert.equal(answer.steps.length, 2);
  assert.equal(answer.steps[0].toolCalls.length, 1);
  assert.deepEqual(answer.steps[1].toolCalls, []);
  assert(["stop", "length"].includes(answer.finishReason), answer.finishReason);
});

check("a stream of calls", async () => {
  const model = provider.chatModel(routed);
  const whole = await generateText({ ...base, ...held, model });
  const result = streamText({ ...base, ...held, model, onError: () => {} });
  const seen = await parts(result);
  const calls = seen.filter((part) => part.type === "tool-call");
  assert.deepEqual(calls.map((part) => [part.toolName, part.input]), [["add", whole.toolCalls[0].input]]);
  assert(seen.filter((part) => part.type === "tool-input-delta").length > 1, "the input came in one piece");
  assert.equal(await result.finishReason, "tool-calls");
});

check("objects of a schema", async () => {
  const structured = createOpenAICompatible({
    name: "tokenrouter", baseURL: `${url}/v1`, apiKey: "none", supportsStructuredOutputs: true,
  });
  const wanted = { ...base, maxOutputTokens: 120, model: structured.chatModel(routed), schema: jsonSchema(sum) };
  const { object } = await generateObject(wanted);
  assert.deepEqual(Object.keys(object), ["a", "b"]);
  const result = streamObject({ ...wanted, onError: () => {} });
  for await (const part of result.fullStream) if (part.type === "error") throw part.error;
  assert.deepEqual(await result.object, object);
});

check("errors", async () => {
  const refused = async (call, status, message) => {
    const error = await failure(call);
    assert(APICallError.isInstance(error), `${error}`);
    assert.deepEqual([error.statusCode, error.isRetryable], [status, false]);
    assert.match(error.message, message);
  };
  await refused(generateText({ ...base, model: provider.chatModel("gpt-9") }), 404, /does not exist/);
  await refused(generateText({ ...base, model: provider.chatModel(routed), temperature: 9 }), 400, /temperature/);
  const streamed = streamText({ ...base, model: provider.chatModel(routed), temperature: 9, onError: () => {} });
  await refused(parts(streamed), 400, /temperature/);
});

check("abort", async () => {
  const endless = { maxOutputTokens: 400, providerOptions: { tokenrouter: { ignore_eos: true } } };
  const left = new AbortController();
  const result = streamText({
    ...base, ...endless, model: provider.chatModel(routed), abortSignal: left.signal, onError: () => {},
  });
  let seen = 0;
  try {
    for await (const part of result.stream) {
      if (part.type === "text-delta" && (seen += 1) === 2) left.abort();
    }
  } catch (error) {
    assert.equal(error.name, "AbortError", `${error}`);
  }
  assert(seen >= 2);
  await idle();
  const whole = new AbortController();
  const many = { maxOutputTokens: 400, providerOptions: { tokenrouter: { ignore_eos: true, n: 48 } } };
  const asked = generateText({ ...base, ...many, model: provider.chatModel(routed), abortSignal: whole.signal });
  const [error] = await Promise.all([failure(asked), onceBusy(() => whole.abort())]);
  assert.equal(error.name, "AbortError", `${error}`);
  await idle();
});

check("text completions", async () => {
  // This provider writes a chat as text itself, with the speakers' names as stop strings.
  const model = provider.completionModel(routed);
  const whole = await generateText({ ...base, model });
  counted(whole.usage);
  const result = streamText({ ...base, model, onError: () => {} });
  const deltas = (await parts(result)).filter((part) => part.type === "text-delta");
  assert.equal(deltas.map((part) => part.text).join(""), whole.text);
});

await main();
