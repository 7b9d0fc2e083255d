// Uses the web page in Firefox over WebDriver BiDi, and prints a line for each thing that the page has shown.
// node firefox.mjs PUPPETEER FIREFOX LINK PROFILE
import { pathToFileURL } from "node:url";

const [, , puppeteerPath, executablePath, link, userDataDir] = process.argv;
const { default: puppeteer } = await import(pathToFileURL(puppeteerPath).href);
const errors = [];
const browser = await puppeteer.launch({ browser: "firefox", executablePath, userDataDir, headless: true });
const page = (await browser.pages())[0] ?? (await browser.newPage());
page.setDefaultTimeout(60_000);
page.on("pageerror", (error) => errors.push(String(error)));
page.on("console", (message) => message.type() === "error" && errors.push(message.text()));

const told = (words) => console.log(words);
// Not page.waitForFunction, nor locators: they make functions of text, which the page's own policy refuses.
const until = async (condition, ...given) => {
  const end = Date.now() + 60_000;
  while (!(await page.evaluate(condition, ...given).catch(() => false))) {
    if (Date.now() > end) throw new Error(`the page never had: ${condition} ${given}`);
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
};
const shows = (text) => until((text) => document.querySelector('[role="log"]')?.textContent.includes(text), text);
const say = async (text) => {
  await page.focus("textarea");
  await page.keyboard.type(text);
  await until((text) => document.querySelector("textarea").value === text, text);
  await page.keyboard.press("Enter");
};

await page.goto(link);
await page.waitForSelector("textarea");
told(`logged in: ${await page.evaluate(() => location.hash)}`);

await say("Tell me all");
await shows("word0");
const isPartial = await page.evaluate(() => !document.querySelector('[role="log"]').textContent.includes("word59"));
told(`streamed: ${isPartial}`);
await page.reload();
await shows("word0");
told("reloaded");
await shows("word59");
await until(() => document.querySelectorAll('[role="log"] .markdown').length === 1);
told(`answer: ${await page.$eval('[role="log"] .markdown', (one) => one.textContent.trim())}`);

await say("Write the plan");
await until(() => [...document.querySelectorAll("button")].some((one) => one.textContent.trim() === "Approve"));
const [approve] = await page.$$("::-p-xpath(//button[normalize-space()='Approve'])");
await approve.click();
await shows("It is written.");
told("approved");

await page.keyboard.down("Control");
await page.keyboard.press("k");
await page.keyboard.up("Control");
await until(() => document.activeElement?.getAttribute("role") === "combobox");
await page.keyboard.type("new");
await until(() => document.querySelectorAll('[role="option"]').length === 1);
await page.keyboard.press("Enter");
await until(() => document.body.textContent.includes("What shall we do?"));
told(`palette: ${await page.evaluate(() => location.hash)}`);
told(`errors: ${JSON.stringify(errors)}`);
await browser.close();
