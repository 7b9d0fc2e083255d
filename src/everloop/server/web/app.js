/** The page: logs in, opens the session or the view that the address names, and lays out the parts. */
import { html, lazy, render, signal, computed, effect, useEffect, useRef, useState } from "./lib.js";
import { login, loggedIn } from "./api.js";
import { Chat } from "./chat.js";
import { Session } from "./session.js";
import { Sidebar, keepFresh, questions, refresh, sessions } from "./sidebar.js";

const THEME = "everloop.theme";

const route = signal(location.hash);
const isLoggedOut = computed(() => loggedIn.value === false);
const current = signal(/** @type {Session | null} */ (null));

addEventListener("hashchange", () => (route.value = location.hash));

/** Return the key of the session that the address names, if any. */
function keyOf(/** @type {string} */ hash) {
  return hash.startsWith("#/s/") ? decodeURIComponent(hash.slice(4)) : "";
}

/**
 * The views next to the chat: their titles, and their modules, which are loaded on first use.
 * @type {Record<string, {title: string, load: () => Promise<{View: any}>}>}
 */
const VIEWS = {
  timeline: { title: "Timeline", load: () => import("./timeline.js") },
  changes: { title: "Changes", load: () => import("./changes.js") },
  jobs: { title: "Scheduled jobs", load: () => import("./jobs.js") },
  agents: { title: "Sub-agents", load: () => import("./agents.js") },
  memory: { title: "Memory and skills", load: () => import("./memory.js") },
  files: { title: "Files", load: () => import("./files.js") },
  log: { title: "Requests", load: () => import("./log.js") },
  usage: { title: "Usage", load: () => import("./usage.js") },
  channels: { title: "Channels", load: () => import("./channels.js") },
  server: { title: "Server", load: () => import("./server.js") },
  file: { title: "Files", load: () => import("./files.js") },
};

/** Return the name of the view in the address and what follows it; null if the address names a session. */
function viewOf(/** @type {string} */ hash) {
  const [name, ...rest] = hash.replace(/^#\//, "").split("/");
  return Object.hasOwn(VIEWS, name) ? { name, rest: rest.map(decodeURIComponent) } : null;
}

const Palette = lazy(async () => (await import("./palette.js")).Palette);
const SessionMenu = lazy(async () => (await import("./actions.js")).SessionMenu);

function newKey() {
  const random = crypto.getRandomValues(new Uint8Array(5));
  return `web:${Date.now().toString(36)}-${Array.from(random, (byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}

/** Open the session that the address names. */
function show() {
  const open = current.peek();
  if (viewOf(route.value) && open) return;
  const key = keyOf(route.value);
  if (open && open.key === key) return;
  open?.close();
  const session = new Session(key || newKey(), !key);
  current.value = session;
  session.open();
}

/** Log in with the one-time link in the address, and remove its code from the address. */
async function redeemLink() {
  const code = new URLSearchParams(location.hash.slice(1)).get("link");
  if (!code) return "";
  history.replaceState(null, "", location.pathname);
  route.value = "";
  try {
    await login({ link: code });
    return "";
  } catch (error) {
    return loggedIn.value ? "" : String(/** @type {Error} */ (error).message);
  }
}

// ---------------------------------------------------------------------------------------------- themes

function setTheme(/** @type {string | null} */ theme) {
  if (theme) document.documentElement.dataset.theme = theme;
}

function toggleTheme() {
  const now = document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  const next = now === "dark" ? "light" : "dark";
  localStorage.setItem(THEME, next);
  setTheme(next);
}

// ---------------------------------------------------------------------------------------------- views

/** Return the title of the open session: the one in the list, or its first words if it is archived. @param {Session} session */
function titleOfOpen(session) {
  const listed = sessions.value.find((one) => one.key === session.key)?.title;
  return listed ?? session.entries.value.find((entry) => entry.kind === "user" && !entry.inside)?.text.slice(0, 80) ?? "New chat";
}

/** @param {{error: string}} props */
function Login({ error: before }) {
  const [token, setToken] = useState("");
  const [error, setError] = useState(before);
  /** @param {Event} event */
  const submit = async (event) => {
    event.preventDefault();
    try {
      await login({ token });
    } catch (failed) {
      setError(String(/** @type {Error} */ (failed).message));
    }
  };
  return html`<main class="login"><form onSubmit=${submit}>
    <h1><img src="/web/icon.svg" alt="" width="32" height="32" /> Everloop</h1>
    <p>On this machine, open the link that <code>everloop link</code> prints. It works once.</p>
    <p>Elsewhere, log in with a token, which <code>everloop token add NAME</code> makes.</p>
    <label>Token<input type="password" autocomplete="current-password" value=${token} required
      onInput=${(/** @type {any} */ event) => setToken(event.target.value)} /></label>
    <button class="primary" type="submit">Log in</button>
    ${error && html`<p class="is-error" role="alert">${error}</p>`}
  </form></main>`;
}

/** A view, loaded with its style sheet on first use. @param {{name: string, rest: string[]}} props */
function Loaded({ name, rest }) {
  const [view, setView] = useState(/** @type {{name: string, View: any, error: string}} */ ({ name: "", View: null, error: "" }));
  useEffect(() => {
    let isOver = false;
    Promise.all([VIEWS[name].load(), import("./views.js")]).then(
      ([{ View }, { loadStyle }]) => {
        loadStyle();
        if (!isOver) setView({ name, View, error: "" });
      },
      () => !isOver && setView({ name, View: null, error: "The view could not be loaded. Is the server running?" }),
    );
    return () => {
      isOver = true;
    };
  }, [name]);
  if (view.name !== name) return html`<p class="hint" role="status">Loading…</p>`;
  return view.error ? html`<p class="hint is-error" role="alert">${view.error}</p>` : html`<${view.View} name=${name} rest=${rest} />`;
}

function Page() {
  const [isOpen, setOpen] = useState(false);
  const [hasPalette, setPalette] = useState(false);
  const [hasMenu, setMenu] = useState(false);
  const focused = useRef(/** @type {HTMLElement | null} */ (null));
  const session = current.value;
  const openPalette = () => {
    // Keys pressed before the palette has loaded must not reach the composer.
    focused.current = document.activeElement instanceof HTMLElement ? document.activeElement : null;
    focused.current?.blur();
    setPalette(true);
  };
  const closePalette = () => {
    setPalette(false);
    focused.current?.focus();
  };

  useEffect(keepFresh, []);
  useEffect(() => {
    /** @param {KeyboardEvent} event */
    const onKey = (event) => {
      if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "k") {
        event.preventDefault();
        openPalette();
      }
    };
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  }, []);

  if (!session) return null;
  const view = viewOf(route.value);
  const title = view ? VIEWS[view.name].title : titleOfOpen(session);
  return html`<a class="skip" href="#main" onClick=${(/** @type {Event} */ event) => {
      event.preventDefault();
      /** @type {HTMLElement | null} */ (document.querySelector("textarea, #main a, #main button"))?.focus();
    }}>Skip to the content</a>
    <${Sidebar} current=${view ? "" : session.key} view=${view?.name ?? ""} isOpen=${isOpen} onClose=${() => setOpen(false)} onTheme=${toggleTheme} />
    ${isOpen && html`<div class="shade" onClick=${() => setOpen(false)}></div>`}
    <main id="main">
      <header class="bar">
        <button class="quiet menu" type="button" aria-label="Sessions" aria-expanded=${isOpen} onClick=${() => setOpen(!isOpen)}>
          <svg viewBox="0 0 16 16" aria-hidden="true"><path d="M2.5 4.5h11M2.5 8h11M2.5 11.5h11" /></svg>
          ${questions.value > 0 && html`<span class="count">${questions.value}</span>`}</button>
        <h1 dir="auto">${title}</h1>
        ${!view && session.entries.value.length > 0 && html`<a class="quiet small button go" href=${`#/timeline/${encodeURIComponent(session.key)}`}>Timeline</a>
          <a class="quiet small button go" href=${`#/changes/${encodeURIComponent(session.key)}`}>Changes</a>
          <button class="quiet small" type="button" aria-haspopup="dialog" onClick=${() => setMenu(true)}>Session…</button>`}
        <button class="quiet small go" type="button" onClick=${openPalette}>Go to… <kbd>Ctrl K</kbd></button>
      </header>
      ${view ? html`<${Loaded} name=${view.name} rest=${view.rest} />` : html`<${Chat} session=${session} />`}
    </main>
    ${hasMenu && html`<${SessionMenu} sessionKey=${session.key} onClose=${() => setMenu(false)} />`}
    ${hasPalette && html`<${Palette} onClose=${closePalette} />`}`;
}

/** @param {{error: string}} props */
function App({ error }) {
  if (isLoggedOut.value) return html`<${Login} error=${error} />`;
  return html`<${Page} />`;
}

// ---------------------------------------------------------------------------------------------- start

setTheme(localStorage.getItem(THEME));
const error = await redeemLink();

effect(() => {
  if (!isLoggedOut.value) show();
});
effect(() => {
  document.title = questions.value ? `(${questions.value}) Everloop` : "Everloop";
});
// A new chat gets its address with its first message; later events in it change the list of sessions.
effect(() => {
  const session = current.value;
  if (!session) return;
  const { turn, parked } = session.state.value;
  const isBegun = session.entries.value.length > 0 || session.sent.value.length > 0;
  if (isBegun && !location.hash.startsWith("#/s/") && !viewOf(location.hash)) {
    history.replaceState(null, "", `#/s/${encodeURIComponent(session.key)}`);
    route.value = location.hash;
  }
  if (isBegun || turn || parked) queueMicrotask(refresh);
});

/** Cache the page's files, so that it opens while the server is away. The only Trusted Types policy allows only this path. */
async function keepOffline() {
  const policy = /** @type {any} */ (globalThis).trustedTypes?.createPolicy("everloop-worker", { createScriptURL: () => "/web/offline.js" });
  await navigator.serviceWorker?.register(policy?.createScriptURL("") ?? "/web/offline.js", { scope: "/" });
}

if (localStorage.getItem("everloop.push") && !isLoggedOut.value) import("./push.js").then((push) => push.resume(), () => undefined);
addEventListener("load", () => keepOffline().catch(() => undefined), { once: true });
if (document.readyState === "complete") keepOffline().catch(() => undefined);
document.querySelector(".starting")?.remove();
render(html`<${App} error=${error} />`, /** @type {HTMLElement} */ (document.getElementById("app")));
