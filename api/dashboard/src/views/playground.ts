// The playground: a conversation with the served models, or one question asked of the first alone, of all, and of the last.

import { answer, served, type Message, type Param, type Router } from "../chat.ts";
import { h } from "../dom.ts";
import { card, empty } from "../parts.ts";
import type { Store } from "../store.ts";
import { modelClass } from "../theme.ts";
import { Answer } from "./answer.ts";

const EXAMPLE = "Emma has 43 roses. Emma buys 26 more. How many roses does Emma have?";
const STEPS = 200;

export function playgroundView(store: Store): HTMLElement {
  const place = h("div", {}, empty("asking the server for its models …"));
  const begin = (): Promise<void> =>
    served().then(
      ({ names, router }) => place.replaceChildren(new Playground(store, names, router).element),
      (error: Error) => place.replaceChildren(h("p", { class: "error", role: "alert" }, `The models are not known: ${error.message} `, h("button", { onclick: begin }, "try again"))),
    );
  void begin();
  return place;
}

class Playground {
  readonly element: HTMLElement;
  #models: string[];
  #names: string[];
  #routing: Slider[];
  #messages: Message[] = [];
  #talk = h("div", { class: "talk" });
  #stop: AbortController | null = null;
  #prompt = h("textarea", { id: "prompt", rows: 3, required: true }, EXAMPLE);
  #tokens = h("input", { id: "max-tokens", type: "number", min: 1, max: 4096, value: 64 });
  #temperature = h("input", { id: "temperature", type: "number", min: 0, max: 2, step: 0.1, value: 0 });
  #sides = h("input", { id: "sides", type: "checkbox" });
  #send = h("button", { type: "submit", class: "main" }, "Send");
  #halt = h("button", { type: "button", disabled: true, onclick: () => this.#stop?.abort() }, "Stop");

  constructor(store: Store, names: string[], router: Router | null) {
    this.#names = names;
    this.#models = store.state?.models.map((model) => model.name) ?? names.slice(1);
    this.#routing = (router?.params ?? []).filter(slides).map((param) => new Slider(param));
    const clear = h("button", { type: "button", onclick: () => this.#clear() }, "Clear");
    const alone = names.length < 3;
    const field = (label: string, input: HTMLElement) => h("label", { for: input.id }, label, input);
    const form = h(
      "form",
      {
        class: "ask",
        onsubmit: (event: SubmitEvent) => {
          event.preventDefault();
          void this.#submit();
        },
      },
      h("label", { for: "prompt", class: "grow" }, "Your message", this.#prompt),
      h(
        "div",
        { class: "fields" },
        ...this.#routing.map((slider) => slider.element),
        field("Tokens at most", this.#tokens),
        field("Temperature", this.#temperature),
        !alone && h("label", { for: "sides", class: "check" }, this.#sides, ` side by side: ${this.#columns().join(", ")}`),
      ),
      h("div", { class: "buttons" }, this.#send, this.#halt, clear),
    );
    this.#prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    this.#clear();
    this.element = h("div", { class: "playground" }, card("Ask", form, this.#legend()), card("Answers", this.#talk));
  }

  #legend(): HTMLElement {
    const entries = this.#models.map((model, index) => h("li", {}, h("span", { class: `token ${modelClass(index)}` }, model)));
    return h("ul", { class: "legend" }, h("li", {}, "Tokens made by"), ...entries, h("li", { class: "note" }, "point at a token, or go to it by the arrow keys, to see why"));
  }

  /** The first model alone, the routed name, the last alone. */
  #columns(): string[] {
    return [this.#names[1]!, this.#names[0]!, this.#names.at(-1)!];
  }

  #clear(): void {
    this.#stop?.abort();
    this.#messages = [];
    this.#talk.replaceChildren(empty("Nothing asked yet."));
  }

  async #submit(): Promise<void> {
    const content = this.#prompt.value.trim();
    if (content === "" || this.#stop !== null) return;
    if (this.#talk.querySelector(".empty")) this.#talk.replaceChildren();
    const stop = new AbortController();
    this.#stop = stop;
    this.#busy(true);
    try {
      if (this.#sides.checked) await this.#compare(content, stop.signal);
      else await this.#converse(content, stop.signal);
    } finally {
      this.#stop = null;
      this.#busy(false);
    }
  }

  #busy(busy: boolean): void {
    this.#send.disabled = busy;
    this.#halt.disabled = !busy;
    this.#talk.setAttribute("aria-busy", String(busy));
  }

  async #converse(content: string, signal: AbortSignal): Promise<void> {
    const messages: Message[] = [...this.#messages, { role: "user", content }];
    const shown = new Answer(this.#models, "Answer");
    this.#talk.append(h("p", { class: "asked" }, content), shown.element);
    if (await this.#ask(this.#names[0]!, messages, shown, signal)) {
      this.#messages = [...messages, { role: "assistant", content: shown.text }];
      this.#prompt.value = "";
    }
  }

  /** One after the other, so that none slows down another. */
  async #compare(content: string, signal: AbortSignal): Promise<void> {
    const columns = this.#columns().map((name) => ({ name, shown: new Answer(this.#models, `Answer of ${name}`) }));
    const title = (name: string) => h("h3", {}, name === this.#names[0] ? `${name}, routed` : `${name} alone`);
    const sides = columns.map(({ name, shown }) => h("div", { class: "side-answer", "data-name": name }, title(name), shown.element));
    this.#talk.append(h("p", { class: "asked" }, content), h("div", { class: "sides" }, ...sides));
    for (const { name, shown } of columns) {
      if (!signal.aborted) await this.#ask(name, [{ role: "user", content }], shown, signal);
    }
  }

  async #ask(model: string, messages: Message[], shown: Answer, signal: AbortSignal): Promise<boolean> {
    const routed = model === this.#names[0];
    const chosen = this.#routing.filter((slider) => slider.chosen).map((slider) => [slider.name, slider.value] as const);
    const routing = routed && chosen.length > 0 ? { routing: Object.fromEntries(chosen) } : {};
    const wish = { model, messages, max_tokens: this.#tokens.valueAsNumber, temperature: this.#temperature.valueAsNumber, ...routing };
    try {
      shown.end(await answer(wish, signal, (tokens, text) => shown.hear(tokens, text)));
      return true;
    } catch (error) {
      shown.end(signal.aborted ? "stopped" : error instanceof Error ? error.message : String(error));
      return false;
    }
  }
}

const slides = (param: Param) => param.per_request && param.kind.minimum !== undefined && param.kind.maximum !== undefined;

/** A number of the router that a request may choose; until it is touched the server's own counts. */
class Slider {
  readonly name: string;
  readonly element: HTMLElement;
  chosen = false;
  #input: HTMLInputElement;
  #shown = h("output", { class: "num" }, "the server's");

  constructor(param: Param) {
    this.name = param.name;
    const [low, high] = [Math.max(0, param.kind.minimum ?? 0), Math.min(1, param.kind.maximum ?? 1)];
    const id = `param-${param.name}`;
    this.#input = h("input", { id, type: "range", min: low, max: high, step: (high - low) / STEPS, value: param.default });
    this.#input.addEventListener("input", () => this.#set(true));
    const back = h("button", { type: "button", class: "small", onclick: () => this.#set(false) }, "server's");
    this.element = h("div", { class: "slider" }, h("label", { for: id, title: param.doc }, `Router ${param.name}: `, this.#shown), this.#input, back);
  }

  #set(chosen: boolean): void {
    this.chosen = chosen;
    if (!chosen) this.#input.value = this.#input.defaultValue;
    this.#shown.textContent = chosen ? this.value.toFixed(3) : "the server's";
  }

  get value(): number {
    return this.#input.valueAsNumber;
  }
}
