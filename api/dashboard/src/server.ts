// How the page asks the server: with the key, if there is one, and again when the connection is lost.

import type { Requests, State } from "./data.ts";
import { events } from "./sse.ts";

const KEY = "tokenrouter-key";
const PAUSE_MIN_MS = 500;
const PAUSE_MAX_MS = 8_000;
/** States come twice a second; after so much silence the connection counts as lost. */
const SILENCE_MS = 10_000;

export const saveKey = (key: string): void => sessionStorage.setItem(KEY, key);

/** The page is at ROOT/dashboard/. */
const url = (path: string) => new URL(`../${path}`, new URL(".", location.href));

/** A request to the server; it fails with the server's own words. */
export async function ask(path: string, init: RequestInit = {}): Promise<Response> {
  const headers = new Headers(init.headers);
  const key = sessionStorage.getItem(KEY);
  if (key !== null) headers.set("authorization", `Bearer ${key}`);
  const response = await fetch(url(path), { ...init, headers });
  if (!response.ok) throw await failure(response);
  return response;
}

/** The server refused. */
export class Refused extends Error {
  readonly status: number;

  constructor(status: number, message: string) {
    super(message);
    this.status = status;
  }
}

async function failure(response: Response): Promise<Refused> {
  const text = await response.text();
  try {
    return new Refused(response.status, JSON.parse(text).error.message);
  } catch {
    return new Refused(response.status, `${response.status} ${response.statusText}`);
  }
}

export interface Listener {
  state(state: State): void;
  requests(requests: Requests): void;
  connected(): void;
  lost(why: string, pause_ms: number): void;
  /** Resolves when there is a new key. */
  key(why: string): Promise<void>;
}

/** Follows the server for as long as the page is open. */
export async function follow(listener: Listener): Promise<never> {
  let pause = PAUSE_MIN_MS;
  for (;;) {
    let why = "the server closed the connection";
    try {
      await once(listener, () => (pause = PAUSE_MIN_MS));
    } catch (error) {
      if (error instanceof Refused && error.status === 401) {
        await listener.key(error.message);
        continue;
      }
      // What fetch() throws when nobody answers is told by each browser in its own words.
      if (error instanceof TypeError) why = "the server does not answer";
      else why = error instanceof Error ? error.message : String(error);
    }
    listener.lost(why, pause);
    await new Promise((resolve) => setTimeout(resolve, pause));
    pause = Math.min(pause * 2, PAUSE_MAX_MS);
  }
}

async function once(listener: Listener, heard: () => void): Promise<void> {
  const quiet = new AbortController();
  let timer = 0;
  const wait = () => {
    clearTimeout(timer);
    timer = window.setTimeout(() => quiet.abort(new Error("the server is silent")), SILENCE_MS);
  };
  wait();
  try {
    const response = await ask("dashboard/events", { signal: quiet.signal, cache: "no-store" });
    if (response.body === null) throw new Error("an answer without a body");
    listener.connected();
    for await (const event of events(response.body)) {
      wait();
      heard();
      if (event.name === "state") listener.state(JSON.parse(event.data));
      if (event.name === "requests") listener.requests(JSON.parse(event.data));
    }
  } finally {
    clearTimeout(timer);
  }
}
