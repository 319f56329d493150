// Every view against a server under load: it opens, its numbers move and agree with /metrics, nothing complains.

import { TITLES, accessible, args, check, eventually, go, metric, open, screenshot, shown, suite } from "./browser.mjs";
import { load } from "./load.mjs";

const PHONE = { width: 390, height: 844 };
const NAMES = ["demo", "small", "large"];
const MODELS = ["small", "large"];

/** Two looks at a number differ, and there is one. */
async function moves(page, key) {
  const first = await eventually(`${key} is shown`, async () => (await shown(page, key)) || null);
  await eventually(`${key} moves`, async () => (await shown(page, key)) !== first);
}

async function map(page) {
  for (const model of MODELS) {
    check(`${model} has six actors`, (await page.locator(`[data-actor^="${model}/"]`).count()) === 6);
    await moves(page, `rate:${model}`);
  }
  await moves(page, "hops:0:1");
  await moves(page, "hops:1:0");
  await page.focus('[data-actor="small/decode"]');
  await page.keyboard.press("Enter");
  await eventually("the panel has the focus", () => page.evaluate(() => document.activeElement?.id === "panel-title"));
  check("it is the panel of that actor", (await page.textContent("#panel-title")) === "Decode of small");
  await page.waitForSelector(".panel canvas");
  check("it has a snapshot", (await page.locator(".panel .data tr").count()) > 5);
  await page.locator(".panel details").first().locator("summary").click();
  await eventually("charts are tables too", async () => (await page.locator(".panel details[open] tbody tr").count()) > 1);
  await accessible(page, "the panel");
  await screenshot(page, "desktop-actor");
  await page.keyboard.press("Escape");
  await eventually("the panel closes", async () => (await page.locator(".panel").count()) === 0);
  check("the focus is where it was", (await page.evaluate(() => document.activeElement?.dataset.actor)) === "small/decode");
}

async function batching(page) {
  const steps = async () => (await page.locator(".bars").first().locator("tbody td.num:nth-of-type(2)").allTextContents()).join();
  const before = await steps();
  await eventually("batch sizes are counted", async () => (await steps()) !== before);
  check("the threshold and its reason are shown", /^B = \d+for N = \d+ live requests?$/.test(await page.locator(".big").first().textContent()));
  check("there are four charts", (await page.locator(".chart canvas").count()) === 4);
}

async function latency(page) {
  await moves(page, "committed:small");
  await moves(page, "committed:large");
  await moves(page, "finished:demo");
  const p50 = await page.locator('[aria-label="Latency by served name"] tbody td').first().textContent();
  check("latencies have values", / (µs|ms|s)$/.test(p50), p50);
}

async function requests(page) {
  const newest = () => page.locator(".request code").first().textContent();
  const before = await newest();
  await eventually("requests come", async () => (await newest()) !== before);
  await page.check("#hold");
  const held = await newest();
  for (const kind of ["running", "waiting", "pending"]) {
    check(`spans are ${kind}`, (await page.locator(`.lanes .${kind}`).count()) > 0);
  }
  const several = page.locator(".request:has(.lanes g ~ g)").first();
  await several.locator("summary").click();
  await eventually("a timeline is a table too", async () => (await several.locator("details[open] tbody tr").count()) > 1);
  await page.check("#shared");
  check("held still", (await newest()) === held);
  await page.uncheck("#hold");
}

async function playground(page) {
  await page.waitForSelector("#prompt");
  await page.fill("#max-tokens", "48");
  await page.click("button.main");
  await page.waitForSelector('.foot [data-key="rate"]');
  const tokens = page.locator(".answer .token");
  const marks = await tokens.evaluateAll((all) => all.map((one) => {
    const { backgroundColor, textDecorationStyle, textDecorationColor } = getComputedStyle(one);
    return [one.dataset.model, `${backgroundColor} ${textDecorationStyle} ${textDecorationColor}`];
  }));
  const kinds = new Map(marks);
  check("both models made tokens", kinds.size === 2, [...kinds]);
  check("they differ by colour and by line", new Set(kinds.values()).size === 2 && new Set([...kinds.values()].map((mark) => mark.match(/solid|dotted/)?.[0])).size === 2, [...kinds]);
  const handed = marks.findIndex(([model], at) => at + 1 < marks.length && model !== marks[at + 1][0]);
  await tokens.nth(handed).hover();
  const facts = await page.locator(".token-facts").textContent();
  check("pointing at a token tells of it", /made by.*entropy(0\.\d{3}|1\.000).*handed to (large|small).*time.*s/.test(facts), facts);
  // The small model hands over what it is not sure of; the large one gives back with a token of its own.
  const took = marks.findIndex(([model], at) => at > 0 && model === "large" && marks[at - 1][0] === "small");
  await tokens.nth(took).hover();
  const instead = await page.locator(".token-facts").textContent();
  check("a token that took another's place tells of it", /in place ofa candidate of small: entropy 0\.\d{3}/.test(instead), instead);
  await tokens.first().focus();
  await page.keyboard.press("ArrowRight");
  check("arrow keys go on", (await page.evaluate(() => document.activeElement?.dataset.at)) === "1");
  await accessible(page, "the playground with an answer");
  await screenshot(page, "desktop-chat");
}

/** The threshold decides who answers: at 1 the small model does alone. */
async function threshold(page) {
  await page.click("text=Clear");
  await page.fill("#prompt", "Tom has 12 apples. Tom eats 5. How many apples does Tom have?");
  await page.fill("#param-threshold", "1");
  const sent = page.waitForRequest(/chat\/completions/);
  await page.keyboard.press("Tab");
  await page.focus("#prompt");
  await page.keyboard.press("Enter");
  check("the request has the threshold", JSON.parse((await sent).postData()).routing.threshold === 1);
  await page.waitForSelector('.foot [data-key="rate"]');
  const models = await page.locator(".answer .token").evaluateAll((all) => [...new Set(all.map((one) => one.dataset.model))]);
  check("small answers alone", models.join() === "small", models);
}

async function sides(page) {
  await page.click("text=Clear");
  await page.click(".slider button");
  await page.check("#sides");
  await page.fill("#prompt", "Emma has 43 roses. Emma buys 26 more. How many roses does Emma have?");
  await page.click("button.main");
  await eventually("three answers end", async () => (await page.locator('.side-answer .foot [data-key="rate"]').count()) === 3);
  for (const [name, models] of [["small", ["small"]], ["demo", MODELS], ["large", ["large"]]]) {
    const side = page.locator(`.side-answer[data-name="${name}"]`);
    const made = await side.locator(".token").evaluateAll((all) => [...new Set(all.map((one) => one.dataset.model))]);
    check(`${name} is answered by ${models}`, made.toSorted().join() === models.toSorted().join(), made);
    const foot = await side.locator(".foot").textContent();
    check(`${name} has its rate and shares`, /\d+ tokens.*tokens\/s.*%/.test(foot), foot);
  }
  await screenshot(page, "desktop-sides");
}

/** With nothing on the way, what is shown is what /metrics says. */
async function agree(page) {
  await go(page, "/latency");
  for (const model of MODELS) {
    await eventually(`tokens of ${model} agree with /metrics`, async () =>
      (await shown(page, `committed:${model}`)) === (await metric("tokenrouter:committed_tokens_total", { model_name: model })));
  }
  for (const name of NAMES) {
    await eventually(`requests of ${name} agree with /metrics`, async () =>
      (await shown(page, `finished:${name}`)) === (await metric("vllm:request_success_total", { model_name: name })));
    await eventually(`generated tokens of ${name} agree with /metrics`, async () =>
      (await shown(page, `generated:${name}`)) === (await metric("vllm:generation_tokens_total", { model_name: name })));
  }
}

async function phone(browser) {
  const { page, complaints } = await open(browser, { viewport: PHONE, scheme: "dark" });
  for (const view of Object.keys(TITLES)) {
    await go(page, view);
    await page.waitForFunction((title) => document.querySelector("#title").textContent === title, TITLES[view]);
    await page.waitForTimeout(700);
    const width = await page.evaluate(() => document.documentElement.scrollWidth);
    check(`${view} is as wide as a phone`, width <= PHONE.width, `${width} px`);
    await screenshot(page, `phone-${TITLES[view].toLowerCase().replaceAll(" ", "-")}`, view !== "/requests");
  }
  check("no complaints on a phone", complaints.length === 0, complaints);
  await page.context().close();
}

await suite(async (browser) => {
  const { page, complaints } = await open(browser);
  await eventually("the map opens without requests", async () => (await page.textContent("#title")) === TITLES["/"]);
  await go(page, "/requests");
  await page.waitForSelector("text=No requests yet");
  await accessible(page, "a view of nothing");
  const stop = load(NAMES);
  const visits = { "/": map, "/batching": batching, "/latency": latency, "/requests": requests };
  for (const [view, visit] of Object.entries(visits)) {
    await go(page, view);
    await eventually(`${view} opens`, async () => (await page.title()) === `${TITLES[view]} · TokenRouter`);
    await visit(page);
    await accessible(page, view);
  }
  await phone(browser);
  for (const view of Object.keys(visits)) {
    await go(page, view);
    await page.waitForTimeout(700);
    await screenshot(page, `desktop-${TITLES[view].toLowerCase().replaceAll(" ", "-")}`, view !== "/requests");
  }
  const asked = await stop();
  check("there was load", asked > 20, `${asked} requests`);
  await go(page, "/playground");
  await playground(page);
  await threshold(page);
  await sides(page);
  await agree(page);
  check("no errors, no refusals of the policy", complaints.length === 0, complaints);
  console.log(`${asked} requests of load, screenshots in ${args.out}`);
});
