/** Shared by the views: loading data, and formatting numbers and times. */
import { html, useEffect, useState } from "./lib.js";
import { api } from "./api.js";

/** Load the style sheet of the views once. */
export function loadStyle() {
  if (document.querySelector("link[data-views]")) return;
  const link = document.createElement("link");
  link.rel = "stylesheet";
  link.href = "/web/views.css";
  link.dataset.views = "";
  document.head.append(link);
}

/**
 * Load a resource of the API, again when its path changes or `reload` is called, and at an interval if one is given.
 * @param {string} path "" loads nothing
 * @param {number} [every] milliseconds
 */
export function useLoad(path, every = 0) {
  const [state, setState] = useState(/** @type {{path: string, data: any, error: string}} */ ({ path: "", data: null, error: "" }));
  const [count, setCount] = useState(0);
  useEffect(() => {
    if (!path) return;
    let isOver = false;
    const read = async () => {
      if (document.hidden) return;
      try {
        const data = await api(path);
        if (!isOver) setState({ path, data, error: "" });
      } catch (failed) {
        const error = String(/** @type {Error} */ (failed).message);
        if (!isOver) setState((before) => ({ path, data: before.path === path ? before.data : null, error }));
      }
    };
    read();
    const timer = every ? setInterval(read, every) : 0;
    return () => {
      isOver = true;
      clearInterval(timer);
    };
  }, [path, count, every]);
  const isNow = state.path === path;
  return { data: isNow ? state.data : null, error: isNow ? state.error : "", reload: () => setCount((before) => before + 1) };
}

/**
 * Track the action of a button: whether it is running, and its error.
 * @param {() => void} [onDone]
 */
export function useAction(onDone) {
  const [error, setError] = useState("");
  const [isBusy, setBusy] = useState(false);
  /** @param {() => Promise<unknown>} act */
  const run = async (act) => {
    setBusy(true);
    setError("");
    try {
      await act();
      onDone?.();
    } catch (failed) {
      setError(String(/** @type {Error} */ (failed).message));
    }
    setBusy(false);
  };
  return { run, error, isBusy };
}

/** @param {{data: any, error: string}} props */
export function Waiting({ data, error }) {
  if (error) return html`<p class="notice is-error" role="alert" dir="auto">${error}</p>`;
  return data ? null : html`<p class="hint" role="status">Loading…</p>`;
}

/**
 * Return a date and a time, which wrap only before the time.
 * @param {number} at
 */
export const when = (at) =>
  new Date(at * 1000).toLocaleString(undefined, { weekday: "short", day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" })
    .replace(/\s(?!\d{1,2}[:.]\d)/g, "\u00a0");

/** @param {number} seconds */
export function span(seconds) {
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 100) return `${seconds.toFixed(1)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return seconds < 172_800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86_400)} days`;
}

/** @param {number} count */
export const number = (count) => count.toLocaleString("en");

/** @param {number | null | undefined} cost */
export const money = (cost) => (cost === null || cost === undefined ? "" : `$${cost < 0.1 ? cost.toFixed(4) : cost.toFixed(2)}`);

/** @param {number} count */
export function bytes(count) {
  if (count < 1024) return `${count} B`;
  if (count < 1024 * 1024) return `${(count / 1024).toFixed(1)} KB`;
  return `${(count / 1024 / 1024).toFixed(1)} MB`;
}

/** @param {string} key */
export const sessionHash = (key) => `#/s/${encodeURIComponent(key)}`;

/**
 * @param {string} key
 * @param {string} [turn]
 */
export const timelineHash = (key, turn = "") => `#/timeline/${encodeURIComponent(key)}${turn && `/${turn}`}`;
