// Clients that chat until they are told to stop.

import { args } from "./browser.mjs";

const PAUSE_MS = 20;

/** Starts them; the function it returns stops them and resolves to how many answers there were. */
export function load(models, clients = 4) {
  let going = true;
  let asked = 0;
  let failed = null;
  const client = async () => {
    while (going && failed === null) {
      const turn = asked++;
      const content = `Emma has ${turn % 90} roses. Emma buys ${turn % 37} more. How many roses does Emma have?`;
      const body = { model: models[turn % models.length], messages: [{ role: "user", content }], max_tokens: 24 + (turn % 50), stream: true, temperature: 0.7, seed: turn };
      const response = await fetch(`${args.url}/v1/chat/completions`, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });
      const text = await response.text();
      if (!text.trimEnd().endsWith("data: [DONE]") || text.includes('"error"')) failed = text.slice(-400);
      await new Promise((resolve) => setTimeout(resolve, PAUSE_MS));
    }
  };
  const all = Promise.all(Array.from({ length: clients }, client));
  return async () => {
    going = false;
    await all;
    if (failed !== null) throw new Error(`an answer did not end well: ${failed}`);
    return asked;
  };
}
