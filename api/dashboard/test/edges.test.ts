import assert from "node:assert/strict";
import { test } from "node:test";
import { crosses } from "../src/views/edges.ts";

const box = { x: 10, y: 100, width: 200, height: 50 };

test("a way through a box is told from one past it", () => {
  assert.ok(crosses(box, [50, 0], [50, 300]), "from above to below");
  assert.ok(crosses(box, [50, 300], [60, 0]), "and back, slanted");
  assert.ok(crosses(box, [0, 110], [300, 140]), "across");
  assert.ok(!crosses(box, [50, 0], [50, 90]), "it ends before");
  assert.ok(!crosses(box, [220, 0], [220, 300]), "beside it");
  assert.ok(!crosses(box, [0, 0], [300, 40]), "above it");
  assert.ok(!crosses(box, [0, 140], [60, 300]), "past its corner");
});
