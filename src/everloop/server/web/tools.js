/** Tool calls as cards: the tool, its arguments, its progress and its result. */
import { html, classes, lazy, revealed, useState } from "./lib.js";
import { CopyButton } from "./markdown.js";

const Pictures = lazy(async () => (await import("./pictures.js")).Pictures);
const SHOWN = 2_000; // characters of an output that are shown at first
const DIFF_LINES = 300; // per side; longer texts are shown one after the other

const LABELS = /** @type {Record<string, string>} */ ({
  ok: "done", error: "failed", cancelled: "stopped", timeout: "took too long", aborted: "aborted",
  interrupted: "interrupted", denied: "denied", running: "running", waiting: "waits for you", called: "called",
});

/**
 * @param {{sessionKey: string, call: import("./session.js").Call, result: any, tool: import("./session.js").ToolState | undefined,
 *   isAsked: boolean, isOver: boolean}} props
 */
export function ToolCard({ sessionKey, call, result, tool, isAsked, isOver }) {
  const status = result?.status ?? (isAsked ? "waiting" : tool?.status ?? (isOver ? "called" : "running"));
  const output = result?.content ?? tool?.output ?? "";
  const seconds = result?.seconds ?? tool?.seconds;
  const isOpen = (status !== "ok" && status !== "called") || result?.images > 0;
  return html`<details class=${classes("tool", `is-${status}`)} open=${isOpen || isEdit(call)}>
    <summary>
      <span class="dot" aria-hidden="true"></span>
      <code class="name">${revealed(call.name)}</code>
      <span class="gist" dir="auto">${revealed(gist(call))}</span>
      <span class="status">${LABELS[status] ?? status}${seconds >= 0.1 ? ` · ${seconds.toFixed(1)} s` : ""}</span>
    </summary>
    <${Arguments} call=${call} />
    ${result?.images > 0 && html`<${Pictures} sessionKey=${sessionKey} seq=${result.seq} count=${result.images} />`}
    ${output && !(isEdit(call) && status === "ok") && (failureOf(output, status) ?? html`<${Output} text=${output} />`)}
  </details>`;
}

/** @param {import("./session.js").Call} call */
const isEdit = (call) => call.name === "edit_file" || call.name === "write_file";

/**
 * Describe a call in a few words.
 * @param {import("./session.js").Call} call
 */
export function gist(call) {
  const given = call.arguments ?? {};
  const first = given.command ?? given.path ?? given.url ?? given.query ?? given.pattern ?? given.task ?? Object.values(given)[0];
  return first === undefined ? "" : String(first).split("\n")[0].slice(0, 160);
}

/** @param {{call: import("./session.js").Call}} props */
function Arguments({ call }) {
  const given = call.arguments ?? {};
  if (call.name === "edit_file") {
    return html`<${Diff} path=${given.path} before=${String(given.old_text ?? "")} after=${String(given.new_text ?? "")} />`;
  }
  if (call.name === "write_file") return html`<${Diff} path=${given.path} before="" after=${String(given.content ?? "")} />`;
  const { command, ...rest } = given;
  const others = Object.entries(command === undefined ? given : rest);
  return html`
    ${command !== undefined && html`<pre class="command" tabindex="0" dir="ltr"><span class="prompt">$ </span>${revealed(String(command))}</pre>`}
    ${others.length > 0 && html`<dl class="arguments">${others.map(([name, value]) => html`
      <dt>${revealed(name)}</dt><dd dir="auto">${revealed(typeof value === "string" ? value : JSON.stringify(value))}</dd>`)}</dl>`}`;
}

/**
 * Return the message and the advice of a failed call; null for any other result.
 * @param {string} text
 * @param {string} status
 */
export function failureOf(text, status) {
  if (status === "ok" || !text.startsWith("{")) return null;
  try {
    const { message, advice } = JSON.parse(text);
    if (typeof message !== "string") return null;
    return html`<div class="failure"><pre tabindex="0" dir="auto">${revealed(message)}</pre>
      ${advice && html`<p class="meta" dir="auto">Advice to the agent: ${revealed(String(advice))}</p>`}</div>`;
  } catch {
    return null;
  }
}

/** @param {{text: string}} props */
function Output({ text }) {
  const [isWhole, setWhole] = useState(false);
  const isLong = text.length > SHOWN;
  return html`<div class="output">
    <pre tabindex="0" dir="auto">${revealed(isLong && !isWhole ? text.slice(0, SHOWN) : text)}</pre>
    <div class="row">
      ${isLong && html`<button class="quiet small" type="button" onClick=${() => setWhole(!isWhole)}>
        ${isWhole ? "Show less" : `Show all ${text.length.toLocaleString("en")} characters`}</button>`}
      <${CopyButton} text=${text} />
    </div>
  </div>`;
}

/** @param {{path: unknown, before: string, after: string}} props */
export function Diff({ path, before, after }) {
  const lines = diff(before, after);
  const added = lines.filter(([mark]) => mark === "+").length;
  const removed = lines.filter(([mark]) => mark === "-").length;
  return html`<figure class="diff">
    <figcaption><code>${revealed(String(path ?? ""))}</code><span>
      ${added > 0 && html`<span class="plus">+${added}</span>`} ${removed > 0 && html`<span class="minus">−${removed}</span>`}</span></figcaption>
    <pre tabindex="0" dir="ltr">${lines.map(([mark, text]) => html`<span
      class=${mark === "+" ? "plus" : mark === "-" ? "minus" : "same"}>${mark} ${revealed(text)}\n</span>`)}</pre>
  </figure>`;
}

/**
 * Return the diff of two texts: their lines, each with "+", "-" or " ".
 * @param {string} before
 * @param {string} after
 * @returns {[string, string][]}
 */
export function diff(before, after) {
  const old = before ? before.replace(/\n$/, "").split("\n") : [];
  const now = after ? after.replace(/\n$/, "").split("\n") : [];
  if (old.length > DIFF_LINES || now.length > DIFF_LINES) return [...marked("-", old), ...marked("+", now)];
  // lengths[i][j]: the longest common subsequence of old[i:] and now[j:]
  const lengths = Array.from({ length: old.length + 1 }, () => new Uint16Array(now.length + 1));
  for (let i = old.length - 1; i >= 0; i--) {
    for (let j = now.length - 1; j >= 0; j--) {
      lengths[i][j] = old[i] === now[j] ? lengths[i + 1][j + 1] + 1 : Math.max(lengths[i + 1][j], lengths[i][j + 1]);
    }
  }
  /** @type {[string, string][]} */
  const lines = [];
  let [i, j] = [0, 0];
  while (i < old.length && j < now.length) {
    if (old[i] === now[j]) {
      lines.push([" ", old[i]]);
      i++;
      j++;
    } else if (lengths[i + 1][j] >= lengths[i][j + 1]) lines.push(["-", old[i++]]);
    else lines.push(["+", now[j++]]);
  }
  return [...lines, ...marked("-", old.slice(i)), ...marked("+", now.slice(j))];
}

/**
 * @param {string} mark
 * @param {string[]} lines
 * @returns {[string, string][]}
 */
const marked = (mark, lines) => lines.map((line) => [mark, line]);
