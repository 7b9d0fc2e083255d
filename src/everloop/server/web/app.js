/** The page: logs in, chooses the session by the address, and puts the parts together. */
import { html, render, signal, computed, effect, useEffect, useState } from "./lib.js";
import { login, loggedIn } from "./api.js";
import { Chat } from "./chat.js";
import { Session } from "./session.js";
import { Palette, Sidebar, keepFresh, questions, refresh, sessions } from "./sidebar.js";

const THEME = "everloop.theme";

const route = signal(location.hash);
const isLoggedOut = computed(() => loggedIn.value === false);
const current = signal(/** @type {Session | null} */ (null));

addEventListener("hashchange", () => (route.value = location.hash));

/** The key of the session in the address, if it names one. */
function keyOf(/** @type {string} */ hash) {
  return hash.startsWith("#/s/") ? decodeURIComponent(hash.slice(4)) : "";
}

function newKey() {
  const random = crypto.getRandomValues(new Uint8Array(5));
  return `web:${Date.now().toString(36)}-${Array.from(random, (byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}

/** Open the session in the address. */
function show() {
  const key = keyOf(route.value);
  const open = current.peek();
  if (open && open.key === key) return;
  open?.close();
  const session = new Session(key || newKey(), !key);
  current.value = session;
  session.open();
}

/** Log in with the link in the address, and take its code out of there. */
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

function Page() {
  const [isOpen, setOpen] = useState(false);
  const [hasPalette, setPalette] = useState(false);
  const session = current.value;

  useEffect(keepFresh, []);
  useEffect(() => {
    /** @param {KeyboardEvent} event */
    const onKey = (event) => {
      if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "k") {
        event.preventDefault();
        setPalette(true);
      }
    };
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  }, []);

  if (!session) return null;
  const title = sessions.value.find((one) => one.key === session.key)?.title ?? "New chat";
  return html`<a class="skip" href="#main" onClick=${(/** @type {Event} */ event) => {
      event.preventDefault();
      document.querySelector("textarea")?.focus();
    }}>Skip to the message</a>
    <${Sidebar} current=${session.key} isOpen=${isOpen} onClose=${() => setOpen(false)} onTheme=${toggleTheme} />
    ${isOpen && html`<div class="shade" onClick=${() => setOpen(false)}></div>`}
    <main id="main">
      <header class="bar">
        <button class="quiet menu" type="button" aria-label="Sessions" aria-expanded=${isOpen} onClick=${() => setOpen(!isOpen)}>
          <svg viewBox="0 0 16 16" aria-hidden="true"><path d="M2.5 4.5h11M2.5 8h11M2.5 11.5h11" /></svg>
          ${questions.value > 0 && html`<span class="count">${questions.value}</span>`}</button>
        <h1 dir="auto">${title}</h1>
        <button class="quiet small go" type="button" onClick=${() => setPalette(true)}>Go to… <kbd>Ctrl K</kbd></button>
      </header>
      <${Chat} session=${session} />
    </main>
    ${hasPalette && html`<${Palette} onClose=${() => setPalette(false)} />`}`;
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
// A new chat gets its address with its first message; and what happens in it changes the list.
effect(() => {
  const session = current.value;
  if (!session) return;
  const { turn, parked } = session.state.value;
  const isBegun = session.entries.value.length > 0 || session.sent.value.length > 0;
  if (isBegun && !location.hash.startsWith("#/s/")) {
    history.replaceState(null, "", `#/s/${encodeURIComponent(session.key)}`);
    route.value = location.hash;
  }
  if (isBegun || turn || parked) queueMicrotask(refresh);
});

render(html`<${App} error=${error} />`, /** @type {HTMLElement} */ (document.getElementById("app")));
