/**
 * The service worker: serves the page's own files while the server is unreachable, and shows notifications. The server's
 * response always takes precedence, and responses of the API are not cached.
 */
const worker = /** @type {any} */ (globalThis);
const CACHE = "everloop";

worker.addEventListener("install", (/** @type {any} */ event) => event.waitUntil(keepFirstLoad().then(() => worker.skipWaiting())));

// Request the page while this worker starts.
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
 * Show a notification, unless the page is visible on this device.
 * @param {{title?: string, body?: string, session?: string, tag?: string}} told
 */
async function notify({ title = "Everloop", body = "", session = "", tag = "" }) {
  const pages = await worker.clients.matchAll({ type: "window" });
  if (pages.some((/** @type {any} */ page) => page.visibilityState === "visible")) return;
  await worker.registration.showNotification(title, { body, tag, data: session, icon: "/web/icon.svg" });
}

/** Open an address in an open page, or in a new one. @param {string} address */
async function open(address) {
  const [page] = await worker.clients.matchAll({ type: "window" });
  if (page) {
    await page.focus();
    if (await page.navigate(address).catch(() => null)) return;
  }
  await worker.clients.openWindow(address);
}

/** Cache the page and the files that its head names. */
async function keepFirstLoad() {
  const cache = await caches.open(CACHE);
  const page = await fetch("/");
  const names = (await page.clone().text()).matchAll(/(?:href|src)="(\/web\/[^"]+)"/g);
  await cache.put("/", page);
  await cache.addAll([...new Set([...names].map((found) => found[1]))]);
}

/**
 * Return the server's file, or the cached one while the server is unreachable.
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

/** Cache a file that has changed. @param {string} path @param {Response} response */
async function keep(path, response) {
  const cache = await caches.open(CACHE);
  const kept = await cache.match(path);
  if (kept?.headers.get("ETag") !== response.headers.get("ETag")) await cache.put(path, response);
}
