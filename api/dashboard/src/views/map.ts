// The live map: every subserver with its actors, and what goes between them.

import { ROLES, type Actor, type Model, type Role } from "../data.ts";
import { DASHES, chart, type Line } from "../chart.ts";
import { Scope, h, keyed, type Child } from "../dom.ts";
import { chance, percent, rate, ratio, short, time, whole } from "../format.ts";
import { quantile, since } from "../hist.ts";
import { card, empty, facts, modelAt, modelName } from "../parts.ts";
import { actorKey } from "../sample.ts";
import { WINDOW_MS, type Store } from "../store.ts";
import { modelClass, modelColour } from "../theme.ts";
import { edges, type Edge } from "./edges.ts";
import { log, panel } from "./panel.ts";

/** Whom an actor sends most of its messages to. */
const FLOWS: [Role, Role][] = [
  ["client", "batcher"],
  ["batcher", "decode"],
  ["decode", "executor"],
  ["executor", "decode"],
  ["decode", "inter_model"],
  ["inter_model", "batcher"],
];

const STATES: Record<Actor["state"], string> = { idle: "○ idle", busy: "● busy", lost: "✕ lost", elsewhere: "◇ elsewhere" };

/** `selected` is `MODEL/ROLE`. */
export function mapView(store: Store, selected: () => string | null): HTMLElement {
  const models = store.state?.models ?? [];
  const side = h("div", { class: "side" });
  keyed(side, () => selected() ?? "", () => {
    const [model, role] = place(store, selected());
    return model === null || role === null ? [] : [panel(store, model, role)];
  });
  const content = h("div", {}, actorMap(store, selected), models.length > 2 && hopTable(store), charts(store));
  return h(
    "div",
    {},
    summary(store),
    h("div", { class: () => (selected() === null ? "split" : "split open") }, content, side),
    log(store, "Supervision log", () => true),
  );
}

function place(store: Store, selected: string | null): [number, Role] | [null, null] {
  const at = selected?.lastIndexOf("/") ?? -1;
  const model = store.state?.models.findIndex((model) => model.name === selected?.slice(0, at)) ?? -1;
  const role = selected?.slice(at + 1) as Role;
  return model >= 0 && role in ROLES ? [model, role] : [null, null];
}

function summary(store: Store): HTMLElement {
  const state = () => store.state!;
  return facts(
    [
      ["router", () => `${state().router.name}: ${state().router.algorithm}`],
      ["batching", () => state().router.policy],
      ["execution", () => state().router.execution.replaceAll("_", " ")],
      ["requests", () => `${whole(state().live)} of ${whole(state().live_max)}`, "live"],
      ["taking requests", () => (state().open ? "yes" : "no, it is stopping")],
    ],
    "wide",
  );
}

function actorMap(store: Store, selected: () => string | null): HTMLElement {
  const models = store.state?.models ?? [];
  const boxes = models.map((_, index) => subserver(store, index, selected));
  const between: Edge[] = [];
  models.forEach((model, from) =>
    model.hops.forEach((hop, at) => {
      const to = models.findIndex((other) => other.name === hop.to);
      if (to < 0 || to === from) return;
      const p = () => measured(modelAt(store, from), hop.to);
      const hops = () => hopRate(store, from, at);
      const label = [h("b", {}, h("span", {}, model.name), " → ", h("span", {}, hop.to)), h("span", { "data-key": `hops:${from}:${to}` }, () => rate(hops(), "hops")), h("span", {}, () => `p = ${chance(p())}`)];
      between.push({ from: boxes[from]!, to: boxes[to]!, rate: hops, kind: modelClass(to), label });
    }),
  );
  const map = h("div", { class: `map n${Math.min(models.length, 3)}` }, ...boxes);
  edges(map, between);
  return h("section", { class: "frame", "aria-label": "Actors" }, map);
}

/** How often control went there after a step; null before there was one. */
function measured(model: Model, to: string | undefined): number | null {
  const known = model.hops.some((hop) => hop.p > 0);
  return known ? (model.hops.find((hop) => hop.to === to)?.p ?? null) : null;
}

/** Hops a second over the window. */
function hopRate(store: Store, from: number, at: number): number | null {
  const [now, before] = [store.state!, store.ago(WINDOW_MS / 6)];
  const count = (state: typeof now) => state.models[from]?.hops[at]?.count ?? 0;
  return ratio(count(now) - count(before), (now.now_ms - before.now_ms) / 1000) ?? 0;
}

function subserver(store: Store, index: number, selected: () => string | null): HTMLElement {
  const model = () => modelAt(store, index);
  const { name, elsewhere } = model();
  const requests = () => model().requests;
  const stay = () => measured(model(), name);
  const kv = () => model().kv;
  const cells = new Map(model().actors.map((actor, at) => [actor.role, actorCell(store, [index, at], selected)]));
  const grid = h("div", { class: "actors" }, ...cells.values());
  edges(grid, flows(store, index, cells));
  return h(
    "section",
    { class: `subserver ${modelClass(index)}`, "aria-label": `Subserver ${name}` },
    h("header", {}, h("h2", {}, modelName(name, index)), elsewhere !== null && h("span", { class: "note" }, `in another process at ${elsewhere}`)),
    facts([
      ["tokens", () => rate(store.last(`tokens/${name}`)), `rate:${name}`],
      ["threshold B", () => whole(model().batching.threshold)],
      ["stays", () => `p = ${chance(stay())}`],
      ["KV in use", () => percent(ratio(kv().pages_used, kv().pages_total))],
    ]),
    grid,
    facts(
      [
        ["open streams", () => whole(requests().open_streams)],
        ["waiting", () => whole(requests().waiting)],
        ["stalled", () => whole(requests().stalled)],
        ["running", () => whole(requests().running)],
        ["pending", () => whole(requests().pending)],
      ],
      "states",
    ),
  );
}

function flows(store: Store, index: number, cells: Map<Role, HTMLElement>): Edge[] {
  return FLOWS.flatMap(([from, to]) => {
    const [a, b] = [cells.get(from), cells.get(to)];
    const messages = () => store.last(`${actorKey(modelAt(store, index).name, to)}/messages`);
    return a && b ? [{ from: a, to: b, rate: messages, kind: "inner" }] : [];
  });
}

function actorCell(store: Store, [index, at]: [number, number], selected: () => string | null): HTMLElement {
  const actor = () => modelAt(store, index).actors[at]!;
  const name = modelAt(store, index).name;
  const { role } = actor();
  const id = `${name}/${role}`;
  const key = actorKey(name, role);
  const open = () => selected() === id;
  const restarts = () => Math.max(0, actor().lives - 1);
  const wait = () => {
    const before = store.ago(WINDOW_MS).models[index]?.actors[at]?.mailbox.wait;
    return before === undefined ? null : quantile(since(actor().mailbox.wait, before), 0.5);
  };
  const children: Child[] = [
    h("span", { class: "role" }, ROLES[role]),
    h("span", { class: "state" }, () => STATES[actor().state]),
    h("span", { class: "num" }, () => rate(store.last(`${key}/messages`), "msg")),
    h("span", { class: "num" }, nowrap(() => `${short(actor().mailbox.depth)} queued`), nowrap(() => `waits ${time(wait())}`)),
    h("span", { class: "restarts", hidden: () => restarts() === 0, "data-key": `restarts:${id}` }, () => `↻ restarted ${restarts()}×`),
    h("span", { class: "error", hidden: () => actor().last_error === null }, () => actor().last_error ?? ""),
  ];
  const target = () => (open() ? "#/" : `#/?actor=${encodeURIComponent(id)}`);
  const link = h("a", { class: () => `actor ${role} ${actor().state}`, href: target, "data-actor": id, "aria-current": () => (open() ? "true" : null) }, ...children);
  // Selection may change what is below the map, never where one is.
  Scope.follow(() => link.classList.toggle("chosen", open()));
  return link;
}

const nowrap = (text: () => string) => h("span", { class: "nowrap" }, text);

/** What goes on, as lines. */
function charts(store: Store): HTMLElement {
  const models = store.state?.models ?? [];
  const lines = (what: string, label: (name: string) => string): Line[] =>
    models.map(({ name }, index) => ({ key: `${what}/${name}`, label: label(name), colour: modelColour(index), dash: DASHES[index % DASHES.length]! }));
  const specs = [
    { title: "Tokens a second", lines: lines("tokens", (name) => name), format: (value: number | null) => rate(value) },
    { title: "Hops a second", lines: lines("hops", (name) => `from ${name}`), format: (value: number | null) => rate(value) },
    { title: "Requests live", lines: [{ key: "live", label: "all", colour: "--accent" }], format: short, counts: true },
  ];
  return card("Last minutes", h("div", { class: "columns narrow" }, ...specs.map((spec) => chart(store, spec))));
}

/** With more than two models the map alone is hard to read. */
function hopTable(store: Store): HTMLElement {
  const models = store.state?.models ?? [];
  if (models.length === 0) return empty("no models");
  const rows = models.map((model, from) =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, modelName(model.name, from)),
      ...model.hops.map((_, at) =>
        h("td", { class: "num" }, () => `${chance(measured(modelAt(store, from), models[at]?.name))} · ${rate(hopRate(store, from, at))}`),
      ),
    ),
  );
  const head = h("tr", {}, h("th", { scope: "col" }, "from"), ...models.map((model) => h("th", { scope: "col" }, `to ${model.name}`)));
  return card("Hops: p and hops a second", h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Hops" }, h("table", { class: "data" }, h("thead", {}, head), h("tbody", {}, ...rows))));
}
