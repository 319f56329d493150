// One streamed answer of the server, token by token.

import { ask } from "./server.ts";
import { events } from "./sse.ts";

export interface Message {
  role: "user" | "assistant";
  content: string;
}

export interface Token {
  text: string;
  model: string;
  /** Normalised, 0 to 1. */
  entropy: number | null;
  /** The candidate of another model that was dropped in its place. */
  dropped?: { model: string; entropy: number | null; score: number | null };
  /** Since the token before it, or since the request. */
  ms: number;
}

export interface Wish {
  model: string;
  messages: Message[];
  max_tokens: number;
  temperature: number;
  routing?: Record<string, number>;
}

interface Chunk {
  choices?: { delta?: { content?: string | null }; finish_reason?: string | null; token_details?: Token[] | null }[];
  usage?: { completion_tokens: number } | null;
  error?: { message: string };
}

/** How an answer ended. */
export interface End {
  finish: string;
  tokens: number;
  seconds: number;
  first_seconds: number | null;
}

/** Streams an answer; `text` is what users read, `tokens` what made it. */
export async function answer(wish: Wish, signal: AbortSignal, hear: (tokens: Token[], text: string) => void): Promise<End> {
  const began = performance.now();
  const end: End = { finish: "", tokens: 0, seconds: 0, first_seconds: null };
  const body = { ...wish, stream: true, stream_options: { include_usage: true }, return_token_details: true };
  const headers = { "content-type": "application/json" };
  const response = await ask("v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
  if (response.body === null) throw new Error("an answer without a body");
  for await (const event of events(response.body)) {
    if (event.data === "[DONE]") break;
    const chunk: Chunk = JSON.parse(event.data);
    if (chunk.error) throw new Error(chunk.error.message);
    const choice = chunk.choices?.[0];
    const tokens = choice?.token_details ?? [];
    if (tokens.length > 0) end.first_seconds ??= (performance.now() - began) / 1000;
    if (choice) hear(tokens, choice.delta?.content ?? "");
    if (choice?.finish_reason) end.finish = choice.finish_reason;
    if (chunk.usage) end.tokens = chunk.usage.completion_tokens;
  }
  end.seconds = (performance.now() - began) / 1000;
  return end;
}

export interface Param {
  name: string;
  kind: { type: string; minimum?: number; maximum?: number };
  per_request: boolean;
  default: string;
  doc: string;
}

export interface Router {
  name: string;
  summary: string;
  params: Param[];
  active: boolean;
}

/** Served names (the routed one first) and the router in use. */
export async function served(): Promise<{ names: string[]; router: Router | null }> {
  const [models, routers] = await Promise.all([ask("v1/models"), ask("v1/routers")]);
  const names: string[] = (await models.json()).data.map((model: { id: string }) => model.id);
  const list: Router[] = (await routers.json()).data;
  return { names, router: list.find((router) => router.active) ?? null };
}
