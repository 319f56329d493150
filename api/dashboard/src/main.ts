// The page: its views, where it is in them, and what it hears of the server.

import "./style.css";
import type { State } from "./data.ts";
import { Scope, h } from "./dom.ts";
import { percent, rate, time, whole } from "./format.ts";
import { follow, saveKey } from "./server.ts";
import { Store } from "./store.ts";
import { nextTheme, onTheme, startTheme, theme } from "./theme.ts";
import { batchingView } from "./views/batching.ts";
import { latencyView } from "./views/latency.ts";
import { mapView } from "./views/map.ts";
import { playgroundView } from "./views/playground.ts";
import { requestsView } from "./views/requests.ts";

const store = new Store();
const find = <T extends HTMLElement>(id: string) => document.getElementById(id) as T;

const VIEWS: Record<string, { title: string; make: () => HTMLElement; kept?: boolean }> = {
  "/": { title: "Actor map", make: () => mapView(store, selected) },
  "/batching": { title: "Batching", make: () => batchingView(store) },
  "/latency": { title: "Throughput and latency", make: () => latencyView(store) },
  "/playground": { title: "Playground", make: () => playgroundView(store), kept: true },
  "/requests": { title: "Requests", make: () => requestsView(store) },
};

const route = () => {
  const [path, query] = location.hash.replace(/^#/, "").split("?");
  const known = path !== undefined && path in VIEWS ? path : "/";
  return { path: known, query: new URLSearchParams(query) };
};
const selected = () => route().query.get("actor");

/** What views are made for; they are made again when it changes. */
const shape = (state: State | null) =>
  state === null ? "" : JSON.stringify([state.models.map((model) => [model.name, model.elsewhere, model.actors.map((actor) => actor.role), model.hops.map((hop) => hop.to)]), state.latency.map((one) => one.model_name), state.planner === null]);

const kept = new Map<string, HTMLElement>();
let scope = new Scope();
let shown = "";

function show(): void {
  const { path } = route();
  const view = VIEWS[path]!;
  const now = `${path} ${view.kept ? "" : shape(store.state)}`;
  if (store.state === null) return;
  if (now === shown) {
    scope.update();
    return;
  }
  shown = now;
  scope.close();
  scope = new Scope();
  const content = kept.get(path) ?? scope.build(view.make);
  if (view.kept) kept.set(path, content);
  document.title = `${view.title} · TokenRouter`;
  find("title").textContent = view.title;
  find("view").replaceChildren(content);
  for (const link of document.querySelectorAll("nav a")) {
    if (link.getAttribute("href") === `#${path}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  // What is measured needs its place in the page first.
  scope.update();
}

const bar = new Scope();

/** The numbers that every view shows. */
function status(): HTMLElement {
  const large = () => store.state?.models.at(-1)?.name ?? "large";
  const number = (label: () => string, value: () => string) => h("div", {}, h("dt", {}, label), h("dd", { class: "num" }, value));
  return h(
    "dl",
    { class: "status" },
    number(() => "live", () => whole(store.state?.live)),
    number(() => "tokens", () => rate(store.last("measured"))),
    number(() => `by ${large()}`, () => percent(store.last("large"))),
    number(() => "first token p50", () => time(store.last("ttft/0.5"))),
  );
}

function banner(text: string | null): void {
  find("banner").hidden = text === null;
  if (text !== null && find("banner").textContent !== text) find("banner").textContent = text;
}

/** Asks for a key until there is one. */
function askKey(why: string): Promise<void> {
  const dialog = find<HTMLDialogElement>("key-dialog");
  find("key-why").textContent = why;
  if (!dialog.open) dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener(
      "close",
      () => {
        const input = find<HTMLInputElement>("key");
        saveKey(input.value.trim());
        input.value = "";
        resolve();
      },
      { once: true },
    );
  });
}

function themeButton(): void {
  const button = find("theme");
  const label = () => (button.textContent = { system: "◐ as system", light: "☀ light", dark: "☾ dark" }[theme()]);
  button.addEventListener("click", nextTheme);
  onTheme(label);
  onTheme(show);
}

themeButton();
startTheme();
find("status").replaceChildren(bar.build(status));
let drawing = false;
/** At most once a frame, and not while nobody looks. */
function draw(): void {
  if (drawing || document.hidden) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    bar.update();
    show();
  });
}
let chosen = selected();
addEventListener("hashchange", () => {
  const [view, actor] = [shown, chosen];
  show();
  chosen = selected();
  if (shown !== view) scrollTo(0, 0);
  if (chosen !== null) document.getElementById("panel-title")?.focus({ preventScroll: innerWidth > 1180 });
  else if (shown !== view) find("title").focus({ preventScroll: true });
  else if (actor !== null) document.querySelector<HTMLElement>(`[data-actor="${CSS.escape(actor)}"]`)?.focus();
});
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && selected() !== null) location.hash = "#/";
});
document.addEventListener("visibilitychange", draw);
void follow({
  state: (state) => {
    store.push(state);
    draw();
  },
  requests: (requests) => {
    store.requests = requests;
    draw();
  },
  connected: () => banner(null),
  lost: (why, pause) => banner(`Connection lost: ${why}. Trying again in ${time(pause / 1000)}.`),
  key: askKey,
});
