// Chromium, what its pages complain of, and how checks are counted.

import { accessSync, constants, mkdirSync, readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { delimiter, join } from "node:path";
import { parseArgs } from "node:util";
import { chromium } from "playwright-core";

/** For whatever must come in the end; the machine may be busy. */
export const PATIENCE = 30_000;

const options = { url: { type: "string" }, out: { type: "string" }, key: { type: "string" } };
export const { values: args } = parseArgs({ options });

let passed = 0;

export function check(what, holds, found = "") {
  if (!holds) throw new Error(`${what}: ${typeof found === "string" ? found : JSON.stringify(found)}`);
  passed += 1;
}

/** Asks again until it holds. */
export async function eventually(what, ask) {
  const began = Date.now();
  let found;
  while (Date.now() - began < PATIENCE) {
    found = await ask();
    if (found) {
      passed += 1;
      return found;
    }
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
  throw new Error(`${what}: not within ${PATIENCE / 1000} s`);
}

function program(name) {
  for (const folder of (process.env.PATH ?? "").split(delimiter)) {
    try {
      accessSync(join(folder, name), constants.X_OK);
      return join(folder, name);
    } catch {
      // Not there.
    }
  }
  throw new Error(`${name} is not on the path; install it (Debian: apt-get install chromium)`);
}

/** Runs a suite with a browser, and ends the process with its verdict. */
export async function suite(run) {
  const flags = process.getuid?.() === 0 ? ["--no-sandbox"] : [];
  const browser = await chromium.launch({ executablePath: program("chromium"), args: [...flags, "--disable-dev-shm-usage"] });
  try {
    await run(browser);
    console.log(`${passed} checks passed`);
  } finally {
    await browser.close();
  }
}

/** A tab on a view; `complaints` are errors of its console, refusals of its policy and exceptions. */
export async function open(browser, { viewport = { width: 1440, height: 900 }, scheme = "light", expected = null } = {}) {
  const context = await browser.newContext({ viewport, colorScheme: scheme, reducedMotion: "reduce" });
  const page = await context.newPage();
  page.setDefaultTimeout(PATIENCE);
  const complaints = [];
  const complain = (text) => expected?.test(text) || complaints.push(text);
  page.on("console", (message) => ["error", "warning"].includes(message.type()) && complain(message.text()));
  page.on("pageerror", (error) => complain(error.stack ?? error.message));
  await page.goto(`${args.url}/dashboard`);
  return { page, complaints };
}

export const TITLES = {
  "/": "Actor map",
  "/batching": "Batching",
  "/latency": "Throughput and latency",
  "/playground": "Playground",
  "/requests": "Requests",
};

/** Goes to a view as people do. */
export async function go(page, view) {
  await page.click(`nav a[href="#${view}"]`);
}

/** The number that is shown under a key; NaN while there is none. */
export const shown = async (page, key) => number(await page.locator(`[data-key="${key}"]`).textContent());

const number = (text) => Number.parseFloat(text.replaceAll(",", "")) * (/\dk/.test(text) ? 1000 : 1);

/** The sum over series of /metrics with these labels. */
export async function metric(name, labels = {}) {
  const headers = args.key ? { authorization: `Bearer ${args.key}` } : {};
  const text = await (await fetch(`${args.url}/metrics`, { headers })).text();
  const lines = text.split("\n").filter((line) => line.startsWith(`${name}{`) || line.startsWith(`${name} `));
  const wanted = Object.entries(labels).map(([label, value]) => `${label}="${value}"`);
  const found = lines.filter((line) => wanted.every((label) => line.includes(label)));
  if (found.length === 0) throw new Error(`/metrics has no ${name} with ${wanted}`);
  return found.reduce((sum, line) => sum + Number(line.slice(line.lastIndexOf(" "))), 0);
}

const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");

/** No serious fault of accessibility, in light and in dark. */
export async function accessible(page, what) {
  for (const scheme of ["light", "dark"]) {
    await page.emulateMedia({ colorScheme: scheme });
    const { violations, passes } = await page.evaluate(`${axe}; axe.run({ resultTypes: ["violations"] })`);
    const serious = violations.filter((one) => ["serious", "critical"].includes(one.impact));
    const told = serious.map((one) => [one.id, one.help, one.nodes.slice(0, 4).map((node) => [node.html.slice(0, 200), node.failureSummary])]);
    check(`${what} in ${scheme}: faults of accessibility`, serious.length === 0, told);
    check(`${what} in ${scheme}: axe looked at something`, passes.length > 10, `${passes.length} rules passed`);
  }
  await page.emulateMedia({ colorScheme: "light" });
}

export async function screenshot(page, name, fullPage = true) {
  mkdirSync(args.out, { recursive: true });
  await page.screenshot({ path: join(args.out, `${name}.png`), fullPage });
}
