// A chart of the last minutes: lines that differ by dash as well as by colour, a legend with the numbers, and a table for
// who does not see it.

import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { Scope, h, svg } from "./dom.ts";
import { time } from "./format.ts";
import type { Store } from "./store.ts";
import { colour } from "./theme.ts";

export interface Line {
  key: string;
  label: string;
  /** A variable of the style sheet. */
  colour: string;
  dash?: number[];
}

export interface Spec {
  title: string;
  lines: Line[];
  format: (value: number | null) => string;
  /** The top of the scale, if it is fixed. */
  top?: number;
  /** Things that are counted: no halves on the scale. */
  counts?: boolean;
  height?: number;
}

/** How lines of one chart differ, beside their colours. */
export const DASHES: number[][] = [[], [7, 3], [2, 2], [8, 3, 2, 3]];

const HEIGHT = 150;
const RANGE_MIN = 60;
const TABLE_ROWS = 12;
/** Steps of a scale of counts: 1, 2, 5, 10, … */
const COUNTS = Array.from({ length: 8 }, (_, power) => [1, 2, 5].map((step) => step * 10 ** power)).flat();
const SYNC = "charts";

/** Seconds of history that are shown. */
const range = (store: Store) => Math.max(RANGE_MIN, Math.ceil(store.length_ms / 10_000) * 10);

/** It follows the scope it is built in. */
export function chart(store: Store, spec: Spec): HTMLElement {
  const values = spec.lines.map(() => h("span", { class: "num" }));
  const legend = spec.lines.map((line, index) =>
    h("li", {}, swatch(line), h("span", {}, line.label), values[index]!),
  );
  const canvas = h("div", { class: "canvas", role: "img", "aria-label": `${spec.title}, chart of the last minutes` });
  const { details, refresh } = table(store, spec);
  const element = h("figure", { class: "chart" }, h("figcaption", {}, spec.title), h("ul", { class: "legend" }, ...legend), canvas, details);
  let plot: uPlot | null = null;
  let theme = "";

  const show = (at: number | null | undefined) => {
    spec.lines.forEach((line, index) => {
      const series = store.series(line.key);
      const text = spec.format((at == null ? series.at(-1) : series[at]) ?? null);
      if (values[index]!.textContent !== text) values[index]!.textContent = text;
    });
  };
  const update = () => {
    const width = canvas.clientWidth;
    if (width > 0) {
      const now = colour("--ink");
      if (plot === null || theme !== now) {
        plot?.destroy();
        theme = now;
        plot = new uPlot(options(store, spec, width, show), data(store, spec), canvas);
      } else {
        if (plot.width !== width) plot.setSize({ width, height: spec.height ?? HEIGHT });
        plot.setData(data(store, spec));
      }
    }
    show(plot?.cursor.idx);
    refresh();
  };
  const resized = new ResizeObserver(update);
  resized.observe(canvas);
  Scope.follow(update);
  Scope.closing(() => {
    resized.disconnect();
    plot?.destroy();
  });
  return element;
}

function swatch(line: Line): SVGElement {
  const stroke = svg("line", { x1: 1, x2: 21, y1: 4, y2: 4, "stroke-dasharray": line.dash?.join(" ") });
  stroke.style.stroke = `var(${line.colour})`;
  return svg("svg", { class: "swatch", viewBox: "0 0 22 8", "aria-hidden": "true" }, stroke);
}

function data(store: Store, spec: Spec): uPlot.AlignedData {
  const now = store.times.at(-1) ?? 0;
  const times = store.times.map((at) => (at - now) / 1000);
  return [times, ...spec.lines.map((line) => store.series(line.key))] as uPlot.AlignedData;
}

function options(store: Store, spec: Spec, width: number, show: (at: number | null | undefined) => void): uPlot.Options {
  const axis = { stroke: colour("--muted"), font: "11px system-ui", ticks: { show: false } };
  const grid = { stroke: colour("--line"), width: 1 };
  return {
    width,
    height: spec.height ?? HEIGHT,
    padding: [12, 18, 0, 0],
    legend: { show: false },
    cursor: { sync: { key: SYNC }, y: false, drag: { x: false, y: false }, points: { size: 6 } },
    scales: {
      x: { time: false, range: () => [-range(store), 0] },
      y: { range: (_, __, max) => [0, spec.top ?? (max > 0 ? max * 1.15 : 1)] },
    },
    series: [
      {},
      ...spec.lines.map((line) => ({
        stroke: colour(line.colour),
        width: 1.75,
        dash: line.dash ?? [],
        spanGaps: false,
        points: { show: false },
      })),
    ],
    axes: [
      {
        ...axis,
        grid: { show: false },
        size: 28,
        gap: 8,
        values: (_, ticks) => ticks.map((tick) => (tick === 0 ? "now" : tick % 60 === 0 ? `${tick / 60} min` : `${tick} s`)),
        incrs: [10, 15, 20, 30, 60, 120, 300],
        space: 60,
      },
      { ...axis, grid, size: 62, space: 36, ...(spec.counts ? { incrs: COUNTS } : {}), values: (_, ticks) => ticks.map((tick) => spec.format(tick)) },
    ],
    hooks: { setCursor: [(plot) => show(plot.cursor.idx)] },
  };
}

function table(store: Store, spec: Spec): { details: HTMLElement; refresh: () => void } {
  const body = h("tbody");
  const head = h("tr", {}, h("th", { scope: "col" }, "when"), ...spec.lines.map((line) => h("th", { scope: "col" }, line.label)));
  const details = h(
    "details",
    {},
    h("summary", {}, "as a table", h("span", { class: "hidden" }, `: ${spec.title}`)),
    h("table", { class: "data" }, h("thead", {}, head), body),
  );
  let shown = -Infinity;
  const refresh = () => {
    const now = store.times.at(-1) ?? 0;
    if (!details.open || Math.abs(now - shown) < 2_000) return;
    shown = now;
    const step = Math.max(1, Math.floor(store.times.length / TABLE_ROWS));
    const rows = [];
    for (let at = store.times.length - 1; at >= 0 && rows.length < TABLE_ROWS; at -= step) {
      const ago = (now - (store.times[at] ?? now)) / 1000;
      const cells = spec.lines.map((line) => h("td", { class: "num" }, spec.format(store.series(line.key)[at] ?? null)));
      rows.push(h("tr", {}, h("th", { scope: "row" }, ago === 0 ? "now" : `${time(ago)} ago`), ...cells));
    }
    body.replaceChildren(...rows);
  };
  details.addEventListener("toggle", () => {
    shown = -Infinity;
    refresh();
  });
  return { details, refresh };
}
