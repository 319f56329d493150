// Throughput and latency: what is made by which model, how long users wait, and how full memory is.

import type { Latency } from "../data.ts";
import { DASHES, chart, type Line, type Spec } from "../chart.ts";
import { h } from "../dom.ts";
import { percent, rate, ratio, short, time, whole } from "../format.ts";
import { quantile, since } from "../hist.ts";
import { card, empty, facts, modelAt, modelName } from "../parts.ts";
import { QUANTILES, LATENCIES } from "../sample.ts";
import { WINDOW_MS, type Store } from "../store.ts";
import { modelColour } from "../theme.ts";

const NAMES = { ttft: "Time to first token", itl: "Between tokens", e2e: "Whole answer" };

export function latencyView(store: Store): HTMLElement {
  const models = store.state?.models ?? [];
  const perModel = (what: string): Line[] =>
    models.map((model, index) => ({ key: `${what}/${model.name}`, label: model.name, colour: modelColour(index), dash: DASHES[index % DASHES.length]! }));
  const quantiles = (what: string): Line[] =>
    QUANTILES.map((q, index) => ({ key: `${what}/${q}`, label: `p${q * 100}`, colour: `--q${index}`, dash: DASHES[index]! }));
  const large = models.at(-1)?.name ?? "";
  const throughput: Spec[] = [
    { title: "Tokens a second", lines: perModel("tokens"), format: (value) => rate(value) },
    { title: `Share of ${large}, the last model`, lines: [{ key: "large", label: large, colour: modelColour(models.length - 1) }], format: percent, top: 1 },
  ];
  const waits: Spec[] = LATENCIES.map((what) => ({ title: NAMES[what], lines: quantiles(what), format: time }));
  const memory: Spec[] = [
    { title: "KV pages in use", lines: perModel("kv"), format: percent, top: 1 },
    { title: "Queue: requests waiting for a batch", lines: perModel("waiting"), format: short, counts: true },
    { title: "Pending: KV kept while another model goes on", lines: perModel("pending"), format: short, counts: true },
  ];
  const charts = (specs: Spec[]) => h("div", { class: "columns" }, ...specs.map((spec) => chart(store, spec)));
  return h(
    "div",
    {},
    card("Throughput", charts(throughput), modelTable(store)),
    card("Latency over the last 30 s", charts(waits), latencyTable(store)),
    card("Memory and queue", charts(memory), memoryFacts(store)),
  );
}

const columns = (...names: string[]) => h("thead", {}, h("tr", {}, ...names.map((name) => h("th", { scope: "col" }, name))));

const scrolled = (label: string, table: HTMLElement) => h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, table);

function modelTable(store: Store): HTMLElement {
  const rows = (store.state?.models ?? []).map(({ name }, index) => {
    const model = () => modelAt(store, index);
    const all = () => store.state?.models.reduce((sum, model) => sum + model.tokens.committed, 0) ?? 0;
    const cell = (text: () => string, key?: string) => h("td", { class: "num", "data-key": key }, text);
    return h(
      "tr",
      {},
      h("th", { scope: "row" }, modelName(name, index)),
      cell(() => rate(store.last(`tokens/${name}`))),
      cell(() => whole(model().tokens.committed), `committed:${name}`),
      cell(() => percent(ratio(model().tokens.committed, all()))),
      cell(() => whole(model().tokens.dropped)),
      cell(() => whole(model().tokens.decode)),
      cell(() => whole(model().tokens.extend)),
      cell(() => whole(model().steps.count), `steps:${name}`),
      cell(() => time(quantile(model().steps.time, 0.5))),
      cell(() => whole(model().steps.failed)),
    );
  });
  const head = columns("model", "tokens/s", "tokens", "share", "dropped", "decoded", "extended", "steps", "step p50", "failed");
  return scrolled("Models since the start", h("table", { class: "data" }, h("caption", {}, "Since the start"), head, h("tbody", {}, ...rows)));
}

function latencyTable(store: Store): HTMLElement {
  const names = store.state?.latency ?? [];
  if (names.length === 0) return empty("No requests yet: try the ", h("a", { href: "#/playground" }, "playground"), ".");
  const rows = names.map(({ model_name }, index) => {
    const now = (): Latency => store.state?.latency[index] ?? names[index]!;
    const before = () => store.ago(WINDOW_MS).latency.find((one) => one.model_name === model_name);
    const quantiles = LATENCIES.flatMap((what) =>
      QUANTILES.map((q) =>
        h("td", { class: "num" }, () => {
          const past = before()?.[what];
          return time(quantile(past ? since(now()[what], past) : now()[what], q));
        }),
      ),
    );
    const done = () => Object.values(now().finished).reduce((sum, count) => sum + count, 0);
    const why = () => Object.entries(now().finished).filter(([, count]) => count > 0).map(([why, count]) => `${why} ${whole(count)}`).join(", ") || "–";
    return h(
      "tr",
      {},
      h("th", { scope: "row" }, model_name),
      ...quantiles,
      h("td", { class: "num", "data-key": `finished:${model_name}` }, () => whole(done())),
      h("td", { class: "num" }, why),
      h("td", { class: "num", "data-key": `generated:${model_name}` }, () => whole(now().generation_tokens)),
    );
  });
  const head = h(
    "thead",
    {},
    h("tr", {}, h("th", { rowspan: 2, scope: "col" }, "served name"), ...LATENCIES.map((what) => h("th", { colspan: 3, scope: "colgroup" }, NAMES[what])), ...["requests", "ended by", "tokens"].map((name) => h("th", { rowspan: 2, scope: "col" }, name))),
    h("tr", {}, ...LATENCIES.flatMap(() => QUANTILES.map((q) => h("th", { scope: "col" }, `p${q * 100}`)))),
  );
  return scrolled("Latency by served name", h("table", { class: "data" }, h("caption", {}, "Last 30 s by served name; counts since the start"), head, h("tbody", {}, ...rows)));
}

function memoryFacts(store: Store): HTMLElement {
  const list = (store.state?.models ?? []).map(({ name }, index) => {
    const kv = () => modelAt(store, index).kv;
    return h(
      "div",
      {},
      h("h3", {}, modelName(name, index)),
      facts([
        ["pages in use", () => `${whole(kv().pages_used)} of ${whole(kv().pages_total)}`],
        ["pages cached", () => whole(kv().pages_cached)],
        ["tokens a page", () => whole(kv().page_tokens)],
        ["prefix hits", () => percent(ratio(kv().prefix_hit_tokens, kv().prefix_query_tokens))],
        ["tokens hit", () => short(kv().prefix_hit_tokens)],
        ["preemptions", () => whole(kv().preemptions)],
      ]),
    );
  });
  return h("div", { class: "columns" }, ...list);
}
