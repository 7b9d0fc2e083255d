/** Requests to the server: JSON, the login, and server-sent events. */
import { signal } from "./lib.js";

const PAGE_KEY = "everloop.page_key";

/** Whether the visitor is logged in; null until that is known. */
export const loggedIn = signal(/** @type {boolean | null} */ (localStorage.getItem(PAGE_KEY) ? null : false));

/** An error response of the server. */
export class ApiError extends Error {
  /**
   * @param {number} status
   * @param {string} message
   */
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** @returns {Record<string, string>} */
function headers() {
  return { "X-Everloop-Page": localStorage.getItem(PAGE_KEY) ?? "" };
}

/**
 * Send a request and read its JSON.
 * @param {string} path
 * @param {unknown} [body] if given, the request is a POST
 * @param {boolean} [keepalive] whether the request outlives the page
 * @returns {Promise<any>}
 */
export async function api(path, body, keepalive = false) {
  const options = body === undefined
    ? { headers: headers() }
    : {
        method: "POST",
        headers: { ...headers(), "Content-Type": "application/json" },
        body: JSON.stringify(body),
        keepalive,
      };
  const response = await fetch(`/api/${path}`, { ...options, cache: "no-store" });
  const data = await response.json().catch(() => ({}));
  if (response.status === 401 && path !== "login") loggedIn.value = false;
  else if (response.ok && path !== "login" && path !== "logout") loggedIn.value = true; // a login must first store its key
  if (!response.ok) throw new ApiError(response.status, data.error?.message ?? `the server answered ${response.status}`);
  return data;
}

/**
 * Read bytes.
 * @param {string} path
 */
export async function blob(path) {
  const response = await fetch(`/api/${path}`, { headers: headers(), cache: "no-store" });
  if (!response.ok) throw new ApiError(response.status, (await response.json().catch(() => ({}))).error?.message ?? `the server answered ${response.status}`);
  return response.blob();
}

/**
 * Return the path of a session's resource.
 * @param {string} key
 * @param {string} what
 */
export const sessionPath = (key, what) => `sessions/${encodeURIComponent(key)}/${what}`;

/**
 * Log in with the code of a one-time link, or with a token.
 * @param {{link: string} | {token: string}} proof
 */
export async function login(proof) {
  const { page_key: key } = await api("login", proof);
  localStorage.setItem(PAGE_KEY, key);
  loggedIn.value = true;
}

export async function logout() {
  if (localStorage.getItem("everloop.push")) await import("./push.js").then((push) => push.unsubscribe()).catch(() => undefined);
  await api("logout", {}).catch(() => undefined);
  localStorage.removeItem(PAGE_KEY);
  loggedIn.value = false;
}

/**
 * @typedef {{name: string, id: string, data: any}} FeedEvent
 */

/**
 * Read server-sent events until the stream ends or is aborted.
 * @param {string} path
 * @param {string} lastId
 * @param {AbortSignal} abort
 * @param {() => void} onOpen
 * @param {(events: FeedEvent[]) => void} onEvents
 */
export async function readEvents(path, lastId, abort, onOpen, onEvents) {
  const sent = lastId ? { ...headers(), "Last-Event-ID": lastId } : headers();
  const response = await fetch(`/api/${path}`, { headers: sent, signal: abort, cache: "no-store" });
  if (response.status === 401) loggedIn.value = false;
  if (!response.ok || !response.body) throw new ApiError(response.status, `the server answered ${response.status}`);
  onOpen();
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop() ?? "";
    const events = blocks.map(parseEvent).filter((event) => event !== null);
    if (events.length) onEvents(events);
  }
}

/**
 * @param {string} block
 * @returns {FeedEvent | null} null for a comment
 */
function parseEvent(block) {
  const event = { name: "", id: "", data: null };
  for (const line of block.split("\n")) {
    const colon = line.indexOf(": ");
    const [field, value] = [line.slice(0, colon), line.slice(colon + 2)];
    if (field === "event") event.name = value;
    else if (field === "id") event.id = value;
    else if (field === "data") event.data = JSON.parse(value);
  }
  return event.data === null ? null : event;
}
