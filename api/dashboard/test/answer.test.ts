import assert from "node:assert/strict";
import { test } from "node:test";
import type { Token } from "../src/chat.ts";
import { tokenFacts } from "../src/views/answer.ts";

const token = (text: string, model: string, entropy: number | null, ms: number): Token => ({ text, model, entropy, ms });

test("a token tells who made it, and what was decided then", () => {
  const tokens = [token(" The", "small", 0.01, 5), token(" sum", "large", null, 2), token(".", "large", 0.2, 1)];
  const facts = (at: number) => Object.fromEntries(tokenFacts(tokens, at));
  assert.deepEqual(facts(0), { token: '" The"', "made by": "small", entropy: "0.010", "decision after it": "handed to large", time: "5.00 ms" });
  assert.deepEqual(facts(1), { token: '" sum"', "made by": "large, which took over from small", entropy: "not measured", "decision after it": "stayed", "time, hop included": "2.00 ms" });
  assert.equal(facts(2)["decision after it"], "the last one");
  tokens[1]!.dropped = { model: "small", entropy: 0.3125, score: null };
  assert.equal(facts(1)["in place of"], "a candidate of small: entropy 0.313");
  tokens[1]!.dropped = { model: "small", entropy: null, score: 0.9 };
  assert.equal(facts(1)["in place of"], "a candidate of small: score 0.900, entropy not measured");
});
