// A server whose large model loses its executor: the page shows it while it happens.

import { accessible, check, eventually, open, screenshot, suite } from "./browser.mjs";
import { load } from "./load.mjs";

await suite(async (browser) => {
  const { page, complaints } = await open(browser);
  await page.waitForSelector('[data-actor="large/executor"]');
  const badge = page.locator('[data-key="restarts:large/executor"]');
  check("nothing was restarted yet", !(await badge.isVisible()));
  check("the log is empty", (await page.locator(".log li").count()) === 0);
  const stop = load(["demo"], 2);
  await badge.waitFor();
  const asked = await stop();
  check("the map counts it", (await badge.textContent()) === "↻ restarted 1×", await badge.textContent());
  check("the small model's was not", !(await page.locator('[data-key="restarts:small/executor"]').isVisible()));
  await eventually("the log tells of it", async () => {
    const lines = await page.locator(".log li").allTextContents();
    return lines.some((line) => line.includes("large · Executor"));
  });
  check("its error is on the map", (await page.textContent('[data-actor="large/executor"] .error')).length > 5);
  await page.click('[data-actor="large/executor"]');
  await page.waitForSelector(".panel .error:visible");
  check("the panel has the log of this actor", (await page.locator(".panel .log li").count()) > 0);
  check("requests survived", asked > 2);
  await accessible(page, "the map after a restart");
  await screenshot(page, "desktop-restart");
  check("no complaints", complaints.length === 0, complaints);
});
