// One actor: what it says of itself and its last minutes; and what supervision did.

import { ROLES, type LogEntry, type Role } from "../data.ts";
import { chart } from "../chart.ts";
import { h, keyed } from "../dom.ts";
import { isDuration, plain, rate, short, time, whole, words } from "../format.ts";
import { card, empty, facts, modelAt, modelName } from "../parts.ts";
import { actorKey } from "../sample.ts";
import type { Store } from "../store.ts";

export function panel(store: Store, index: number, role: Role): HTMLElement {
  const { name } = modelAt(store, index);
  const actor = () => modelAt(store, index).actors.find((actor) => actor.role === role);
  const key = actorKey(name, role);
  const one = (title: string, what: string, format: (value: number | null) => string, counts = false) =>
    chart(store, { title, lines: [{ key: `${key}/${what}`, label: "now", colour: "--accent" }], format, counts, height: 110 });
  const heading = h("h2", { id: "panel-title", tabindex: -1 }, `${ROLES[role]} of `, modelName(name, index));
  return h(
    "aside",
    { class: "card panel", "aria-labelledby": "panel-title" },
    h("header", {}, heading, h("a", { class: "close", href: "#/", "aria-label": "close" }, "✕")),
    facts([
      ["state", () => actor()?.state ?? "gone"],
      ["messages", () => whole(actor()?.mailbox.messages)],
      ["mailbox now", () => whole(actor()?.mailbox.depth)],
      ["mailbox most", () => whole(actor()?.mailbox.depth_max)],
      ["restarts", () => whole((actor()?.lives ?? 1) - 1)],
    ]),
    h("p", { class: "error", hidden: () => !actor()?.last_error }, () => `last error: ${actor()?.last_error ?? ""}`),
    one("Messages", "messages", (value) => rate(value)),
    one("Mailbox depth", "depth", short, true),
    one("Wait in the mailbox, p99", "wait", time),
    h("h3", {}, "Snapshot"),
    snapshot(() => actor()?.snapshot ?? {}),
    log(store, "Its log", (entry) => entry.model === name && entry.actor === role),
  );
}

/** Nested objects as `outer inner`. */
function flat(value: Record<string, unknown>, prefix = ""): [string, unknown][] {
  return Object.entries(value).flatMap(([name, inner]) => {
    const label = `${prefix}${words(name)}`;
    const nested = typeof inner === "object" && inner !== null && !Array.isArray(inner) && !isDuration(inner);
    return nested ? flat(inner as Record<string, unknown>, `${label} `) : [[label, inner] as [string, unknown]];
  });
}

function snapshot(read: () => Record<string, unknown>): HTMLElement {
  const body = h("tbody");
  keyed(
    body,
    () => flat(read()).map(([name]) => name).join("|"),
    () =>
      flat(read()).map(([name], at) =>
        h("tr", {}, h("th", { scope: "row" }, name), h("td", { class: "num" }, () => plain(flat(read())[at]?.[1]))),
      ),
  );
  return h("table", { class: "data" }, body);
}

/** Supervision events, newest first. */
export function log(store: Store, title: string, wanted: (entry: LogEntry) => boolean): HTMLElement {
  const entries = () => (store.state?.log ?? []).filter(wanted).reverse();
  const list = h("div", {});
  const row = (entry: LogEntry) => {
    const ago = () => `${time(Math.max(0, Math.round(((store.state?.now_ms ?? 0) - entry.at_ms) / 1000)))} ago`;
    const role = ROLES[entry.actor as Role] ?? words(entry.actor);
    return h("li", {}, h("span", { class: "when num" }, ago), h("b", {}, `${entry.model} · ${role}`), h("span", {}, entry.what));
  };
  keyed(
    list,
    () => entries().map((entry) => `${entry.at_ms}${entry.model}${entry.actor}${entry.what}`).join("|"),
    () => (entries().length === 0 ? [empty("nothing failed since the server started")] : [h("ul", { class: "log" }, ...entries().map(row))]),
  );
  return card(title, list);
}
