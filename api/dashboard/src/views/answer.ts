// An answer as its tokens, each in the colour and with the mark of the model that made it; pointing at one tells more.

import type { End, Token } from "../chat.ts";
import { h } from "../dom.ts";
import { percent, rate, ratio, time, whole } from "../format.ts";
import { modelClass } from "../theme.ts";

/** What the token of that place says; `next` is the model of the token after it. */
export function tokenFacts(tokens: Token[], at: number): [string, string][] {
  const token = tokens[at]!;
  const [before, after] = [tokens[at - 1], tokens[at + 1]];
  const taken = before !== undefined && before.model !== token.model;
  const decision = after === undefined ? "the last one" : after.model === token.model ? "stayed" : `handed to ${after.model}`;
  return [
    ["token", JSON.stringify(token.text)],
    ["made by", taken ? `${token.model}, which took over from ${before.model}` : token.model],
    ["entropy", uncertainty(token.entropy)],
    ...(token.dropped === undefined ? [] : [["in place of", candidate(token.dropped)] as [string, string]]),
    ["decision after it", decision],
    [taken ? "time, hop included" : "time", time(token.ms / 1000)],
  ];
}

const uncertainty = (entropy: number | null) => (entropy === null ? "not measured" : entropy.toFixed(3));

/** What made a model hand over. */
function candidate({ model, entropy, score }: NonNullable<Token["dropped"]>): string {
  const why = score === null ? `entropy ${uncertainty(entropy)}` : `score ${score.toFixed(3)}, entropy ${uncertainty(entropy)}`;
  return `a candidate of ${model}: ${why}`;
}

export class Answer {
  readonly element: HTMLElement;
  readonly tokens: Token[] = [];
  text = "";
  #body: HTMLElement;
  #details: HTMLElement;
  #foot = h("p", { class: "foot" });
  #models: string[];
  #at = 0;

  constructor(models: string[], label: string) {
    this.#models = models;
    this.#details = h("dl", { class: "facts token-facts", "aria-live": "polite" });
    this.#body = h("div", {
      class: "tokens",
      role: "group",
      "aria-label": `${label}; arrow keys go from token to token`,
      onpointerover: (event: PointerEvent) => this.#point(event.target),
      onfocusin: (event: FocusEvent) => this.#point(event.target),
      onkeydown: (event: KeyboardEvent) => this.#key(event),
    });
    this.element = h("div", { class: "answer" }, this.#body, this.#foot, this.#details);
  }

  hear(tokens: Token[], text: string): void {
    this.text += text;
    for (const token of tokens) {
      const at = this.tokens.push(token) - 1;
      const kind = modelClass(this.#models.indexOf(token.model));
      this.#body.append(h("span", { class: `token ${kind}`, "data-at": at, "data-model": token.model, tabindex: at === 0 ? 0 : -1 }, token.text));
    }
  }

  end(end: End | string): void {
    if (typeof end === "string") {
      this.#foot.replaceChildren(h("span", { class: "error" }, end));
      return;
    }
    const shares = this.#models.flatMap((model, index) => {
      const made = this.tokens.filter((token) => token.model === model).length;
      const share = `${model} ${percent(ratio(made, this.tokens.length))}`;
      return made > 0 ? [h("span", { class: `model ${modelClass(index)}` }, share)] : [];
    });
    this.#foot.replaceChildren(
      h("span", { class: "num" }, `${whole(end.tokens)} tokens`),
      h("span", { class: "num", "data-key": "rate" }, rate(ratio(end.tokens, end.seconds), "tokens")),
      h("span", { class: "num" }, `first after ${time(end.first_seconds)}`),
      ...shares,
      h("span", { class: "note" }, `ended by ${end.finish}`),
    );
  }

  #point(target: EventTarget | null): void {
    if (!(target instanceof HTMLElement) || target.dataset["at"] === undefined) return;
    this.#body.querySelector(".token.pointed")?.classList.remove("pointed");
    target.classList.add("pointed");
    this.#at = Number(target.dataset["at"]);
    const rows = tokenFacts(this.tokens, this.#at);
    this.#details.replaceChildren(...rows.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", { class: "num" }, value))));
  }

  #key(event: KeyboardEvent): void {
    const last = this.tokens.length - 1;
    const to = { ArrowRight: this.#at + 1, ArrowLeft: this.#at - 1, Home: 0, End: last }[event.key];
    if (to === undefined || last < 0) return;
    event.preventDefault();
    const next = this.#body.querySelector<HTMLElement>(`[data-at="${Math.min(last, Math.max(0, to))}"]`);
    this.#body.querySelector('[tabindex="0"]')?.setAttribute("tabindex", "-1");
    next?.setAttribute("tabindex", "0");
    next?.focus();
  }
}
