// Elements, and what of them follows the state: a function as a child or as an attribute is asked again at every update.

type Live<T> = T | (() => T);
type Value = string | number | boolean | null | undefined;
export type Child = Node | Live<string> | null | undefined | false;
type Props = Record<string, Live<Value> | ((event: never) => unknown)>;

/** What follows the state in one part of the page. */
export class Scope {
  static #current: Scope | null = null;
  #updates: (() => void)[] = [];
  #closing: (() => void)[] = [];

  /** Builds elements whose live parts belong to this scope. */
  build<T>(make: () => T): T {
    const outer = Scope.#current;
    Scope.#current = this;
    try {
      return make();
    } finally {
      Scope.#current = outer;
    }
  }

  update(): void {
    for (const update of this.#updates) update();
  }

  /** Lets go of what its parts hold on to. */
  close(): void {
    for (const close of this.#closing) close();
    this.#updates = [];
    this.#closing = [];
  }

  /** Runs it now and at every update of the scope that is being built. */
  static follow(update: () => void): void {
    update();
    if (Scope.#current !== null) Scope.#current.#updates.push(update);
  }

  /** Runs it when the scope that is being built is closed. */
  static closing(close: () => void): void {
    if (Scope.#current !== null) Scope.#current.#closing.push(close);
  }
}

function set(element: Element, name: string, value: Value): void {
  if (value === null || value === undefined || value === false) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value === true ? "" : String(value));
}

function fill(element: Element, props: Props, children: Child[]): void {
  for (const [name, value] of Object.entries(props)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value as EventListener);
    else if (typeof value === "function") Scope.follow(() => set(element, name, (value as () => Value)()));
    else set(element, name, value);
  }
  for (const child of children) {
    if (typeof child === "function") {
      const text = document.createTextNode("");
      Scope.follow(() => {
        const now = child();
        if (text.data !== now) text.data = now;
      });
      element.append(text);
    } else if (child) element.append(child);
  }
}

export function h<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  props: Props = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  fill(element, props, children);
  return element;
}

export function svg<K extends keyof SVGElementTagNameMap>(
  tag: K,
  props: Props = {},
  ...children: Child[]
): SVGElementTagNameMap[K] {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  fill(element, props, children);
  return element;
}

/** A part that is built again when its key changes, and only then. */
export function keyed(parent: Element, key: () => string, make: () => Child[]): void {
  let last: string | null = null;
  let scope = new Scope();
  Scope.closing(() => scope.close());
  Scope.follow(() => {
    const now = key();
    if (now !== last) {
      last = now;
      scope.close();
      scope = new Scope();
      parent.replaceChildren(...(scope.build(make).filter((child) => child) as (Node | string)[]));
    } else scope.update();
  });
}
