/** The view of a session: its conversation and its questions. */
import { html, lazy, useLayoutEffect, useMemo, useRef, useState } from "./lib.js";
import { CopyButton, liveMarkdown, markdownOf } from "./markdown.js";
import { Composer } from "./composer.js";
import { ToolCard } from "./tools.js";
import { chunksOf, useWindow } from "./window.js";

const Pictures = lazy(async () => (await import("./pictures.js")).Pictures);
const NEAR = 120; // the view follows new text while it is this close to the end, in pixels

const ENDINGS = /** @type {Record<string, string>} */ ({
  cancelled: "Stopped.", aborted: "Aborted.", replaced: "Replaced by a newer message.", timeout: "The turn took too long.",
  max_rounds: "The limit of rounds was reached.", budget: "The budget is used up.", empty: "The model gave no answer.",
  repeating: "Stopped, because the same call kept failing.", abandoned: "Abandoned.",
});

/** @param {{session: import("./session.js").Session}} props */
export function Chat({ session }) {
  const scroller = useRef(/** @type {HTMLElement | null} */ (null));
  const follows = useRef(true);
  const last = useRef({ scrollTop: 0, scrollHeight: 0 });
  const entries = session.entries.value;
  const state = session.state.value;
  const isRunning = state.turn !== null && !state.parked;
  const chunks = useMemo(() => chunksOf(entries), [entries]);
  const list = useWindow(scroller, follows, chunks.map((chunk) => chunk.id));
  const current = useRef(list);
  current.current = list;

  useLayoutEffect(() => {
    const element = scroller.current;
    if (!element) return;
    const watcher = new ResizeObserver(() => current.current.restore());
    for (const one of [element, ...element.children]) watcher.observe(one); // also the element itself: a phone's keyboard shrinks it
    return () => watcher.disconnect();
  }, [session]);

  const earlier = () => {
    follows.current = false;
    list.hold();
    session.loadEarlier();
  };
  const onScroll = () => {
    const element = scroller.current;
    if (!element) return;
    const { scrollTop, scrollHeight, clientHeight } = element;
    // Stop following when the visitor scrolls up, but not when new text arrives faster than the view scrolls.
    if (scrollHeight - scrollTop - clientHeight < NEAR) follows.current = true;
    else if (scrollTop < last.current.scrollTop && scrollHeight === last.current.scrollHeight) follows.current = false;
    last.current = { scrollTop, scrollHeight };
    list.hold();
    list.look();
    if (!follows.current && scrollTop < 2 * clientHeight && session.first.value > 0) session.loadEarlier();
  };
  const waiting = [...state.waiting, ...session.sent.value.filter((one) => !state.waiting.some(({ id }) => id === one.id))];
  const isEmpty = session.loaded.value && !entries.length && !waiting.length;

  return html`<section class="chat" aria-label="Conversation">
    <div class="scroller" ref=${scroller} onScroll=${onScroll} tabindex="-1">
      <div class="log" role="log" aria-label="Messages" aria-busy=${isRunning}>
        ${!isEmpty && html`<h2 class="hidden">Messages</h2>`}
        ${session.first.value > 0 && html`<button class="quiet earlier" type="button" onClick=${earlier}>Show earlier messages</button>`}
        ${!session.loaded.value && html`<p class="hint" role="status">${session.isAway.value
          ? "The conversation appears when the server is back. What you write is kept until then." : "Loading…"}</p>`}
        ${isEmpty && html`<${Welcome} session=${session} />`}
        <${Entries} session=${session} entries=${entries} chunks=${chunks} list=${list} isRunning=${isRunning} />
        <${Live} session=${session} isRunning=${isRunning} />
        ${waiting.map((one) => html`<article class="message from-you is-waiting" key=${one.id} aria-label="You, waiting">
          <div class="bubble" dir="auto">${one.text}</div><p class="meta">${isRunning ? "the agent reads it at its next step" : "waiting"}</p></article>`)}
        ${session.notice.value && html`<p class="notice" role="status">${session.notice.value}</p>`}
      </div>
    </div>
    ${session.isAway.value && html`<p class="banner" role="status">The connection is lost. Trying again…</p>`}
    <${Composer} session=${session} isRunning=${isRunning} key=${session.key} />
  </section>`;
}

/** Suggestions for a first message: the label of the button, and how the message begins. */
const IDEAS = [
  ["What can you do?", "What can you do?"],
  ["Look around in the workspace", "What is in this workspace?"],
  ["Summarise a web page…", "Summarise this page: "],
  ["Remind me every Monday…", "Every Monday at 9, remind me to "],
];

/** @param {{session: import("./session.js").Session}} props */
function Welcome({ session }) {
  return html`<div class="welcome">
    <h2>What shall we do?</h2>
    <p>The agent works in its workspace with files, commands and the web. It asks first where your policy says so. You can
      close the page at any time: the work goes on, and the log keeps all of it.</p>
    <ul class="ideas" aria-label="Ideas">${IDEAS.map(([words, begins]) => html`<li key=${words}>
      <button type="button" onClick=${() => (session.idea.value = begins)}>${words}</button></li>`)}</ul>
  </div>`;
}

/**
 * Index the entries that belong to others: results, decisions and ends of turns.
 * @param {import("./session.js").Entry[]} entries
 */
function indexOf(entries) {
  const results = new Map(); // by call
  const decisions = new Map(); // by the position of the question
  const ends = new Map(); // of turns: the position of each end
  const firsts = new Map(); // of turns: the position of the entry that opened each
  let asked = /** @type {import("./session.js").Entry | null} */ (null);
  for (const entry of entries) {
    if (entry.kind === "result") results.set(entry.id, entry);
    else if (entry.kind === "user" && !firsts.has(entry.turn)) firsts.set(entry.turn, entry.seq);
    else if (entry.kind === "asked") asked = entry;
    else if (entry.kind === "decided" || entry.kind === "end") {
      if (entry.kind === "end") ends.set(entry.turn, entry.seq);
      if (asked && entry.kind === "decided") decisions.set(asked.seq, entry);
      asked = null;
    }
  }
  return { results, decisions, ends, firsts, asked };
}

/**
 * @param {{session: import("./session.js").Session, entries: import("./session.js").Entry[], chunks: ReturnType<typeof chunksOf>,
 *   list: ReturnType<typeof useWindow>, isRunning: boolean}} props
 */
function Entries({ session, entries, chunks, list, isRunning }) {
  const { results, decisions, ends, firsts, asked } = useMemo(() => indexOf(entries), [entries]);
  const openTurn = session.state.value.turn;
  const tools = session.tools.value;
  /** @param {import("./session.js").Entry} entry */
  const node = (entry) => {
    switch (entry.kind) {
      case "user":
        return html`<${Said} key=${entry.seq} session=${session} entry=${entry} isFirst=${firsts.get(entry.turn) === entry.seq} />`;
      case "answer":
        return html`<${Answer} key=${entry.seq} session=${session} entry=${entry} results=${results} tools=${tools}
          asked=${asked && asked.ids} end=${ends.get(entry.turn)} isOver=${entry.turn !== openTurn || (!isRunning && !asked)} />`;
      case "asked":
        return entry === asked && session.state.value.parked
          ? html`<${Question} key=${entry.seq} session=${session} entry=${entry} />`
          : html`<${Decided} key=${entry.seq} decided=${decisions.get(entry.seq)} />`;
      case "end":
        return html`<${Ended} key=${entry.seq} entry=${entry} />`;
      case "note":
        return html`<p class="notice" key=${entry.seq} dir="auto">${entry.text}</p>`;
      case "new":
        return html`<p class="divider" key=${entry.seq}><span>New conversation</span></p>`;
      case "compacted":
        return html`<p class="divider" key=${entry.seq}><span>${entry.summary ? "The older part is summarised" : "Long results are set aside"}</span></p>`;
      default:
        return null;
    }
  };
  // Entries that scroll back into the document must not be announced by a screen reader.
  return html`<div class="entries" ref=${list.box}>
    <div key="before" style=${{ height: `${list.before}px` }}></div>
    ${chunks.slice(list.from, list.to).map((chunk) => html`<div class="chunk" key=${chunk.id} data-chunk=${chunk.id}
      aria-live=${chunk === chunks[chunks.length - 1] ? undefined : "off"}>${chunk.entries.map(node)}</div>`)}
    <div key="after" style=${{ height: `${list.after}px` }}></div>
  </div>`;
}

/**
 * A small button below a message.
 * @param {{label: string, act: (actions: typeof import("./actions.js")) => Promise<unknown>, session: import("./session.js").Session}} props
 */
function Act({ label, act, session }) {
  const run = () => import("./actions.js").then(act).catch((failed) => (session.notice.value = String(failed.message)));
  return html`<button type="button" class="quiet small" onClick=${run}>${label}</button>`;
}

/** @param {{session: import("./session.js").Session, entry: import("./session.js").Entry, isFirst: boolean}} props */
function Said({ session, entry, isFirst }) {
  if (!entry.text && !entry.images) return null;
  if (entry.inside) {
    return html`<details class="inside"><summary>A message from inside the system</summary><div dir="auto">${entry.text}</div></details>`;
  }
  if (entry.job) {
    const [first, ...rest] = entry.text.split("\n");
    return html`<details class="inside"><summary dir="auto">Scheduled: ${first}</summary><div dir="auto">${[...rest, entry.note]
      .join("\n").trim()}</div></details>`;
  }
  return html`<article class="message from-you" aria-label="You">
    ${entry.images > 0 && html`<${Pictures} sessionKey=${session.key} seq=${entry.seq} count=${entry.images} />`}
    <div class="said"><div class="bubble" dir="auto">${entry.text}</div>
    ${isFirst && entry.turn && html`<p class="acts">
      <${Act} label="Edit" session=${session} act=${(/** @type {any} */ actions) => actions.fork(session.key, entry.seq - 1, entry.text)} />
      <${Act} label="Retry" session=${session} act=${(/** @type {any} */ actions) => actions.fork(session.key, entry.seq)} /></p>`}</div></article>`;
}

/** @param {{session: import("./session.js").Session, entry: import("./session.js").Entry, results: Map<string, any>, tools: Record<string, any>, asked: string[] | null, isOver: boolean, end: number | undefined}} props */
function Answer({ session, entry, results, tools, asked, isOver, end }) {
  const calls = /** @type {import("./session.js").Call[]} */ (entry.calls ?? []);
  return html`<article class="message from-agent" aria-label="Agent">
    ${entry.reasoning && html`<${Reasoning} text=${entry.reasoning} />`}
    ${entry.content && markdownOf(entry, entry.content)}
    ${calls.map((call) => html`<${ToolCard} key=${call.id} sessionKey=${session.key} call=${call} result=${results.get(call.id)} tool=${tools[call.id]}
      isAsked=${asked?.includes(call.id) ?? false} isOver=${isOver} />`)}
    ${!calls.length && html`<p class="meta">${facts(entry)}${entry.turn && html`${facts(entry) && " · "}<a
      href=${`#/timeline/${encodeURIComponent(session.key)}/${entry.turn}`}>Timeline</a>`}
      ${entry.content && html`<${CopyButton} text=${entry.content} label="Copy the answer" />`}
      ${end && html`<${Act} label="Fork from here" session=${session} act=${(/** @type {any} */ actions) => actions.fork(session.key, end)} />`}</p>`}
  </article>`;
}

/**
 * Return the model, the tokens and the time of an answer.
 * @param {import("./session.js").Entry} entry
 */
function facts(entry) {
  const tokens = entry.usage?.total_tokens;
  return [entry.model, tokens && `${tokens.toLocaleString("en")} tokens`, entry.seconds >= 0.1 && `${entry.seconds.toFixed(1)} s`]
    .filter(Boolean).join(" · ");
}

/** @param {{text: string, isOpen?: boolean}} props */
function Reasoning({ text, isOpen = false }) {
  return html`<details class="reasoning" open=${isOpen}><summary>Thoughts</summary><div dir="auto">${text}</div></details>`;
}

/** @param {{entry: import("./session.js").Entry}} props */
function Ended({ entry }) {
  if (entry.reason === "answer" || entry.reason === "handed") return null;
  if (entry.reason === "error") return html`<p class="notice is-error" role="alert" dir="auto">${entry.error || entry.text}</p>`;
  return html`<p class="notice" dir="auto">${ENDINGS[entry.reason] ?? entry.text}</p>`;
}

/** @param {{decided: any}} props */
function Decided({ decided }) {
  if (!decided) return null;
  const what = decided.allowed ? (decided.always ? "Approved for this session" : "Approved") : "Denied";
  return html`<p class="notice">${what}${decided.by ? ` by ${decided.by}` : ""}${decided.note ? `: ${decided.note}` : "."}</p>`;
}

/** @param {{session: import("./session.js").Session, entry: import("./session.js").Entry}} props */
function Question({ session, entry }) {
  const [note, setNote] = useState("");
  const [error, setError] = useState("");
  const [isSent, setSent] = useState(false);
  /** @param {{allow: boolean, always?: boolean}} answer */
  const answer = async (answer) => {
    setSent(true);
    try {
      await session.answer(entry.seq, { ...answer, note: note.trim() });
    } catch (failed) {
      setError(String(/** @type {Error} */ (failed).message));
      setSent(false);
    }
  };
  const [first, ...rest] = /** @type {string[]} */ (entry.question.trim().split("\n"));
  return html`<div class="question" role="group" aria-label="The agent asks">
    <p class="asks" dir="auto">${first}</p>
    ${rest.length > 0 && html`<pre class="words" tabindex="0" dir="auto">${rest.join("\n").trim().split("\n").map((line) =>
      html`<span class=${line.startsWith("(") && "aside"}>${`${line}\n`}</span>`)}</pre>`}
    <label class="note"><span>A note for the agent (optional)</span>
      <input type="text" value=${note} onInput=${(/** @type {any} */ event) => setNote(event.target.value)} /></label>
    <div class="row answers">
      <button class="primary" type="button" disabled=${isSent} onClick=${() => answer({ allow: true })}>Approve</button>
      ${entry.grants?.length > 0 && html`<button type="button" disabled=${isSent}
        onClick=${() => answer({ allow: true, always: true })}>Always in this session</button>`}
      <button class="danger" type="button" disabled=${isSent} onClick=${() => answer({ allow: false })}>Deny</button>
    </div>
    ${error && html`<p class="is-error" role="alert">${error}</p>`}
  </div>`;
}

/** @param {{session: import("./session.js").Session, isRunning: boolean}} props */
function Live({ session, isRunning }) {
  const reasoning = session.reasoning.value;
  if (!isRunning && !session.hasLive.value) return null;
  return html`<article class="message from-agent is-live" aria-label="Agent, writing">
    ${reasoning && html`<${Reasoning} text=${reasoning} isOpen=${!session.hasLive.value} />`}
    ${session.hasLive.value && html`<${LiveMarkdown} live=${session.live} />`}
    ${isRunning && html`<p class="working" role="status"><span class="dots" aria-hidden="true"><i></i><i></i><i></i></span>
      <span class="hidden">The agent is working</span></p>`}
  </article>`;
}

/** @param {{live: import("./session.js").LiveText}} props */
function LiveMarkdown({ live }) {
  const root = useRef(/** @type {HTMLElement | null} */ (null));
  useLayoutEffect(() => {
    const element = root.current;
    if (!element) return;
    let write = liveMarkdown(element);
    write(live.text);
    const listen = (/** @type {string | null} */ piece) => {
      if (piece === null) write = liveMarkdown(element);
      else write(piece);
    };
    live.listeners.add(listen);
    return () => {
      live.listeners.delete(listen);
    };
  }, [live]);
  return html`<div class="markdown" dir="auto" ref=${root}></div>`;
}
