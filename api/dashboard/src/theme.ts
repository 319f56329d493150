// Light, dark, or as the system says; and the colours for what is drawn on a canvas.

const KEY = "tokenrouter-theme";
const THEMES = ["system", "light", "dark"] as const;
type Theme = (typeof THEMES)[number];

const listeners: (() => void)[] = [];

/** Called when colours change. */
export const onTheme = (listener: () => void): number => listeners.push(listener);

export function theme(): Theme {
  const saved = localStorage.getItem(KEY);
  return THEMES.find((theme) => theme === saved) ?? "system";
}

function apply(): void {
  document.documentElement.dataset["theme"] = theme();
  for (const listener of listeners) listener();
}

export function nextTheme(): void {
  const next = THEMES[(THEMES.indexOf(theme()) + 1) % THEMES.length] ?? "system";
  localStorage.setItem(KEY, next);
  apply();
}

export function startTheme(): void {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", apply);
  apply();
}

let probe: HTMLElement | null = null;

/** A colour of the style sheet as it is now. */
export function colour(variable: string): string {
  if (probe === null) {
    probe = document.createElement("span");
    probe.hidden = true;
    document.body.append(probe);
  }
  probe.style.color = `var(${variable})`;
  return getComputedStyle(probe).color;
}

/** Colours of models, by their place in the server's order. */
export const MODEL_COLOURS = 4;
export const modelColour = (index: number): string => `--m${Math.max(0, index) % MODEL_COLOURS}`;
export const modelClass = (index: number): string => `m${Math.max(0, index) % MODEL_COLOURS}`;
