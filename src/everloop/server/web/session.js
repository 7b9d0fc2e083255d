/** The client-side state of a session, derived from the events of its feed. */
import { batch, signal } from "./lib.js";
import { ApiError, api, loggedIn, readEvents, sessionPath } from "./api.js";

const LAST = 200; // entries to load when a session is opened
const FIRST_PAUSE = 300;
const LONGEST_PAUSE = 8000;

/**
 * @typedef {{id: string, name: string, arguments?: Record<string, any>, error?: string}} Call
 * @typedef {{seq: number, turn: string | null, at: number, kind: string, [field: string]: any}} Entry
 * @typedef {{status: string, seconds?: number, output: string}} ToolState
 * @typedef {{turn: string | null, parked: boolean, waiting: {id: string, text: string}[]}} State
 */

/** The text that is being streamed. Listeners receive each piece, so that no piece renders the whole text again. */
export class LiveText {
  text = "";
  /** @type {Set<(piece: string | null) => void>} */
  listeners = new Set();

  /** @param {string} piece */
  add(piece) {
    this.text += piece;
    for (const tell of this.listeners) tell(piece);
  }

  /** Start the text again. */
  restart() {
    this.text = "";
    for (const tell of this.listeners) tell(null);
  }
}

export class Session {
  /**
   * @param {string} key
   * @param {boolean} [isNew] whether it has no messages yet
   */
  constructor(key, isNew = false) {
    this.key = key;
    this.draft = `everloop.draft.${isNew ? "new" : key}`;
    this.entries = signal(/** @type {Entry[]} */ ([]));
    this.first = signal(0); // the position before the first loaded entry
    this.state = signal(/** @type {State} */ ({ turn: null, parked: false, waiting: [] }));
    this.tools = signal(/** @type {Record<string, ToolState>} */ ({}));
    this.live = new LiveText();
    this.hasLive = signal(false);
    this.reasoning = signal("");
    this.connected = signal(false);
    this.isAway = signal(false); // connecting failed, or the connection was lost
    this.loaded = signal(false);
    this.notice = signal("");
    this.idea = signal(""); // how to begin a message
    /** Sent messages that are not in the log yet. */
    this.sent = signal(/** @type {{id: string, text: string}[]} */ ([]));
    this.lastId = "";
    /** @type {import("./api.js").FeedEvent[]} */
    this.arrived = []; // events that are not processed yet
    this.isLoading = false; // earlier entries
    this.abort = new AbortController();
  }

  /** Subscribe to the session until `close`, and reconnect whenever the connection is lost. */
  async open() {
    const { signal: aborted } = this.abort;
    let pause = FIRST_PAUSE;
    while (!aborted.aborted && loggedIn.value !== false) {
      const onOpen = () => {
        pause = FIRST_PAUSE;
        this.connected.value = true;
        this.isAway.value = false;
      };
      try {
        const path = `${sessionPath(this.key, "feed")}?last=${LAST}`;
        await readEvents(path, this.lastId, aborted, onOpen, (events) => this.arrive(events));
      } catch (error) {
        if (error instanceof ApiError && error.status === 400) this.lastId = "";
      }
      this.flush(); // before the next connection resumes from the last id
      this.connected.value = false;
      this.isAway.value = true;
      if (!aborted.aborted) await sleep(pause, aborted);
      pause = Math.min(pause * 1.7, LONGEST_PAUSE);
    }
  }

  close() {
    this.abort.abort();
  }

  /**
   * Process events with the next frame, so that the page is rendered once, however many there are.
   * @param {import("./api.js").FeedEvent[]} events
   */
  arrive(events) {
    if (!this.arrived.length) nextFrame(() => this.flush());
    this.arrived.push(...events);
  }

  flush() {
    const events = joined(this.arrived);
    this.arrived = [];
    if (events.length) batch(() => events.forEach(this.take, this));
  }

  /** @param {import("./api.js").FeedEvent} event */
  take({ name, id, data }) {
    if (id) this.lastId = id;
    switch (name) {
      case "start":
        if (!this.entries.value.length) this.first.value = data.after;
        this.entries.value = this.entries.value.filter((entry) => entry.seq <= data.after);
        if (!data.chars) this.clearLive();
        break;
      case "entry":
        this.takeEntry(data);
        break;
      case "text":
        this.live.add(data.text);
        this.hasLive.value = true;
        break;
      case "restart":
        this.live.restart();
        break;
      case "reasoning":
        this.reasoning.value += data.text;
        break;
      case "tool":
        this.setTool(data.call, { status: data.status, seconds: data.seconds });
        break;
      case "progress":
        this.setTool(data.call, { output: (this.tools.value[data.call]?.output ?? "") + data.text });
        break;
      case "compacting":
        this.notice.value = "Summarising the older part of the conversation…";
        break;
      case "state": {
        this.state.value = data;
        this.loaded.value = true;
        const waiting = new Set(data.waiting.map((/** @type {{id: string}} */ one) => one.id));
        this.sent.value = this.sent.value.filter((one) => !waiting.has(one.id));
        break;
      }
    }
  }

  /** @param {Entry} entry */
  takeEntry(entry) {
    this.entries.value = [...this.entries.value, entry];
    this.clearLive();
    this.notice.value = "";
    if (entry.kind === "user") {
      // It no longer waits; without this it would be shown twice until the next state arrives.
      const { waiting } = this.state.value;
      this.sent.value = without(this.sent.value, entry.text);
      if (waiting.length) this.state.value = { ...this.state.value, waiting: without(waiting, entry.text) };
    }
  }

  clearLive() {
    this.live = new LiveText();
    this.hasLive.value = false;
    this.reasoning.value = "";
  }

  /**
   * @param {string} call
   * @param {Partial<ToolState>} change
   */
  setTool(call, change) {
    const before = this.tools.value[call] ?? { status: "running", output: "" };
    this.tools.value = { ...this.tools.value, [call]: { ...before, ...change } };
  }

  /** Load earlier entries. */
  async loadEarlier() {
    if (this.isLoading) return;
    this.isLoading = true;
    try {
      const page = await api(`${sessionPath(this.key, "log")}?before=${this.first.value + 1}&limit=${LAST}`);
      batch(() => {
        this.entries.value = [...page.entries, ...this.entries.value];
        this.first.value = page.entries.length ? page.entries[0].seq - 1 : 0;
      });
    } catch {
      // The next scroll requests them again; the banner says that the connection is lost.
    }
    this.isLoading = false;
  }

  /**
   * Send a message. A running turn gets it at its next round.
   * @param {string} text
   * @param {string[]} [media] paths of uploaded files
   */
  async send(text, media = []) {
    const id = crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`;
    const before = this.entries.value.at(-1)?.seq ?? 0;
    const { id: taken, reply } = await api(sessionPath(this.key, "messages"), { text, id, busy: "steer", media });
    this.draft = `everloop.draft.${this.key}`;
    if (reply) this.notice.value = reply;
    else if (!this.entries.value.some((entry) => entry.kind === "user" && entry.seq > before && entry.text.trim().startsWith(text.trim()))) {
      this.sent.value = [...this.sent.value, { id: taken, text }];
    }
  }

  async stop() {
    await api(sessionPath(this.key, "stop"), {});
  }

  /**
   * Answer a question.
   * @param {number} question
   * @param {{allow: boolean, always?: boolean, note?: string}} answer
   */
  async answer(question, answer) {
    await api(sessionPath(this.key, "answer"), { question, ...answer });
  }
}

/**
 * Return the messages without the first one with which a text of the log begins.
 * @param {{id: string, text: string}[]} messages
 * @param {string} text
 */
function without(messages, text) {
  const index = messages.findIndex((one) => text.trim().startsWith(one.text.trim()));
  return index < 0 ? messages : messages.toSpliced(index, 1);
}

/**
 * Join consecutive text events into one.
 * @param {import("./api.js").FeedEvent[]} events
 */
function joined(events) {
  /** @type {import("./api.js").FeedEvent[]} */
  const found = [];
  for (const event of events) {
    const last = found[found.length - 1];
    if (last?.name === event.name && (event.name === "text" || event.name === "reasoning")) {
      found[found.length - 1] = { ...event, data: { ...event.data, text: last.data.text + event.data.text } };
    } else found.push(event);
  }
  return found;
}

/**
 * Run with the next frame, or after a short time if the page is hidden and no frames are drawn.
 * @param {() => void} run
 */
function nextFrame(run) {
  const once = () => {
    cancelAnimationFrame(frame);
    clearTimeout(timer);
    run();
  };
  const frame = requestAnimationFrame(once);
  const timer = setTimeout(once, 200);
}

/**
 * @param {number} milliseconds
 * @param {AbortSignal} aborted
 */
function sleep(milliseconds, aborted) {
  return new Promise((resolve) => {
    const done = () => {
      clearTimeout(timer);
      removeEventListener("online", done);
      resolve(undefined);
    };
    const timer = setTimeout(done, milliseconds);
    addEventListener("online", done);
    aborted.addEventListener("abort", done, { once: true });
  });
}
