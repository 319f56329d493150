// A server with keys that stops: the page asks for a key, keeps it, and says when the server is gone. It prints "open" when
// the server may stop, and goes on when it reads a line.

import { once } from "node:events";
import { accessible, args, check, eventually, open, screenshot, suite } from "./browser.mjs";

await suite(async (browser) => {
  const { page, complaints } = await open(browser, { expected: /Failed to load resource|net::ERR/ });
  await page.waitForSelector("#key-dialog[open]");
  check("it says why", /API key/.test(await page.textContent("#key-why")));
  await accessible(page, "the dialog");
  await page.fill("#key", "not-the-key");
  await page.keyboard.press("Enter");
  await eventually("a wrong key is told", async () => /not valid/.test(await page.textContent("#key-why")));
  await page.fill("#key", args.key);
  await page.keyboard.press("Enter");
  await page.waitForSelector('[data-actor="large/executor"]');
  await page.reload();
  await page.waitForSelector('[data-actor="large/executor"]');
  check("a tab keeps its key", !(await page.locator("#key-dialog").isVisible()));
  const closed = await page.context().newPage();
  await closed.goto(`${args.url}/dashboard/`);
  await closed.close();
  check("nothing is lost yet", await page.locator("#banner").isHidden());
  console.log("open");
  await once(process.stdin, "data");
  await page.waitForSelector("#banner:visible");
  const banner = await page.textContent("#banner");
  check("the page says that the server is gone", /^Connection lost: the server (does not answer|closed the connection)\. Trying again in /.test(banner), banner);
  check("the last state stays", (await page.locator("[data-actor]").count()) === 12);
  await accessible(page, "a page without its server");
  await screenshot(page, "desktop-lost", false);
  check("no other complaints", complaints.length === 0, complaints);
  process.stdin.destroy();
});
