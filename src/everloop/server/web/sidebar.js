/** The list of sessions with their current states, and the search over all conversations. */
import { html, classes, signal, useEffect, useState } from "./lib.js";
import { api, loggedIn, logout } from "./api.js";

const EVERY = 4000; // milliseconds between two requests of the list while the page is visible

/**
 * @typedef {{key: string, title: string, state: "running" | "waiting" | "failed" | "idle", updated_at: number}} Item
 */

export const sessions = signal(/** @type {Item[]} */ ([]));
export const questions = signal(0);
const hasList = signal(false);

/** The views that the sidebar links to. @type {[string, string][]} */
export const LINKS = [["jobs", "Jobs"], ["agents", "Agents"], ["memory", "Memory"], ["files", "Files"],
  ["channels", "Channels"], ["usage", "Usage"], ["log", "Log"], ["server", "Server"]];

const STATES = { running: "running", waiting: "waiting for you", failed: "failed", idle: "" };

let isReading = false;
let isStale = false;

/** Load the list of sessions. */
export async function refresh() {
  if (loggedIn.value === false || document.hidden) return;
  isStale = isReading;
  if (isReading) return;
  isReading = true;
  try {
    const list = await api("sessions");
    sessions.value = list.sessions;
    questions.value = list.questions;
    hasList.value = true;
  } catch {
    // The session's banner says that the connection is lost.
  }
  isReading = false;
  if (isStale) refresh();
}

/** Refresh the list while the page is visible. */
export function keepFresh() {
  refresh();
  const timer = setInterval(refresh, EVERY);
  document.addEventListener("visibilitychange", refresh);
  return () => {
    clearInterval(timer);
    document.removeEventListener("visibilitychange", refresh);
  };
}

/** Return the title of a session, or its key if it is not in the list. @param {string} key */
export const titleOf = (key) => sessions.value.find((one) => one.key === key)?.title ?? key;

/** @param {string} key */
export const sessionHash = (key) => `#/s/${encodeURIComponent(key)}`;

/**
 * @param {{current: string, view: string, isOpen: boolean, onClose: () => void, onTheme: () => void}} props
 */
export function Sidebar({ current, view, isOpen, onClose, onTheme }) {
  const [query, setQuery] = useState("");
  const [found, setFound] = useState(/** @type {any[] | null} */ (null));

  useEffect(() => {
    if (!query.trim()) {
      setFound(null);
      return;
    }
    const timer = setTimeout(async () => {
      const result = await api(`search?q=${encodeURIComponent(query)}`).catch(() => ({ found: [] }));
      setFound(result.found);
    }, 200);
    return () => clearTimeout(timer);
  }, [query]);

  return html`<nav class=${classes("sidebar", isOpen && "is-open")} aria-label="Sessions">
    <div class="head">
      <a class="brand" href="#/new" onClick=${onClose}><img src="/web/icon.svg" alt="" width="22" height="22" /> Everloop</a>
      <a class="button" href="#/new" onClick=${onClose}>New chat</a>
    </div>
    <input type="search" class="search" placeholder="Search everything" aria-label="Search all conversations"
      value=${query} onInput=${(/** @type {any} */ event) => setQuery(event.target.value)} />
    ${found ? html`<${Found} found=${found} query=${query} onClose=${onClose} />` : html`<${List} current=${current} onClose=${onClose} />`}
    <ul class="views">${LINKS.map(([name, title]) => html`<li key=${name}>
      <a href=${`#/${name}`} onClick=${onClose} aria-current=${name === view ? "page" : undefined}>${title}</a></li>`)}</ul>
    <div class="foot">
      <button class="quiet small" type="button" onClick=${onTheme}>Light or dark</button>
      <button class="quiet small" type="button" onClick=${logout}>Log out</button>
    </div>
  </nav>`;
}

/** @param {{current: string, onClose: () => void}} props */
function List({ current, onClose }) {
  if (hasList.value && !sessions.value.length) return html`<p class="hint">No sessions yet.</p>`;
  return html`<ul class="sessions">${sessions.value.map((one) => html`<li key=${one.key}>
    <a href=${sessionHash(one.key)} onClick=${onClose} aria-current=${one.key === current ? "page" : undefined}
      class=${`is-${one.state}`}>
      <span class="title" dir="auto">${one.title}</span>
      <span class="sub">${one.state !== "idle" && html`<span class="state">${STATES[one.state]}</span> · `}${ago(one.updated_at)}</span>
    </a></li>`)}</ul>`;
}

/** @param {{found: any[], query: string, onClose: () => void}} props */
function Found({ found, query, onClose }) {
  return html`<p class="hint" role="status">${found.length ? `${found.length} found` : `Nothing found for “${query}”.`}</p>
    <ul class="sessions">${found.map((one) => html`<li key=${`${one.session}:${one.seq}`}>
      <a href=${sessionHash(one.session)} onClick=${onClose}>
        <span class="title" dir="auto">${one.text.slice(0, 140)}</span>
        <span class="sub">${one.role === "user" ? "you" : "agent"} · ${ago(one.at)}</span>
      </a></li>`)}</ul>`;
}

/**
 * Describe how long ago something happened.
 * @param {number} at
 */
export function ago(at) {
  const minutes = Math.max(0, Date.now() / 1000 - at) / 60;
  if (minutes < 1) return "now";
  if (minutes < 60) return `${Math.floor(minutes)} min`;
  if (minutes < 24 * 60) return `${Math.floor(minutes / 60)} h`;
  return new Date(at * 1000).toLocaleDateString(undefined, { day: "numeric", month: "short" });
}
