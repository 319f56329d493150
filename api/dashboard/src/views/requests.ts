// Recent requests, each with a lane per model: where it waited, ran, or was pending while another model went on.

import type { Request } from "../data.ts";
import { h, keyed, svg } from "../dom.ts";
import { percent, ratio, time, whole } from "../format.ts";
import { bars, lanes, ticks, took, type Bar } from "../gantt.ts";
import { empty } from "../parts.ts";
import type { Store } from "../store.ts";
import { modelClass } from "../theme.ts";

const KINDS: Record<Bar["kind"], string> = { waiting: "waiting for a batch", running: "running", pending: "pending: KV kept, another model goes on" };
const LANE = 18;
const AXIS = 18;
/** Rows of the table of one request. */
const TABLE_ROWS = 200;

export function requestsView(store: Store): HTMLElement {
  const shared = h("input", { type: "checkbox", id: "shared" });
  const hold = h("input", { type: "checkbox", id: "hold" });
  let held = store.requests;
  const shown = () => (hold.checked ? held : (held = store.requests));
  const scale = (request: Request) =>
    shared.checked ? Math.max(...shown().requests.map((one) => took(one, shown().now_ms))) : took(request, shown().now_ms);
  const list = h("ol", { class: "requests" });
  const cards = new Map<string, { version: string; element: HTMLElement }>();
  const element = (request: Request) => {
    const version = `${request.ended_ms ?? shown().now_ms} ${request.spans.length} ${request.tokens} ${Math.round(scale(request))}`;
    const known = cards.get(request.id);
    if (known?.version === version) return known.element;
    const open = known?.element.querySelector("details")?.open ?? false;
    const made = requestItem(store, request, [shown().now_ms, scale(request)], open);
    cards.set(request.id, { version, element: made });
    return made;
  };
  keyed(
    list,
    () => `${shown().now_ms} ${shared.checked}`,
    () => {
      const { requests } = shown();
      const items = requests.map(element);
      const ids = new Set(requests.map((request) => request.id));
      for (const id of cards.keys()) if (!ids.has(id)) cards.delete(id);
      return items;
    },
  );
  return h(
    "div",
    {},
    h(
      "div",
      { class: "bar-of-tools" },
      legend(),
      h("label", {}, shared, " one scale for all"),
      h("label", {}, hold, " hold still"),
    ),
    h("div", { hidden: () => shown().requests.length > 0 }, empty("No requests yet: try the ", h("a", { href: "#/playground" }, "playground"), ".")),
    list,
  );
}

function legend(): HTMLElement {
  const entries = (Object.keys(KINDS) as Bar["kind"][]).map((kind) => {
    const sample = svg("svg", { width: 26, height: 12, "aria-hidden": "true", class: "m0" }, ...shape(kind, { x: "0", width: "26", y: 1, height: 10 }));
    return h("li", {}, sample, KINDS[kind]);
  });
  return h("ul", { class: "legend" }, ...entries);
}

/** Waiting is hatched, running is full, pending is a line: told apart without colour. */
function shape(kind: Bar["kind"], at: { x: string; width: string; y: number; height: number }): SVGElement[] {
  if (kind !== "pending") return [svg("rect", { class: kind, ...at, rx: 1.5 })];
  const middle = at.y + at.height / 2;
  return [svg("rect", { class: "pending", ...at, y: middle - 1.5, height: 3 })];
}

function requestItem(store: Store, request: Request, [now_ms, scale]: [number, number], open: boolean): HTMLElement {
  const models = store.state?.models.map((model) => model.name) ?? [];
  const names = lanes(request, models);
  const shares = models.filter((name) => request.by_model[name]).map((name) => `${name} ${whole(request.by_model[name])} (${percent(ratio(request.by_model[name] ?? 0, request.tokens))})`);
  const state = request.outcome ?? (request.ended_ms === null ? "live" : "ended");
  const title = h(
    "header",
    {},
    h("b", { class: `outcome ${state}` }, state),
    h("span", { class: "num" }, time(took(request, now_ms) / 1000)),
    h("span", {}, `${whole(request.prompt_tokens)} → ${whole(request.tokens)} tokens`),
    h("span", {}, shares.join(", ")),
    h("span", { class: "note" }, request.routed ? "routed" : `${request.entry} alone`),
    h("code", { class: "note" }, request.id),
  );
  const all = bars(request, names, now_ms, scale);
  return h("li", { class: "card request" }, title, h("div", { class: "gantt" }, laneNames(models, names), picture(models, names, all, scale)), spanTable(names, all, request, open));
}

const laneNames = (models: string[], names: string[]) =>
  h("ul", { "aria-hidden": "true" }, ...names.map((name) => h("li", { class: `model ${modelClass(models.indexOf(name))}` }, name)));

function picture(models: string[], names: string[], all: Bar[], scale: number): SVGElement {
  const height = names.length * LANE + AXIS;
  const share = (part: number) => `${(100 * Math.min(1, Math.max(0, part))).toFixed(3)}%`;
  const axis = ticks(scale).flatMap((tick) => {
    const x = share(tick / Math.max(scale, 1));
    const anchor = tick === 0 ? "start" : tick > scale * 0.9 ? "end" : "middle";
    return [svg("line", { class: "tick", x1: x, x2: x, y1: 0, y2: height - AXIS }), svg("text", { x, y: height - 4, "text-anchor": anchor }, time(tick / 1000))];
  });
  const drawn = all.map((bar) => {
    const tip = `${names[bar.lane]}: ${KINDS[bar.kind]}, ${time((bar.to_ms - bar.from_ms) / 1000)}${bar.steps > 0 ? `, ${bar.steps} steps` : ""}`;
    const at = { x: share(bar.x), width: share(Math.max(bar.width, 0.0008)), y: bar.lane * LANE + 3, height: LANE - 6 };
    return svg("g", { class: modelClass(models.indexOf(names[bar.lane] ?? "")) }, svg("title", {}, tip), ...shape(bar.kind, at));
  });
  return svg("svg", { class: "lanes", width: "100%", height, role: "img", "aria-label": "timeline; its numbers are in the table below" }, ...axis, ...drawn);
}

function spanTable(names: string[], all: Bar[], request: Request, open: boolean): HTMLElement {
  const body = h("tbody");
  const head = h("tr", {}, ...["from", "model", "what", "for", "steps"].map((name) => h("th", { scope: "col" }, name)));
  const details = h("details", {}, h("summary", {}, "spans as a table"), h("table", { class: "data" }, h("thead", {}, head), body));
  const fill = () => {
    if (!details.open || body.childElementCount > 0) return;
    body.append(
      ...all.slice(0, TABLE_ROWS).map((bar) =>
        h(
          "tr",
          {},
          h("td", { class: "num" }, time((bar.from_ms - request.arrived_ms) / 1000)),
          h("td", {}, names[bar.lane] ?? ""),
          h("td", {}, KINDS[bar.kind]),
          h("td", { class: "num" }, time((bar.to_ms - bar.from_ms) / 1000)),
          h("td", { class: "num" }, bar.steps > 0 ? whole(bar.steps) : "–"),
        ),
      ),
    );
  };
  details.addEventListener("toggle", fill);
  if (open) details.open = true;
  return details;
}
