// What several views are made of.

import type { Child } from "./dom.ts";
import { h, keyed, svg } from "./dom.ts";
import type { Model } from "./data.ts";
import type { Store } from "./store.ts";
import { modelClass } from "./theme.ts";

/** The model of that place now; views are built again when models change. */
export function modelAt(store: Store, index: number): Model {
  const model = store.state?.models[index];
  if (model === undefined) throw new Error(`no model ${index}`);
  return model;
}

let ids = 0;

/** A part of a view with a heading. */
export function card(title: Child, ...children: Child[]): HTMLElement {
  const id = `card-${ids++}`;
  return h("section", { class: "card", "aria-labelledby": id }, h("h2", { id }, title), ...children);
}

/** A model's name in its colour, which is also its mark. */
export const modelName = (name: string, index: number): HTMLElement => h("span", { class: `model ${modelClass(index)}` }, name);

/** Names and their numbers; `key` lets tests find one. */
export type Fact = [label: string, value: Child, key?: string];

export function facts(list: Fact[], kind = ""): HTMLElement {
  const pairs = list.map(([label, value, key]) =>
    h("div", {}, h("dt", {}, label), h("dd", { class: "num", "data-key": key }, value)),
  );
  return h("dl", { class: `facts ${kind}` }, ...pairs);
}

export interface BarRow {
  label: string;
  /** Of the width, 0 to 1. */
  share: number;
  texts: string[];
  /** Class of the bar. */
  kind?: string;
}

/** A bar chart that is a table. */
export function barTable(caption: string, head: string[], rows: () => BarRow[]): HTMLElement {
  const body = h("tbody");
  keyed(
    body,
    () => rows().map((row) => `${row.label} ${row.texts.length}`).join("|"),
    () =>
      rows().map((first, index) => {
        const row = () => rows()[index] ?? first;
        const bar = svg("rect", { class: first.kind ?? "", height: "100%", rx: 2, width: () => `${(row().share * 100).toFixed(2)}%` });
        const picture = svg("svg", { width: "100%", height: 12, "aria-hidden": "true" }, bar);
        const texts = first.texts.map((_, column) => h("td", { class: "num" }, () => row().texts[column] ?? ""));
        return h("tr", {}, h("th", { scope: "row" }, first.label), h("td", { class: "bar" }, picture), ...texts);
      }),
  );
  const [first, ...rest] = head.map((text) => h("th", { scope: "col" }, text));
  const columns = h("tr", {}, first, h("td", {}), ...rest);
  return h("table", { class: "bars" }, h("caption", {}, caption), h("thead", {}, columns), body);
}

/** Shown where there is nothing to show yet. */
export const empty = (...children: Child[]): HTMLElement => h("p", { class: "empty" }, ...children);

