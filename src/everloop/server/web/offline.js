/**
 * The service worker: shows the page's own files while the server cannot be reached, and notifications. What the server
 * answers always comes first, and nothing of the API is kept.
 */
const worker = /** @type {any} */ (globalThis);
const CACHE = "everloop";

worker.addEventListener("install", (/** @type {any} */ event) => event.waitUntil(keepFirstLoad().then(() => worker.skipWaiting())));

// The page is asked for while this worker starts.
worker.addEventListener("activate", (/** @type {any} */ event) => event.waitUntil(worker.registration.navigationPreload?.enable()));

worker.addEventListener("fetch", (/** @type {any} */ event) => {
  const { request } = event;
  const { origin, pathname } = new URL(request.url);
  const isOwn = origin === location.origin && (pathname === "/" || pathname.startsWith("/web/"));
  if (isOwn && request.method === "GET") event.respondWith(fromServer(event, pathname));
});

worker.addEventListener("push", (/** @type {any} */ event) => event.waitUntil(notify(event.data?.json() ?? {})));

worker.addEventListener("notificationclick", (/** @type {any} */ event) => {
  event.notification.close();
  event.waitUntil(open(`/#/s/${encodeURIComponent(event.notification.data)}`));
});

/**
 * Show a notification, unless the page is seen here.
 * @param {{title?: string, body?: string, session?: string, tag?: string}} told
 */
async function notify({ title = "Everloop", body = "", session = "", tag = "" }) {
  const pages = await worker.clients.matchAll({ type: "window" });
  if (pages.some((/** @type {any} */ page) => page.visibilityState === "visible")) return;
  await worker.registration.showNotification(title, { body, tag, data: session, icon: "/web/icon.svg" });
}

/** Show an address in a page that is open, or in a new one. @param {string} address */
async function open(address) {
  const [page] = await worker.clients.matchAll({ type: "window" });
  if (page) {
    await page.focus();
    if (await page.navigate(address).catch(() => null)) return;
  }
  await worker.clients.openWindow(address);
}

/** Keep the page and what its head names. */
async function keepFirstLoad() {
  const cache = await caches.open(CACHE);
  const page = await fetch("/");
  const names = (await page.clone().text()).matchAll(/(?:href|src)="(\/web\/[^"]+)"/g);
  await cache.put("/", page);
  await cache.addAll([...new Set([...names].map((found) => found[1]))]);
}

/**
 * The server's file, or the one that is kept while the server is away.
 * @param {any} event
 * @param {string} path
 */
async function fromServer(event, path) {
  try {
    const response = (await event.preloadResponse) ?? (await fetch(event.request));
    if (response.ok) event.waitUntil(keep(path, response.clone()));
    return response;
  } catch (error) {
    const kept = await (await caches.open(CACHE)).match(path);
    if (kept) return kept;
    throw error;
  }
}

/** Keep a file that has changed. @param {string} path @param {Response} response */
async function keep(path, response) {
  const cache = await caches.open(CACHE);
  const kept = await cache.match(path);
  if (kept?.headers.get("ETag") !== response.headers.get("ETag")) await cache.put(path, response);
}
