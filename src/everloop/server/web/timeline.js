/** The timeline of a turn: its steps on a time axis without idle time, stepping, comparison with another turn, and requests. */
import { html, classes, revealed, useEffect, useState } from "./lib.js";
import { api, sessionPath } from "./api.js";
import { fork } from "./actions.js";
import { CopyButton } from "./markdown.js";
import { failureOf } from "./tools.js";
import { Waiting, money, number, sessionHash, span, timelineHash, useLoad, when } from "./views.js";

const EVERY = 2000; // milliseconds between two requests of a running turn
const WIDE = 1000; // width of the axis in its own units

const KINDS = /** @type {Record<string, string>} */ ({
  said: "Message", model: "Model", tool: "Tool", question: "Question", compacted: "Summary", retry: "Retry",
  takeover: "Hand-over", end: "End",
});

/** @typedef {{kind: string, name: string, at: number, seconds: number, offset: number, seq: number | null, status: string,
 *   call: string, first_token: number, input_tokens: number, cached_tokens: number, output_tokens: number,
 *   cost: number | null, arguments: Record<string, any>, text: string, flushed: number, flushed_after: number}} Step */

/** @param {{rest: string[]}} props */
export function View({ rest: [key, wanted, other = ""] }) {
  const list = useLoad(sessionPath(key, "turns"), EVERY * 2);
  const turns = /** @type {any[]} */ (list.data?.turns ?? []);
  const turn = wanted || turns[0]?.id || "";
  const isOpen = turns.find((one) => one.id === turn)?.ended_at === null;
  const first = useLoad(turn && sessionPath(key, `turns/${turn}`), isOpen ? EVERY : 0);
  const second = useLoad(other && sessionPath(key, `turns/${other}`));
  const seconds = Math.max(first.data?.seconds ?? 0, second.data?.seconds ?? 0);
  /** @param {string} id @param {string} against */
  const go = (id, against) => (location.hash = timelineHash(key, id) + (against && `/${against}`));
  return html`<div class="view timeline">
    <p class="row"><a href=${sessionHash(key)}>Back to the chat</a>
      ${turns.length > 0 && html`<${Pick} label="Turn" turns=${turns} value=${turn} onPick=${(/** @type {string} */ id) => go(id, other === id ? "" : other)} />`}
      ${turns.length > 1 && html`<${Pick} label="Compare with" turns=${turns.filter((one) => one.id !== turn)} value=${other} none="no other turn"
        onPick=${(/** @type {string} */ id) => go(turn, id)} />`}</p>
    <${Waiting} data=${list.data} error=${list.error} />
    ${list.data && !turns.length && html`<p class="hint">Nothing has happened in this session yet.</p>`}
    ${turn && html`<${Waiting} data=${first.data} error=${first.error} />`}
    <div class=${classes(other && "compared")}>
      ${[first.data, other && second.data].filter(Boolean).map((data, index) => html`<section key=${data.id}
        aria-label=${index ? "The other turn" : "The turn"}><${Turn} sessionKey=${key} turn=${data} seconds=${seconds} /></section>`)}
    </div>
    ${other && html`<${Waiting} data=${second.data} error=${second.error} />`}
  </div>`;
}

/** @param {{label: string, turns: any[], value: string, none?: string, onPick: (id: string) => void}} props */
function Pick({ label, turns, value, none, onPick }) {
  return html`<label class="pick">${label}
    <select value=${value} onChange=${(/** @type {any} */ event) => onPick(event.target.value)}>
      ${none && html`<option value="" selected=${!value}>${none}</option>`}
      ${turns.map((one) => html`<option key=${one.id} value=${one.id} selected=${one.id === value}>
        ${when(one.started_at)} · ${one.title || "(no words)"}</option>`)}
    </select></label>`;
}

/** @param {{sessionKey: string, turn: any, seconds: number}} props `seconds` is the length of the axis */
function Turn({ sessionKey, turn, seconds }) {
  const [open, setOpen] = useState(-1);
  const [until, setUntil] = useState(0); // number of steps to show; 0 shows all
  const steps = /** @type {Step[]} */ (until ? turn.steps.slice(0, until) : turn.steps);
  const share = turn.input_tokens ? Math.round((100 * turn.cached_tokens) / turn.input_tokens) : 0;
  const facts = [
    ["Ended", turn.reason ?? "still running"],
    ["Busy", span(turn.seconds)],
    ["Idle, cut out", turn.idle ? span(turn.idle) : "none"],
    ["Tokens", `${number(turn.input_tokens)} in, ${number(turn.output_tokens)} out`],
    ["Cached", turn.input_tokens ? `${share} %` : "–"],
    ["Cost", money(turn.cost) || "no price known"],
    ["Waited for the disk", span(turn.flushed)],
  ];
  /** @param {any} event */
  const replay = (event) => {
    const count = Number(event.target.value);
    setUntil(count);
    setOpen(count - 1);
  };
  return html`<dl class="facts">${facts.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
    ${turn.steps.length > 1 && html`<p class="row replay"><label class="pick">Replay
      <input type="range" min="1" max=${turn.steps.length} value=${until || turn.steps.length} onInput=${replay}
        aria-valuetext=${`step ${steps.length} of ${turn.steps.length}`} /></label>
      <span class="meta">step ${steps.length} of ${turn.steps.length}</span></p>`}
    <p class="step scale" aria-hidden="true"><span class="length">0<span>${span(seconds)}</span></span></p>
    <ol class="steps" aria-label="Steps">${steps.map((step, index) => html`
      <li key=${`${step.kind}${step.seq ?? step.call}${step.at}`} class=${classes(`is-${step.kind}`, isBad(step) && "is-bad")}>
        <button type="button" class="step" aria-expanded=${open === index} onClick=${() => setOpen(open === index ? -1 : index)}>
          <span class="kind">${KINDS[step.kind] ?? step.kind}</span>
          <span class="name" dir="auto">${revealed(nameOf(step))}</span>
          <${Axis} step=${step} turn=${turn} seconds=${seconds} />
          <span class="tokens">${step.input_tokens + step.output_tokens ? `${number(step.input_tokens)} → ${number(step.output_tokens)}` : ""}</span>
          <span class="cost">${money(step.cost)}</span>
          <span class="took">${step.seconds ? span(step.seconds) : ""}</span>
        </button>
        ${open === index && html`<${Details} sessionKey=${sessionKey} step=${step} />`}
      </li>`)}</ol>`;
}

/** @param {Step} step */
const isBad = (step) => ["error", "timeout", "interrupted", "denied"].includes(step.status);

/** @param {Step} step */
function nameOf(step) {
  if (step.kind === "end" || step.kind === "question") return step.status;
  if (step.kind === "said") return step.text.split("\n")[0].slice(0, 80);
  if (step.kind === "retry" || step.kind === "takeover") return step.text;
  return step.name || (step.status === "running" ? "running" : "");
}

/** @param {{step: Step, turn: any, seconds: number}} props */
function Axis({ step, turn, seconds }) {
  const scale = WIDE / Math.max(seconds, 0.001);
  const width = Math.max(step.seconds * scale, 3);
  const left = Math.min(step.offset * scale, WIDE - width);
  return html`<svg class="axis" viewBox="0 0 ${WIDE} 12" preserveAspectRatio="none" aria-hidden="true">
    ${turn.gaps.map((/** @type {any} */ gap) => html`<line class="gap" x1=${gap.offset * scale} x2=${gap.offset * scale} y1="0" y2="12" />`)}
    ${step.flushed > 0 && html`<rect class="flush" x=${Math.max(left - step.flushed * scale, 0)} y="4" width=${Math.min(step.flushed * scale, left)} height="4" />`}
    <rect x=${left} y="2" width=${width} height="8" rx="1" />
    ${step.first_token > 0 && html`<rect class="first" x=${left} y="2" width=${Math.min(step.first_token * scale, width)} height="8" />`}
  </svg>`;
}

/** @param {{sessionKey: string, step: Step}} props */
function Details({ sessionKey, step }) {
  const [isShown, setShown] = useState(false); // whether the request of a model call is shown
  /** @type {[string, string][]} */
  const facts = [["At", `${when(step.at)}`]];
  if (step.status) facts.push(["Status", step.status]);
  if (step.kind === "model") {
    facts.push(["First token", step.first_token ? span(step.first_token) : "not streamed"]);
    facts.push(["Tokens", `${number(step.input_tokens)} in, ${number(step.output_tokens)} out`]);
    if (step.input_tokens) facts.push(["Cached", `${Math.round((100 * step.cached_tokens) / step.input_tokens)} %`]);
    facts.push(["Cost", money(step.cost) || "no price known"]);
  }
  if (step.kind === "takeover" && step.name) facts.push(["Worker", step.name]);
  if (step.flushed) facts.push(["Waited for the disk before", span(step.flushed)]);
  if (step.flushed_after) facts.push(["Waited for the disk after", span(step.flushed_after)]);
  const given = Object.entries(step.arguments);
  return html`<div class="details">
    <dl class="facts">${facts.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
    ${given.length > 0 && html`<dl class="arguments">${given.map(([name, value]) => html`
      <dt>${revealed(name)}</dt><dd dir="auto">${revealed(typeof value === "string" ? value : JSON.stringify(value))}</dd>`)}</dl>`}
    ${step.text && (failureOf(step.text, step.status || "ok") ?? html`<pre class="shown" tabindex="0" dir="auto">${revealed(step.text)}</pre>`)}
    ${step.seq !== null && html`<p class="row"><button type="button" class="small" onClick=${() => fork(sessionKey, /** @type {number} */ (step.seq))}>Fork from here</button>
      ${step.kind === "model" && html`<button type="button" class="small" aria-expanded=${isShown} onClick=${() => setShown(!isShown)}>Show the request</button>`}</p>`}
    ${isShown && html`<${Sent} sessionKey=${sessionKey} seq=${step.seq} />`}
  </div>`;
}

/** The request of a model call. @param {{sessionKey: string, seq: number}} props */
function Sent({ sessionKey, seq }) {
  const [sent, setSent] = useState(/** @type {any} */ (null));
  const [error, setError] = useState("");
  const [isRaw, setRaw] = useState(false);
  useEffect(() => {
    api(sessionPath(sessionKey, `requests/${seq}`)).then(setSent, (failed) => setError(String(failed.message)));
  }, [sessionKey, seq]);
  if (!sent) return html`<${Waiting} data=${null} error=${error} />`;
  const { messages = [], tools = [], ...fields } = JSON.parse(sent.body);
  return html`<figure class="code request">
    <figcaption>${sent.notes.length ? "The request, rebuilt" : "The request as it was sent"}
      <span><button type="button" class="quiet small" aria-pressed=${isRaw} onClick=${() => setRaw(!isRaw)}>JSON</button><${CopyButton} text=${sent.body} /></span></figcaption>
    ${isRaw ? html`<pre class="shown" tabindex="0" dir="ltr">${JSON.stringify(JSON.parse(sent.body), null, 2)}</pre>` : html`<div class="parts">
      ${messages.map((/** @type {any} */ message, /** @type {number} */ index) => html`<${Part} key=${index} name=${message.role} text=${wordsOf(message)} />`)}
      ${tools.map((/** @type {any} */ tool) => html`<${Part} key=${tool.function?.name ?? tool.name} name="tool" text=${JSON.stringify(tool.function ?? tool, null, 2)}
        gist=${tool.function?.name ?? tool.name} />`)}
      <${Part} name="settings" text=${JSON.stringify(fields, null, 2)} gist=${Object.entries(fields).map(([name, value]) => `${name} ${typeof value === "string" ? value : JSON.stringify(value)}`).join(", ")} /></div>`}
    </figure>
    ${sent.notes.map((/** @type {string} */ words) => html`<p class="hint" key=${words}>${words}</p>`)}`;
}

/** A message or a tool of a request, collapsed at first. @param {{name: string, text: string, gist?: string}} props */
function Part({ name, text, gist }) {
  return html`<details><summary><span class="kind">${name}</span><span class="gist" dir="auto">${gist ?? text.trim().split("\n")[0].slice(0, 200)}</span>
    <span class="took">${number(text.length)}</span></summary><pre tabindex="0" dir="auto">${text}</pre></details>`;
}

/** Return the text of a message, with its calls. @param {any} message */
function wordsOf({ role, content, ...more }) {
  const text = typeof content === "string" ? content : content ? JSON.stringify(content, null, 2) : "";
  return [text, Object.keys(more).length ? JSON.stringify(more, null, 2) : ""].filter(Boolean).join("\n\n");
}
