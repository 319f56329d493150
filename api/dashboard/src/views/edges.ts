// Arrows between boxes of a part of the page, drawn behind them and again whenever they move.

import { Scope, h, svg, type Child } from "../dom.ts";

export interface Edge {
  from: HTMLElement;
  to: HTMLElement;
  /** What goes along it each second. */
  rate: () => number | null;
  kind: string;
  label?: Child[];
}

interface Box {
  x: number;
  y: number;
  width: number;
  height: number;
}

type Point = [x: number, y: number];

/** How far the two directions are apart. */
const APART = { inner: 6, outer: { across: 40, down: 82 } };

export function edges(parent: HTMLElement, list: Edge[]): void {
  const drawn = list.map((edge) => {
    const line = svg("path", { class: () => `edge ${edge.kind} ${(edge.rate() ?? 0) > 0 ? "busy" : ""}`, "stroke-width": () => width(edge.rate()) });
    const head = svg("path", { class: `head ${edge.kind}`, d: "M-7 -4 L1 0 L-7 4 Z" });
    const label = edge.label && h("div", { class: `chip ${edge.kind}` }, ...edge.label);
    return { edge, line, head, label };
  });
  const picture = svg("svg", { class: "edges", "aria-hidden": "true" }, ...drawn.flatMap(({ line, head }) => [line, head]));
  parent.prepend(picture);
  parent.append(...drawn.flatMap(({ label }) => label ?? []));
  const place = () => {
    const origin = parent.getBoundingClientRect();
    const box = (element: HTMLElement): Box => {
      const { left, top, width, height } = element.getBoundingClientRect();
      return { x: left - origin.left, y: top - origin.top, width, height };
    };
    const ends = new Set(drawn.flatMap(({ edge }) => [edge.from, edge.to]));
    for (const { edge, line, head, label } of drawn) {
      const [a, b] = route(box(edge.from), box(edge.to), label !== undefined);
      const covers = [...ends].some((other) => other !== edge.from && other !== edge.to && crosses(box(other), a, b));
      for (const part of [line, head, label ?? []].flat()) part.style.display = covers ? "none" : "";
      line.setAttribute("d", `M${a[0]} ${a[1]} L${b[0]} ${b[1]}`);
      const angle = (Math.atan2(b[1] - a[1], b[0] - a[0]) * 180) / Math.PI;
      head.setAttribute("transform", `translate(${b[0]} ${b[1]}) rotate(${angle})`);
      if (label) {
        const t = along(a, b);
        label.style.left = `${a[0] + (b[0] - a[0]) * t}px`;
        label.style.top = `${a[1] + (b[1] - a[1]) * t}px`;
      }
    }
  };
  const moved = new ResizeObserver(place);
  moved.observe(parent);
  for (const { edge } of drawn) moved.observe(edge.from);
  Scope.closing(() => moved.disconnect());
}

const width = (rate: number | null) => (1.25 + Math.min(2.5, Math.log10(1 + (rate ?? 0)) * 0.8)).toFixed(2);

/** Where the label lies: in the middle, or near its beginning where slanted arrows would share the middle. */
function along(a: Point, b: Point): number {
  const [dx, dy] = [Math.abs(b[0] - a[0]), Math.abs(b[1] - a[1])];
  return Math.min(dx, dy) < 0.2 * Math.max(dx, dy) ? 0.5 : 0.3;
}

const middle = (box: Box): Point => [box.x + box.width / 2, box.y + box.height / 2];

/** From border to border, on the right-hand side of the way. */
function route(from: Box, to: Box, outer: boolean): [Point, Point] {
  const [a, b] = [middle(from), middle(to)];
  const length = Math.hypot(b[0] - a[0], b[1] - a[1]) || 1;
  const [dx, dy] = [(b[0] - a[0]) / length, (b[1] - a[1]) / length];
  const flat = Math.abs(dx) > Math.abs(dy);
  const apart = outer ? (flat ? APART.outer.across : APART.outer.down) : APART.inner;
  const shift = (point: Point): Point => [point[0] - dy * apart, point[1] + dx * apart];
  const [p, q] = [shift(a), shift(b)];
  return [leave(from, p, [dx, dy]), leave(to, q, [-dx, -dy])];
}

/** Whether a way leads through a box: it would lie over what stands there. */
export function crosses(box: Box, [ax, ay]: Point, [bx, by]: Point): boolean {
  const spans = ([[box.x, box.width, ax, bx], [box.y, box.height, ay, by]] as const).map(([low, size, from, to]) => {
    const [one, other] = [(low - from) / (to - from), (low + size - from) / (to - from)];
    if (from === to) return from > low && from < low + size ? [0, 1] : [1, 0];
    return [Math.min(one, other), Math.max(one, other)];
  });
  return Math.max(0, ...spans.map(([enter]) => enter!)) < Math.min(1, ...spans.map(([, leave]) => leave!));
}

/** Where a ray from inside a box leaves it. */
function leave(box: Box, [x, y]: Point, [dx, dy]: Point): Point {
  const reach = (at: number, low: number, size: number, step: number) =>
    step > 0 ? (low + size - at) / step : step < 0 ? (low - at) / step : Infinity;
  const t = Math.max(0, Math.min(reach(x, box.x, box.width, dx), reach(y, box.y, box.height, dy)));
  return [x + dx * t, y + dy * t];
}
