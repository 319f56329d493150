// Batching: the thresholds and why they are so, how large batches are, how long requests wait for them, and what the
// throughput model says about it all.

import type { Model, Release } from "../data.ts";
import { DASHES, chart } from "../chart.ts";
import { h } from "../dom.ts";
import { counted, percent, rate, ratio, short, time, whole } from "../format.ts";
import { quantile, since } from "../hist.ts";
import { barTable, card, empty, facts, modelAt, modelName, type BarRow } from "../parts.ts";
import { WINDOW_MS, type Store } from "../store.ts";
import { modelClass, modelColour } from "../theme.ts";

const RELEASES: Record<Release, string> = {
  threshold: "threshold reached",
  no_more_work: "nobody else can come",
  timeout: "waited long enough",
  pinned: "a request may not wait",
};

/** Models take turns, which the throughput model does not describe. */
const TURNS = ["model_sync", "step_sync"];

/** More sizes than that are shown in groups. */
const ROWS_MAX = 12;

export function batchingView(store: Store): HTMLElement {
  const models = store.state?.models ?? [];
  const large = models.map((model, index) => ({ label: model.name, colour: modelColour(index), dash: DASHES[index % DASHES.length]! }));
  const lines = (what: string) => large.map((line) => ({ ...line, key: `${what}/${line.label}` }));
  return h(
    "div",
    {},
    h("div", { class: "columns" }, ...models.map((_, index) => modelCard(store, index))),
    card(
      "Throughput model and measurement",
      h(
        "div",
        { class: "columns two" },
        chart(store, {
          title: "Tokens a second: predicted T(B) and measured",
          lines: [
            { key: "measured", label: "measured", colour: "--accent" },
            { key: "predicted", label: "predicted T(B)", colour: "--muted", dash: [6, 4] },
          ],
          format: (value) => rate(value),
        }),
        chart(store, { title: "Threshold B", lines: lines("threshold"), format: short, counts: true }),
        chart(store, { title: "Requests in a batch, mean", lines: lines("batch"), format: short }),
        chart(store, { title: "Requests that wait for a batch", lines: lines("waiting"), format: short, counts: true }),
      ),
      prediction(store),
    ),
    planner(store),
  );
}

function prediction(store: Store): HTMLElement {
  const state = () => store.state!;
  const text = () => {
    const { prediction, live } = state();
    const { execution } = state().router;
    if (prediction === null && TURNS.includes(execution)) return `No prediction: the throughput model describes models that step at the same time; with execution ${execution} they take turns.`;
    if (prediction === null) return `No prediction now (${counted(live, "live request")}): the throughput model learns from steps, for as many requests as are live.`;
    return `For ${counted(prediction.live, "live request")} and the thresholds of now the throughput model says ${rate(prediction.tokens_per_second, "tokens")}; measured: ${rate(store.last("measured"), "tokens")}.`;
  };
  return h("p", { class: "note" }, text);
}

function planner(store: Store): HTMLElement {
  const planner = () => store.state?.planner ?? null;
  if (planner() === null) return card("Planner", empty(`No planner: the policy is ${store.state?.router.policy ?? "unknown"}. With the policy adaptive, thresholds are planned again while serving.`));
  return card(
    "Planner",
    facts([
      ["looks", () => whole(planner()?.looks)],
      ["planned", () => whole(planner()?.planned)],
      ["adopted", () => whole(planner()?.adopted)],
      ["failed", () => whole(planner()?.failed)],
      ["gain of the last plan", () => percent(planner()?.gain)],
    ]),
    h("p", { class: "error", hidden: () => planner()?.last_error == null }, () => planner()?.last_error ?? ""),
  );
}

function modelCard(store: Store, index: number): HTMLElement {
  const model = () => modelAt(store, index);
  const batching = () => model().batching;
  const wait = (q: number) => () => {
    const before = store.ago(WINDOW_MS).models[index];
    return time(before ? quantile(since(batching().wait, before.batching.wait), q) : null);
  };
  const kind = modelClass(index);
  return card(
    modelName(model().name, index),
    h("p", { class: "big" }, h("b", { class: "num" }, () => `B = ${whole(batching().threshold)}`), h("span", {}, () => `for N = ${counted(batching().live, "live request")}`)),
    h("p", { class: "note" }, () => batching().why),
    facts([
      ["wait p50", wait(0.5)],
      ["wait p99", wait(0.99)],
      ["mean batch", () => short(ratio(batching().rows, model().steps.count))],
      ["steps", () => whole(model().steps.count)],
      ["oldest waits", () => (batching().oldest_ms === null ? "nobody" : time((batching().oldest_ms ?? 0) / 1000))],
    ]),
    barTable("Batch sizes since the start", ["requests", "steps", "share"], () => sizes(model(), kind)),
    barTable("Why batches went", ["reason", "batches", "share"], () => releases(model(), kind)),
  );
}

/** Counts as rows; the longest bar is the whole width. */
function rows(counts: [label: string, count: number][], kind: string): BarRow[] {
  const all = counts.reduce((sum, [, count]) => sum + count, 0);
  const most = Math.max(1, ...counts.map(([, count]) => count));
  return counts.map(([label, count]) => ({
    label,
    share: count / most,
    texts: [whole(count), percent(ratio(count, all))],
    kind,
  }));
}

function sizes(model: Model, kind: string): BarRow[] {
  const last = model.steps.sizes.findLastIndex((count) => count > 0) + 1;
  const group = Math.max(1, Math.ceil(last / ROWS_MAX));
  const counts: [string, number][] = [];
  for (let from = 0; from < Math.max(last, 1); from += group) {
    const count = model.steps.sizes.slice(from, from + group).reduce((sum, steps) => sum + steps, 0);
    counts.push([group === 1 ? `${from + 1}` : `${from + 1}–${from + group}`, count]);
  }
  return rows(counts, kind);
}

const releases = (model: Model, kind: string): BarRow[] =>
  rows((Object.keys(RELEASES) as Release[]).map((why) => [RELEASES[why], model.batching.released[why] ?? 0]), kind);
